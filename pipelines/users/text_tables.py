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
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from accounting.core.validation import InputError
from pipelines.files.folders import make_private_folder
from pipelines.files.paths import is_remote
from pipelines.inputs.input_files import find_files
from pipelines.job.runtime.tasks import Step
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

#: Name of the step.
TEXT = "read text"
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


def text_step(files: Sequence[InputFile], folder: pathlib.Path) -> Step:
    """Returns the step that writes a table of text as Parquet.

    Args:
      files: From ``list_text``.
      folder: Folder for the Parquet files, which is made here.
    """
    make_private_folder(folder, remedy="Name another --out.")
    columns = tuple(text_columns(files[0], _OPTIONS))
    return Step(
        name=TEXT,
        task=functools.partial(_write, folder, columns),
        items=files,
        output=functools.partial(_parquet_path, folder),
    )


def _parquet_path(folder: pathlib.Path, file: InputFile) -> pathlib.Path:
    return folder / f"{file.name}.parquet"


def _write(folder: pathlib.Path, columns: tuple[str, ...], file: InputFile) -> None:
    """Writes a file of text as Parquet."""
    path = _parquet_path(folder, file)
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
