"""Parts of large files: they begin with rows, and have the rows of the file."""

from __future__ import annotations

import csv
import gzip
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.core.validation import InputError
from pipelines.tables import file_parts, table_files
from pipelines.tables.criteo import CriteoFormat, PrepareOptions
from pipelines.tables.file_parts import (
    Quotations,
    line_ranges,
    row_group_ranges,
)
from pipelines.tables.raw_files import InputFile, list_files
from pipelines.tables.schema.schema import InputOptions, Schema
from pipelines.tables.table_files import read_parquet, read_text
from pipelines.tables.table_format import TableFormat, TableOptions

NAMES = ("a", "b")
#: Rows that are read, and what may make a text that is refused.
LINES = ("x,y", "x", "", 'x,"y,z"', '"",""', '"a ""b""" ,5" long', 'x"y,"z"', "1,2,3")
PIECES = ("x", ",", ",", '"', '""', '"y\n,z"', "\n", "\n", "\r\n", "\r", " ")


def input_file(path: pathlib.Path, data: bytes) -> InputFile:
    path.write_bytes(data)
    (file,) = list_files(str(path))
    return file


def rows_of(files: list[InputFile], options: InputOptions) -> list[Any]:
    """Every row in order; None for one with another number of cells."""
    found: list[Any] = []
    for file in files:
        for block, _ in read_text(file, NAMES, options):
            even = pa.table(block.columns).to_pylist() if block.columns else []
            uneven = set(block.uneven.tolist())
            rows = iter(even)
            found += [
                None if row in uneven else next(rows) for row in range(block.num_rows)
            ]
    return found


@pytest.mark.parametrize("header", [(), NAMES])
def test_rows_of_parts_are_those_of_the_file(
    header: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    random = np.random.default_rng(0)
    options = InputOptions(header=header)
    num_parts, num_refused = 0, 0
    for number in range(60):
        lines = random.choice(LINES, 20)
        ends = random.choice(["\n", "\r\n", "\r"], 20)
        odd = random.choice(PIECES) if number % 2 else ""
        rows = "".join(map("".join, zip(lines, ends, strict=True)))
        text = f'\ufeff"a",b\n{rows}{odd}\n{rows}'
        file = input_file(tmp_path / "table.csv", text.encode())
        parts = line_ranges(file, 1)
        assert sum(part.num_bytes for part in parts) == file.size
        try:
            wanted = rows_of([file], options)
        except InputError:
            num_refused += 1
            with pytest.raises(InputError):
                rows_of(parts, options)
            continue
        assert rows_of(parts, options) == wanted
        num_parts += len(parts)
    assert num_parts > 300
    assert num_refused > 5


def strictly_quoted(text: str) -> bool:
    """Whether Python's reader accepts the quotations of each line of a text."""
    try:
        for line in re.split("[\r\n]", text):
            list(csv.reader([line], strict=True))
    except csv.Error:
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from((*PIECES, '"a"', '","', '"\n'))).map("".join),
    st.integers(1, 7),
)
def test_a_quotation_ends_with_its_cell(text: str, block: int) -> None:
    data = text.encode()
    found = Quotations(",")
    for start in range(0, len(data), block):
        found.feed(data[start : start + block])
    found.end()
    # Spaces after a quotation are harmless, though not for Python's reader.
    assert (not found.fault) == strictly_quoted(re.sub('" +(?=[,\r\n]|$)', '"', text))


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ('1,x\n2,"y\n3,z\n', 3),  # to the end of the file
        ('1,x\n2,"y', 3),  # in the last line
        ('1,x\n2,"y\n3,"z"\n4,u\n', 3),  # to another cell
        ('1,"two\nlines"\n2,y\n', 2),
        ('1,x\n2,"two\rlines"\n', 3),
        ('1,5" pipe\n2,"y ""quoted"""\n3,"y" \n', 0),
    ],
)
def test_a_quotation_that_is_left_open_is_refused_with_its_line(
    rows: str, line: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, more in ((1 << 20, 0), (64, 0), (64, 50)):
        monkeypatch.setattr(table_files, "_BLOCK_BYTES", size)
        text = f"a,b\n{rows}" + "9,z\n" * more
        file = input_file(tmp_path / "table.csv", text.encode())
        if not line:
            assert len(rows_of([file], InputOptions())) == 3 + more
            continue
        with pytest.raises(InputError, match=f"that on line {line} has none"):
            rows_of([file], InputOptions())


def test_the_command_of_the_page_writes_any_text_as_parquet(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    page = (root / "docs" / "your_table.md").read_text()
    [command] = re.findall(r"^python -c '(.*?)'$", page, re.M | re.S)
    text = 'a;b\n1,5;"two\nlines, 5\\" l\xf6ng"\n'
    (tmp_path / "t.csv").write_text(text, encoding="latin-1")
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True)
    wanted = [{"a": 1.5, "b": 'two\nlines, 5" l\xf6ng'}]
    assert pq.read_table(tmp_path / "t.parquet").to_pylist() == wanted


def test_what_cannot_be_read_from_its_middle_is_one_part(
    tmp_path: pathlib.Path,
) -> None:
    fields = {"version": 1, "columns": {"y": {"kind": "label", "task": "binary"}}}
    data = b"y\n" + b"1\n" * 100

    def ranges(name: str, data: bytes, **options: Any) -> list[InputFile]:
        schema = Schema.from_json({**fields, "input": options})
        file = input_file(tmp_path / name, data)
        return TableFormat(TableOptions(schema=schema), [file]).ranges(file, 50)

    assert len(ranges("t.csv", data)) > 2
    assert len(ranges("t.csv.gz", gzip.compress(data * 99))) == 1
    criteo, text = CriteoFormat(PrepareOptions()), b"1\t\n" * 100
    assert len(criteo.ranges(input_file(tmp_path / "day", text), 50)) > 2
    packed = input_file(tmp_path / "day.gz", gzip.compress(text * 99))
    assert len(criteo.ranges(packed, 50)) == 1


def test_row_groups_of_parts_are_those_of_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"a": range(100)}), path, row_group_size=8)
    (file,) = list_files(str(path))
    parts = row_group_ranges(file, file.size // 5)
    assert 3 < len(parts) <= 6
    assert sum(part.num_bytes for part in parts) == file.size
    blocks = [block for part in parts for block, _ in read_parquet(part, ["a"])]
    rows = [row for block in blocks for row in block.columns["a"].to_pylist()]
    assert rows == list(range(100))
    assert row_group_ranges(file, file.size) == [file]


def test_a_file_that_was_written_to_and_a_line_without_end_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.csv"
    file = input_file(path, b"a,b\n" + b"1,2\n" * 9)
    path.write_bytes(b"a,b\n")
    for divide in (line_ranges, row_group_ranges):
        with pytest.raises(InputError, match="not to change"):
            divide(file, 8)
    # Ranges do not begin within a line that is longer than any row may be.
    monkeypatch.setattr(file_parts, "_MAX_LINE_BYTES", 20)
    file = input_file(path, b"1,2\n" * 5 + b"x" * 100 + b"\n" + b"1,2\n" * 5)
    starts = [each.part.start for each in line_ranges(file, 8) if each.part]
    assert not [start for start in starts if 20 < start < 121]
    assert {8, 16} <= set(starts)
    assert max(starts) > 121
