"""CSV and TSV as Parquet of texts, so that rows can be read by their place.

    OUT.unfinished/table/NAME.csv.parquet

Every column is text, and null where a cell is empty: `dpsgd prepare` turns texts into
numbers, and keeps the note that users are bounded.

Formal guarantees:
  - Every row of a file is in its Parquet file, in order; a row with another number of
    cells is refused by file and number.
  - A file appears complete or not at all, and is not written again.
  - Bounded memory: a file is read by blocks.

Public: names of files and columns.  Sensitive: rows.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from accounting.validation import InputError
from pipelines.files.folders import make_private_folder
from pipelines.files.paths import is_remote
from pipelines.inputs.input_files import find_files
from pipelines.tables.cells.cells import Cells
from pipelines.tables.prepared_files import ROW_GROUP_BYTES, new_table
from pipelines.tables.raw_files import InputFile, list_files
from pipelines.tables.schema.schema import InputOptions
from pipelines.tables.table_files import (
    CSV,
    TSV,
    kind_of_file,
    read_text,
    text_columns,
)
from pipelines.users.bound_job import BoundSettings

_OPTIONS = InputOptions()


def is_text(pattern: str) -> bool:
    """Whether all files of an input are CSV or TSV, by their suffixes."""
    if is_remote(pattern):
        return False
    found = find_files(pattern, suffix="", partitions=True).files
    return all(kind_of_file(path) in (CSV, TSV) for path, _ in found)


def list_text(pattern: str, settings: BoundSettings) -> tuple[InputFile, ...]:
    """Returns the files of a table of text, before any row is read.

    Args:
      pattern: CSV or TSV: a file, a folder or a glob.
      settings: Which rows are kept.

    Raises:
      InputError: users are sampled, headers differ, or there is no column of users.
    """
    files = tuple(file for file in list_files(pattern) if file.size)
    if settings.sampled != BoundSettings.sampled:
        raise InputError(
            f"Expected --input {pattern} to be Parquet of numbers for --sample users: "
            'of text, `dpsgd prepare --schema SCHEMA` with kind = "user" for column '
            f"{settings.user_column} makes records of users at once."
        )
    columns = text_columns(files[0], _OPTIONS)
    if settings.user_column not in columns:
        # The names are not told: a file without a header has values of a row there.
        raise InputError(
            f"Expected --user-column {settings.user_column} to be a column of "
            f"{files[0].shown}; no name in its first line is. Write a header there, or "
            "give the name as it is written."
        )
    for file in files:
        if text_columns(file, _OPTIONS) != columns:
            raise InputError(
                f"Expected the columns of {file.shown} to be those of "
                f"{files[0].shown}. Write the same first line in both."
            )
    return files


def write_text(
    files: Sequence[InputFile],
    work: pathlib.Path,
    run: Callable[[Callable[[Any], None], Sequence[Any]], None],
) -> str:
    """Writes a table of text as Parquet, unless it was done; returns its folder.

    Args:
      files: From ``list_text``.
      work: Folder of the unfinished job.
      run: Calls a task with every file.

    Raises:
      InputError: malformed rows.
    """
    folder = work / "table"
    make_private_folder(folder, remedy="Name another --out.")
    columns = tuple(text_columns(files[0], _OPTIONS))
    run(functools.partial(_write, folder, columns), files)
    return str(folder)


def _write(folder: pathlib.Path, columns: tuple[str, ...], file: InputFile) -> None:
    """Writes a file of text as Parquet, unless it was done."""
    path = folder / f"{file.name}.parquet"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([(name, pa.large_string()) for name in columns])
    with new_table(path, schema, folder.parent) as writer:
        waiting: list[pa.Table] = []
        for table in _tables(file, schema):
            waiting.append(table)
            if sum(each.nbytes for each in waiting) >= ROW_GROUP_BYTES:
                _write_group(writer, waiting)
                waiting = []
        if waiting:
            _write_group(writer, waiting)


def _write_group(writer: Any, tables: Sequence[pa.Table]) -> None:
    rows = pa.concat_tables(tables)
    writer.write_table(rows, row_group_size=len(rows))


def _tables(file: InputFile, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yields the rows of a file."""
    first = 2  # after the header
    for block, _ in read_text(file, schema.names, _OPTIONS):
        if len(block.uneven):
            raise InputError(
                f"Expected well-formed rows; {file.shown}:{first + block.uneven[0]} "
                f"has not {len(schema)} cells. Fix it; `dpsgd prepare` with "
                'kind = "user" can leave such rows out.'
            )
        first += block.num_rows
        cells = [
            Cells(name, block.columns[name], _OPTIONS.missing_values, [])
            for name in schema.names
        ]
        yield pa.table([each.array for each in cells], schema)
