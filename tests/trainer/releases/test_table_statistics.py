"""``statistics``: ranges of columns and shares of classes, from counts with noise."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from accounting.core.pld.dominating_pairs import gaussian_noise
from accounting.core.validation import InputError
from pipelines.inputs.parquet_blocks import list_blocks, table_columns
from pipelines.tables.schema import Schema
from tests.command_line import invoke
from trainer.releases import table_counts, table_statistics
from trainer.releases.held_out_sums import NoisySum, RowSum, release
from trainer.releases.table_counts import (
    NUM_BINS,
    Quantiles,
    bins,
    count_values,
    in_groups,
    sums_of_rows,
)
from trainer.releases.table_statistics import least_rows, statistics

NUM_ROWS = 30_000
SCHEMA = """\
version = 1
[split]
by = "fraction"
shares = [80, 10, 10]

[columns.age]  # in years
kind = "numeric"

[columns."net worth"]
kind = "numeric"

[columns.known]
kind = "numeric"
range = [0.0, 1.0]

[columns.job]
kind = "category"

[columns.income]
kind = "label"
task = "binary"
"""


def write_table(path: pathlib.Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    columns = {
        "age": rng.integers(17, 80, NUM_ROWS).astype(float),
        "net worth": rng.lognormal(8, 2, NUM_ROWS),
        "known": rng.random(NUM_ROWS),
        "job": rng.integers(0, 5, NUM_ROWS),
        "income": (rng.random(NUM_ROWS) < 0.3).astype(int),
    }
    columns["age"][::10] = np.nan
    lines = [",".join(columns)]
    for row in zip(*columns.values(), strict=True):
        lines.append(",".join("" if x != x else f"{x:g}" for x in row))
    path.write_text("\n".join(lines) + "\n")
    return columns


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A table, its schema, and the prepared table."""
    found = tmp_path_factory.mktemp("statistics")
    write_table(found / "table.csv")
    (found / "schema.toml").write_text(SCHEMA)
    prepare(found, "schema.toml", "data")
    return found


def prepare(
    root: pathlib.Path, schema: str, out: str, *more: str, table: str = "table.csv"
) -> None:
    arguments = [
        "prepare", f"--input={root}/{table}", f"--schema={root}/{schema}",
        f"--out={root}/{out}", *more,
    ]  # fmt: skip
    result = invoke(arguments, catch=False)
    assert result.exit_code == 0, result.output


@pytest.fixture
def found_in(root: pathlib.Path, tmp_path: pathlib.Path) -> Callable[..., Any]:
    """``found_in(**settings)``: statistics of the part val."""

    def make(**settings: Any) -> Any:
        given: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-6, **settings}
        table = given.pop("table", f"{root}/data/val")
        schema = given.pop("schema", root / "schema.toml")
        return statistics(table, schema, tmp_path / "out.toml", **given)

    return make


def test_the_statistics_are_functions_of_one_gaussian_release(
    found_in: Callable[..., Any], released_by: Any
) -> None:
    seen = released_by(table_statistics)
    found = found_in(epsilon=1.3)
    ((sums, noise),) = seen
    assert noise == gaussian_noise(1.3, 1e-6) == found["noise_multiplier"]
    assert sum(each.share for each in sums.values()) <= 1
    # Two arrays for each of two columns, and the label; none for the ranged one.
    assert set(sums) == {
        "label", "single age", "groups age", "single net_worth", "groups net_worth",
    }  # fmt: skip
    assert {each.bound for each in sums.values()} == {1}


