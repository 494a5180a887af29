"""``statistics``: ranges of columns and shares of classes, under an epsilon."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from accounting.core.pld.dominating_pairs import gaussian_noise
from accounting.core.validation import InputError
from pipelines.inputs.parquet_blocks import list_blocks, table_columns
from pipelines.tables.schema import Schema
from tests.command_line import invoke
from trainer.releases import table_counts, table_statistics
from trainer.releases.table_counts import sums_of_rows
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
