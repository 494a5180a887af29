"""What ``synthetic_users`` guarantees, and that users are alike in themselves."""

from __future__ import annotations

import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from accounting.core.validation import InputError
from pipelines.tables.synthetic import COLUMNS, SynthOptions, write_synth
from pipelines.tables.synthetic_users import (
    _PROFILE,
    USER,
    SynthUserOptions,
    Users,
    write_synth_users,
)

ROWS, MEAN = 40_000, 8.0
PARSE = pa.csv.ParseOptions(delimiter="\t", quote_char=False)


def write(out: pathlib.Path, *, rows: int = ROWS) -> pa.Table:
    options = SynthUserOptions(num_rows=rows, rows_per_user=MEAN)
    path = write_synth_users(out, options)
    nulls = pa.csv.ConvertOptions(strings_can_be_null=True)
    return pa.csv.read_csv(path, parse_options=PARSE, convert_options=nulls)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """40,000 rows of 5,000 users.  Not to be changed."""
    return write(tmp_path_factory.mktemp("synth") / "out")


def _arrays(table: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    names = [f"C{number}" for number in range(1, 27)]
    codes = [table[name].combine_chunks().dictionary_encode().indices for name in names]
    categories = np.stack([each.fill_null(-1).to_numpy() for each in codes], axis=1)
    return table[USER].to_numpy(), table["label"].to_numpy(), categories


def test_the_mean_is_public_and_a_few_users_have_very_many_rows(
    table: pa.Table,
) -> None:
    users, _, _ = _arrays(table)
    assert SynthUserOptions(num_rows=ROWS, rows_per_user=MEAN).num_users == 5000
    counts = np.bincount(users)
    assert len(counts) <= 5000
    # Sums of uniform numbers below r / 5000, cubed: of standard deviation below 0.0025.
    for share in (0.01, 0.1, 0.5):
        busiest = counts[: round(5000 * share)].sum() / ROWS
        assert busiest == pytest.approx(share ** (1 / 3), abs=0.0125)
    assert 0.002 < 1 - np.count_nonzero(counts) / 5000 < 0.04


def test_rows_are_those_without_users_but_for_what_users_share(
    table: pa.Table, tmp_path: pathlib.Path
) -> None:
    path = write_synth(tmp_path / "raw", SynthOptions(num_rows=2000))
    found = pa.csv.read_csv(
        path,
        read_options=pa.csv.ReadOptions(column_names=COLUMNS),
        convert_options=pa.csv.ConvertOptions(strings_can_be_null=True),
        parse_options=PARSE,
    )
    rows = table.slice(0, 2000)
    shared = {"label", *(f"C{number + 1}" for number in _PROFILE)}
    for name in COLUMNS:
        if name not in shared:
            assert rows[name].to_pylist() == found[name].to_pylist()


def test_rows_of_a_user_are_alike(table: pa.Table) -> None:
    users, labels, categories = _arrays(table)
    order = np.argsort(users, kind="stable")
    same = np.flatnonzero(np.diff(users[order]) == 0)
    one, next_one = order[same], order[same + 1]
    profile = categories[:, list(_PROFILE)]
    # A category that is missing is so by row.
    differ = (profile[one] != profile[next_one]) & (profile[one] >= 0)
    assert not (differ & (profile[next_one] >= 0)).any()
    assert len(np.unique(profile, axis=0)) > 4000
    # 35,000 pairs: a correlation of 0 has standard deviation 0.0054.
    assert np.corrcoef(labels[one], labels[next_one])[0, 1] > 0.1


def test_users_have_a_taste_that_no_column_tells() -> None:
    users = Users(seed=0, num_users=5000)
    found = dict(zip(users.of_block(0), users.in_common(0).log_odds, strict=True))
    again = dict(zip(users.of_block(1), users.in_common(1).log_odds, strict=True))
    both = sorted(set(found) & set(again))
    assert [found[user] for user in both] == [again[user] for user in both]
    # 4,500 users, of a law of standard deviation 0.5 pi / 3**0.5 = 0.907.
    assert np.std(list(found.values())) == pytest.approx(0.907, rel=0.08)
    other = Users(seed=1, num_users=5000).in_common(0).log_odds
    assert not set(other) & set(found.values())


@pytest.mark.parametrize("mean", [0.5, float("nan")])
def test_a_mean_out_of_bounds_is_refused(mean: float) -> None:
    with pytest.raises(InputError, match=f"--rows-per-user={mean}"):
        SynthUserOptions(num_rows=10, rows_per_user=mean)