def test_statistics_that_are_declared_together_are_one_release(
    found_in: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    found = found_in(of_runs=4)
    assert found["noise_multiplier"] == 2 * gaussian_noise(3.0, 1e-6)
    assert found["claim"].startswith("At most 4 such statistics are together (3.0000")
    assert "epsilon 3.0000, delta 1e-06, of at most 4 together" in (
        (tmp_path / "out.toml").read_text()
    )


def test_ranges_hold_nearly_all_values(
    found_in: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    found = found_in(epsilon=8.0)
    age, worth = found["columns"]["age"], found["columns"]["net worth"]
    assert 16 <= age["low"] <= 20
    assert 76 <= age["high"] <= 80
    assert not age["log"]
    assert worth["log"]  # the upper end is far beyond the median
    shares = [each["share"] for each in found["classes"]]
    assert shares == pytest.approx([0.7, 0.3], abs=0.05)
    written = Schema.read(tmp_path / "out.toml").to_json()["columns"]
    assert written["age"]["range"] == [age["low"], age["high"]]
    assert written["net worth"]["log"]
    assert written["known"]["range"] == [0.0, 1.0]


def test_a_range_is_that_of_the_values_that_there_are(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Seen to fail: [-5.9e9, 20] of numbers in [10, 20] of which 85 % are missing."""
    rng, count = np.random.default_rng(4), 30_000
    columns = {
        "some": np.where(rng.random(count) < 0.85, np.nan, rng.uniform(10, 20, count)),
        "few": np.where(rng.random(count) < 0.99, np.nan, rng.uniform(10, 20, count)),
        "zeros": np.where(rng.random(count) < 0.95, 0, rng.uniform(10, 20, count)),
        "nothing": np.zeros(count),
        "millis": rng.uniform(1.3e12, 1.7e12, count),
    }
    lines = [",".join([*columns, "y"])]
    lines += [
        ",".join("" if x != x else f"{x:.17g}" for x in (*row, 0))
        for row in zip(*columns.values(), strict=True)
    ]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    kinds = "".join(f'[columns.{name}]\nkind = "numeric"\n' for name in columns)
    (tmp_path / "schema.toml").write_text(
        f"version = 1\n[split]\nby = 'fraction'\nshares = [1, 9, 0]\n{kinds}"
        '[columns.y]\nkind = "label"\ntask = "binary"\n'
    )
    prepare(tmp_path, "schema.toml", "data")
    given = f"{tmp_path}/data/val", tmp_path / "schema.toml", tmp_path / "out.toml"
    found = statistics(*given, epsilon=8.0, delta=1e-6)["columns"]
    assert (found["some"]["low"], found["some"]["high"]) == (10.0, 20.0)
    assert 0.01 < found["some"]["beyond"] < 0.2
    assert found["few"]["low"] is None
    assert found["zeros"]["low"] == 0.0 < 10.0 < found["zeros"]["high"] <= 20.0
    assert "are 0" in found["nothing"]["why_no_range"]
    assert 1.2e12 < found["millis"]["low"] < found["millis"]["high"] < 1.8e12
    written = Schema.read(tmp_path / "out.toml").columns
    ranged = {name for name, each in written.items() if getattr(each, "range", None)}
    assert ranged == {"some", "zeros", "millis"}


def test_too_few_rows_are_refused_before_they_are_read(
    found_in: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    least = least_rows(Schema.read(tmp_path / "schema.toml"), 0.1, 1e-6)
    monkeypatch.setattr(table_counts, "read_table", None)
    with pytest.raises(InputError, match=f"at least {least} rows for ranges of 2"):
        found_in(epsilon=0.1)


def test_a_table_of_users_is_refused(
    found_in: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schema, "user", "person")
    with pytest.raises(InputError, match=r"users of .* to be bounded"):
        found_in()


def test_shares_add_up_to_1_at_most_for_any_number_of_columns() -> None:
    for count in (*range(1, 200, 7), 1_000, 1_999):
        names = {f"c{number}": "" for number in range(count)}
        counted = table_counts.Counted(ranges=names, num_classes=2, most=3)
        shares = [each.share for each in counted.sums.values()]
        assert 1 - 1e-9 < sum(shares) <= 1


@pytest.fixture(scope="module")
def of_users(root: pathlib.Path) -> pathlib.Path:
    """Rows of the part `val`, of which users have two at most."""
    header, *rows = (root / "table.csv").read_text().split("\n")[:-1]
    lines = [f"{row},u{n // 6}" for n, row in enumerate(rows)]
    (root / "users.csv").write_text("\n".join([f"{header},who", *lines]) + "\n")
    schema = SCHEMA.replace('"fraction"', '"hash"\ncolumn = "who"')
    (root / "users.toml").write_text(schema + '\n[columns.who]\nkind = "user"\n')
    prepare(root, "users.toml", "users", "--bound-held-out",
            "--max-examples-per-user=2", "--num-examples=10000",
            table="users.csv")  # fmt: skip
    return root / "users" / "val"


def test_rows_of_bounded_users_have_the_noise_of_k_rows(
    root: pathlib.Path, of_users: pathlib.Path, found_in: Callable[..., Any]
) -> None:
    found = found_in(table=str(of_users), schema=root / "users.toml", epsilon=20.0)
    assert "at most 2 rows" in found["claim"]
    counted = table_counts.Counted.of(Schema.read(root / "users.toml"), most=2)
    # What is counted of the rows of a user is what it moves: nothing beyond the bounds,
    # and two rows that are alike reach each of them.
    rows_of = pq.read_table(of_users)
    dataset = list_blocks(str(of_users))
    pairs = [
        rows_of.take([0, 0]),
        *(rows_of.slice(place, 2) for place in range(0, 400, 2)),
    ]
    moved = [
        {n: np.linalg.norm(x) for n, x in sums_of_rows(counted, arrays).items()}
        for arrays in (table_columns(pair, dataset.columns) for pair in pairs)
    ]
    bounds = {n: x.bound for n, x in counted.sums.items()}
    for name, bound in bounds.items():
        assert max(each[name] for each in moved) == pytest.approx(bound)
    assert set(bounds.values()) == {2}
    rows_kept = len(rows_of)
    assert found["num_rows"] == pytest.approx(rows_kept, abs=60)


# -- counts of values, and the quantiles that they give --------------------------------


ERROR_RATE = 1e-6
WILD = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-30, 3e38, -3e38],
    np.float32,
)


def any_floats(count: int, seed: int) -> np.ndarray:
    """Floats of any bits."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    return np.concatenate([bits.view(np.float32), WILD])


def test_every_value_is_in_one_bin_or_missing() -> None:
    with np.errstate(invalid="ignore"):
        values = any_floats(100_000, seed=0)
    found = bins(values)
    assert found.min() >= 0
    np.testing.assert_array_equal(found == NUM_BINS, np.isnan(values))
    known = values[~np.isnan(values)].astype(np.float64)
    order = np.argsort(known)
    assert (np.diff(bins(known[order].astype(np.float32))) >= 0).all()
    # Within the bins' reach, a value is between the ends of its bin.
    low, high = table_counts._ends()
    size = np.abs(known)
    inside = (size >= 2.0**-31) & (size < 2.0**64)
    place = bins(known.astype(np.float32))
    assert (known[inside] >= low[place[inside]]).all()
    assert (known[inside] <= high[place[inside]]).all()
    assert set(place[size < 2.0**-31]) == {NUM_BINS // 2}


def test_a_row_moves_each_array_of_counts_by_one() -> None:
    values = any_floats(200, seed=1)
    whole = count_values(values)
    for row in range(len(values)):
        others = count_values(np.delete(values, row))
        assert np.abs(whole - others).sum() == 1
        moved = np.abs(in_groups(whole) - in_groups(others)).sum()
        assert moved == (not np.isnan(values[row]))


def quantiles(values: np.ndarray, noise: float) -> Quantiles:
    counts = count_values(values.astype(np.float32))
    sums = {
        "single": RowSum(values=counts, bound=1, share=0.5),
        "groups": RowSum(values=in_groups(counts), bound=1, share=0.5),
    }
    found = release(sums, noise)
    return Quantiles(found["single"], found["groups"], len(values))


SAMPLES = {
    "ages": lambda rng: rng.integers(17, 80, 50_000),
    "money": lambda rng: rng.lognormal(8, 2, 50_000),
    "both signs": lambda rng: rng.normal(0, 1e-3, 50_000),
    "mostly 0": lambda rng: np.where(rng.random(50_000) < 0.8, 0, rng.random(50_000)),
    "negative": lambda rng: -rng.exponential(1e6, 50_000),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_quantiles_have_about_their_share_of_the_values(name: str) -> None:
    values, noise = SAMPLES[name](np.random.default_rng(2)), 4.0
    found = quantiles(values, noise)
    # The largest of 1,521 errors: each is normal, of at most this deviation.
    stddev = table_counts.noise_of_rank(noise * math.sqrt(2))
    most = stats.norm.isf(ERROR_RATE / NUM_BINS) * stddev / len(values)
    for share in (0.02, 0.5, 0.98):
        low, high = found.low(share), found.high(share)
        assert low <= high
        assert (values < low).mean() <= share + most
        assert (values <= high * (1 + 1e-6 * np.sign(high))).mean() >= share - most


def test_a_rank_has_no_more_noise_than_stated() -> None:
    stddev, count = 7.0, 400
    rng, squares = np.random.default_rng(3), []
    for _ in range(count):
        single, groups = (
            NoisySum(values=rng.normal(0, stddev, size), stddev=stddev)
            for size in (NUM_BINS + 1, table_counts.NUM_GROUPS)
        )
        squares.append(Quantiles(single, groups, num_rows=0)._rough ** 2)
    # The largest of 1,521 means of squares of normal values.
    limit = stats.chi2.isf(ERROR_RATE / NUM_BINS, count) / count
    most = np.mean(squares, axis=0).max()
    assert most <= limit * table_counts.noise_of_rank(stddev) ** 2
    # A bound of half as much is seen to be too small.
    assert most > limit * table_counts.noise_of_rank(stddev / 2) ** 2


def test_bins_that_hide_all_values_are_told_from_those_that_do_not() -> None:
    """Seen to fail: of milliseconds since 1970 every value was the largest."""
    rng = np.random.default_rng(2)
    for values, reached in (
        (rng.uniform(1.3e12, 1.7e12, 5_000), True),  # milliseconds
        (rng.uniform(1.3e18, 1.7e18, 5_000), True),  # nanoseconds
        (rng.uniform(1e-9, 1e-7, 5_000), True),
        (np.full(5_000, 7.0), True),
        (np.zeros(5_000), False),
        (rng.uniform(1e20, 1e30, 5_000), False),
        (-rng.uniform(1e20, 1e30, 5_000), False),
    ):
        found = quantiles(values, 1.0)
        assert found.reaches(found.low(0.05), found.high(0.95)) == reached
