"""A Parquet file that is written in parts, and is complete or absent.

Formal guarantees:
  - The file appears when the context ends without an error; otherwise nothing is left.
  - Rows are in the order in which they were written.
  - One part is in memory at a time.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.files.sink import Sink
from pipelines.files.storage import new_file


class ParquetFile:
    """Writes tables of one schema to a new file.

    Args:
      path: New file in an existing folder.
      metadata: Metadata of the schema.

    Attributes:
      num_rows: Number of rows written so far.
      columns: Names of the columns; empty before the first part.
    """

    def __init__(self, path: pathlib.Path, metadata: Mapping[bytes, bytes]) -> None:
        self._path = path
        self._metadata = dict(metadata)
        self._contexts = contextlib.ExitStack()
        self._writer: Any = None
        self.num_rows = 0
        self.columns: tuple[str, ...] = ()

    def __enter__(self) -> ParquetFile:
        self._sink = Sink(self._contexts.enter_context(new_file(self._path)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The contexts of the file get the error, and remove what was written.
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._contexts.__exit__(kind, error, trace)

    def write(self, table: pa.Table) -> None:
        """Appends the rows of a table."""
        table = table.replace_schema_metadata(self._metadata)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._sink, table.schema)
            self.columns = tuple(table.column_names)
        self._writer.write_table(table)
        self.num_rows += table.num_rows
