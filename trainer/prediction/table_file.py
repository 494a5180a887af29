"""A file of Parquet or CSV that is written in parts, and is complete or absent.

Formal guarantees:
  - The file appears when the context ends without an error; otherwise nothing is left.
  - Rows are in the order in which they were written.
  - One part is in memory at a time.
  - The name says the format.  In CSV a column NAME of lists of one length is written as
    NAME_0, NAME_1, ...; others are refused.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from accounting.core.validation import InputError
from pipelines.files.output_file import output_file
from pipelines.files.sink import Sink

_CSV = ".csv"
#: Suffixes of names; without one the file is Parquet.
_SUFFIXES = (".parquet", _CSV, "")


def check_name(path: pathlib.Path, carried: Mapping[str, pa.DataType]) -> None:
    """Checks that tables can be written to a file of this name.

    Args:
      path: The file.
      carried: Name -> type of the columns that are copied to it.

    Raises:
      InputError: another format, or columns that it cannot hold.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(
            f"Expected --out {path} to end in .parquet or {_CSV}, the formats that can "
            f"be written. Give --out {path.with_suffix(_CSV)}."
        )
    if not _is_csv(path):
        return
    for name, kind in carried.items():
        if pa.types.is_nested(kind) and not pa.types.is_fixed_size_list(kind):
            raise InputError(
                f"Expected column {name} of type {kind} not to be carried to CSV, "
                f"which holds no lists. Give --out {path.with_suffix('.parquet')}, or "
                "do not carry it."
            )


def _is_csv(path: pathlib.Path) -> bool:
    return path.suffix.lower() == _CSV


class TableFile:
    """Writes tables of one schema to a new file.

    Args:
      path: New file in an existing folder, of a name that ``check_name`` accepts.

    Attributes:
      num_rows: Number of rows written so far.
      columns: Names of the columns; empty before the first part.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._contexts = contextlib.ExitStack()
        self._writer: Any = None
        self.num_rows = 0
        self.columns: tuple[str, ...] = ()

    def __enter__(self) -> TableFile:
        self._sink = Sink(self._contexts.enter_context(output_file(self._path)))
        return self

    def __exit__(self, *error: Any) -> None:
        # The file gets an error of its writer's end, too, and is removed.
        self._contexts.__exit__(*error)

    def write(self, table: pa.Table) -> None:
        """Appends the rows of a table."""
        if _is_csv(self._path):
            table, open_writer = _flat(table), pa_csv.CSVWriter
        else:
            open_writer = pq.ParquetWriter
        if self._writer is None:
            writer = open_writer(self._sink, table.schema)
            self._writer = self._contexts.enter_context(writer)
            self.columns = tuple(table.column_names)
        self._writer.write_table(table)
        self.num_rows += table.num_rows


def _flat(table: pa.Table) -> pa.Table:
    """Returns a table with a column for each element of fixed-size lists."""
    columns: dict[str, pa.ChunkedArray] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        parts = {name: column}
        if pa.types.is_fixed_size_list(column.type):
            places = range(column.type.list_size)
            whole = _flat(
                pa.table({f"{name}_{i}": pc.list_element(column, i) for i in places})
            )
            parts = dict(zip(whole.column_names, whole.columns, strict=True))
        if twice := columns.keys() & parts.keys():
            raise InputError(
                f"Expected columns of different names in a CSV of predictions, not two "
                f"{min(twice)}. Rename the one of --carry in the table, or give a name "
                "of --out that ends in .parquet."
            )
        columns |= parts
    return pa.table(columns)
