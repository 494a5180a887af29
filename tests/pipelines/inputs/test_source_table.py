"""Which table rows are from: the same files are, in whatever way they are prepared."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from pipelines.core.users import UserBound
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.inputs.source_table import SourceTable, read_from, table_of
from pipelines.tables.prepare import TableOptions, UserOptions, prepare
from pipelines.tables.schema import Schema
from tests.criteo import criteo_schema
from tests.pipelines.conftest import write_text


@pytest.fixture
def raw(tmp_path: pathlib.Path) -> pathlib.Path:
    write_text(tmp_path / "raw", 200, 2, seed=1)
    return tmp_path / "raw"


def _table(
    raw: pathlib.Path,
    name: str,
    part: str = "train",
    buckets: int = 9,
    shares: tuple[int, ...] = (80, 10, 10),
    **how: Any,
) -> SourceTable:
    out = raw.parent / name
    if not out.exists():
        schema = criteo_schema(buckets, shares)
        prepare(str(raw), out, TableOptions(schema=schema, **how))
    return table_of(list_blocks(str(out / part)))


def test_a_table_that_is_prepared_again_is_the_same(raw: pathlib.Path) -> None:
    first = _table(raw, "first")
    assert len(first.sources) == 2
    assert first.part == "train"
    again = _table(raw, "again", buckets=7, row_group_rows=50)
    assert first.is_same(again)
    assert again.is_same(first)


def test_another_split_order_or_part_is_noticed(raw: pathlib.Path) -> None:
    first = _table(raw, "first")
    assert not first.is_same(_table(raw, "first", "test"))
    assert not first.is_same(_table(raw, "split", shares=(70, 20, 10)))
    files = sorted(raw.iterdir())
    files[0].rename(raw / "z.tsv")  # the other file is read first now
    other = _table(raw, "order")
    assert set(other.sources) == set(first.sources)
    assert not first.is_same(other)


SCHEMA: dict[str, Any] = {
    "version": 1,
    "columns": {
        "user": {"kind": "user"},
        "row": {"kind": "label", "task": "classes", "classes": 120},
        "when": {"kind": "date"},
    },
}
BY_TIME = {"by": "time", "column": "when", "cut_users": True}


def test_cells_of_the_split_that_are_read_otherwise_are_noticed(
    tmp_path: pathlib.Path,
) -> None:
    """Of users no sizes are compared: rows of one part are in another."""
    rows = (f'"é{i},0",{i},2024-01-{1 + i % 28:02}T23:30:00Z\n' for i in range(60))
    numbers = (f'"{i},0",{i + 60},2024-01-02\n' for i in range(60))
    (tmp_path / "a.csv").write_text("".join(["user,row,when\n", *rows, *numbers]))
    zone = {"when": {"kind": "date", "zone": "Asia/Tokyo"}}
    columns = {**SCHEMA["columns"], **zone}
    split = {**BY_TIME, "val_from": "2024-01-15", "test_from": "2024-01-15"}
    first = {**SCHEMA, "split": split}
    other = {**first, "columns": columns}
    tables, parts = [], list[set[int]]()
    for name, schema in (("first", first), ("again", first), ("other", other)):
        made = TableOptions(schema=Schema.from_json(schema))
        most = UserBound(user_column="user", max_examples_per_user=9, num_examples=120)
        users = UserOptions(settings=most)
        prepare(str(tmp_path / "a.csv"), tmp_path / name, made, users=users)
        for part in ("train", "test"):
            found = tmp_path / name / part
            tables.append(table_of(list_blocks(str(found))))
            parts.append(set(pq.read_table(found)["label"].to_pylist()))
    assert tables[0].is_held_out(tables[3])
    assert not parts[0] & parts[3]
    assert parts[0] & parts[5]
    assert not tables[0].is_held_out(tables[5])
    assert not tables[4].is_same(tables[0])


def test_other_malformed_rows_of_the_same_number_are_noticed(
    tmp_path: pathlib.Path,
) -> None:
    """They move the row at the end of a split: it would be in two parts."""
    cells = {"x": [5], "y": [55]}
    rows = (
        ",".join([f"{i}", *("bad" if i in bad else "1" for bad in cells.values())])
        for i in range(61)
    )
    (tmp_path / "a.csv").write_text("\n".join(["row,x,y", *rows, ""]))
    tables, parts = {}, {}
    for name, column in (("first", "x"), ("again", "x"), ("other", "y")):
        columns = {
            "row": {"kind": "label", "task": "classes", "classes": 61},
            column: {"kind": "numeric", "range": [0, 1]},
        }
        schema = {
            "version": 1,
            "columns": columns,
            "split": {"by": "fraction", "shares": [50, 0, 50]},
        }
        made = TableOptions(schema=Schema.from_json(schema), on_bad_row="skip")
        prepare(str(tmp_path / "a.csv"), tmp_path / name, made)
        for part in ("train", "test"):
            found = tmp_path / name / part
            tables[name, part] = table_of(list_blocks(str(found)))
            parts[name, part] = set(pq.read_table(found)["label"].to_pylist())
    first = tables["first", "train"]
    assert first.is_held_out(tables["again", "test"])
    assert parts["first", "train"] & parts["other", "test"] == {30}
    assert not first.is_held_out(tables["other", "test"])
    assert not first.is_apart(tables["other", "test"].sources)


def test_bounded_tables_are_not_prepared_again(tmp_path: pathlib.Path) -> None:
    """Two keys keep other rows of it, some of which are in both."""
    rows = {"user": np.arange(60) % 30, "row": np.arange(60)}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    most = UserBound(user_column="user", max_examples_per_user=1, num_examples=60)
    columns = {"user": {"kind": "user"}, "row": SCHEMA["columns"]["row"]}
    made = TableOptions(schema=Schema.from_json({"version": 1, "columns": columns}))
    users = UserOptions(settings=most)
    prepare(str(tmp_path / "a.parquet"), tmp_path / "first", made, users=users)
    source = table_of(list_blocks(str(tmp_path / "a.parquet")))
    found = table_of(list_blocks(str(tmp_path / "first" / "train")))
    assert found.sources == source.sources
    again = {"version": 1, "columns": {"label": SCHEMA["columns"]["row"]}}
    made = TableOptions(schema=Schema.from_json(again))
    with pytest.raises(InputError, match="users are bounded already"):
        prepare(str(tmp_path / "first" / "train"), tmp_path / "again", made)


def test_files_in_common_are_noticed_and_others_are_others(raw: pathlib.Path) -> None:
    first = _table(raw, "first")
    copy = raw.parent / "copy"
    copy.mkdir()
    shutil.copy(sorted(raw.iterdir())[0], copy / "renamed.tsv")
    part = _table(copy, "of-copy")
    assert not first.is_apart(part.sources)
    assert not first.is_same(part)  # its rows are divided otherwise
    write_text(raw.parent / "more", 200, 2, seed=2)
    assert first.is_apart(_table(raw.parent / "more", "of-more").sources)


def test_rows_that_were_not_prepared_are_known_by_their_files(
    raw: pathlib.Path,
) -> None:
    _table(raw, "first")
    own = raw.parent / "own"
    shutil.copytree(raw.parent / "first" / "train", own)
    found = list_blocks(str(own))
    table = table_of(found)
    assert table == SourceTable(sources=tuple(found.footers.values()))
    assert read_from(str(path) for path in own.iterdir())["sources"] == list(
        table.sources
    )


def test_files_that_were_moved_into_a_part_are_noticed(raw: pathlib.Path) -> None:
    """Rows of the other part may have given statistics."""
    first, out = _table(raw, "first"), raw.parent / "first"
    (out / "val" / "part-00000.parquet").rename(out / "train" / "part-00001.parquet")
    both = _table(raw, "first")
    assert not first.is_same(both)
    assert not first.is_apart(both.sources)
    path = str(out / "train" / "part-00000.parquet")
    assert table_of(list_blocks(path)) == first
