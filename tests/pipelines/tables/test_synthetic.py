"""What ``synthetic`` guarantees, and that users are alike in themselves."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv

from accounting.core.validation import InputError
from pipelines.tables.synthetic import _PROFILE, USER, SynthOptions, write_synth

ROWS, MEAN = 40_000, 8.0


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """40,000 rows of 5,000 users.  Not to be changed."""
    options = SynthOptions(num_rows=ROWS, rows_per_user=MEAN)
    assert options.num_users == 5000
    path = write_synth(tmp_path_factory.mktemp("synth") / "out", options)
    return csv.read_csv(path, parse_options=csv.ParseOptions(delimiter="\t"))


def categories(table: pa.Table, numbers: Sequence[int]) -> np.ndarray:
    columns = [table[f"C{1 + number}"].to_pylist() for number in numbers]
    return np.array(columns, str).T


def test_rows_of_a_user_are_alike(table: pa.Table) -> None:
    users, labels = table[USER].to_numpy(), table["label"].to_numpy()
    profile = categories(table, _PROFILE)
    order = np.argsort(users, kind="stable")
    same = np.flatnonzero(np.diff(users[order]) == 0)
    one, next_one = order[same], order[same + 1]
    # A category that is missing is so by row.
    differ = (profile[one] != profile[next_one]) & (profile[one] != "")
    assert not (differ & (profile[next_one] != "")).any()
    assert len(np.unique(profile, axis=0)) > 4000
    # 35,000 pairs: a correlation of 0 has standard deviation 0.0054.
    assert np.corrcoef(labels[one], labels[next_one])[0, 1] > 0.1


@pytest.mark.parametrize("mean", [0.5, float("nan")])
def test_a_mean_out_of_bounds_is_refused(mean: float) -> None:
    with pytest.raises(InputError, match=f"--rows-per-user={mean}"):
        SynthOptions(num_rows=10, rows_per_user=mean)


# --- Rows without users


def write(out: pathlib.Path, num_rows: int, seed: int = 0) -> bytes:
    return write_synth(out, SynthOptions(num_rows=num_rows, seed=seed)).read_bytes()


def test_the_same_seed_gives_the_same_rows_and_another_others(
    tmp_path: pathlib.Path,
) -> None:
    first = write(tmp_path / "a", 500, seed=3)
    assert write(tmp_path / "more", 17_000, seed=3).startswith(first)
    other = write(tmp_path / "c", 500, seed=4)
    assert not set(other.splitlines()) & set(first.splitlines())
