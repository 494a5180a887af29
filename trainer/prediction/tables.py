"""The rows to predict: a table that `dpsgd prepare` wrote, or a raw table.

Prepared files contain a description.  A raw table is read with the schema of the
training examples, which is in the manifest of the run.

Formal guarantees:
  - Every row is read once, in the order of the table, and no error quotes one.
  - Columns that the model cannot take are refused before any row is read.

Public: names of columns, sizes.  Sensitive: rows.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY
from pipelines.tables.raw_files import InputFile, list_files
from pipelines.tables.raw_inputs import Part, RawInputs
from pipelines.tables.schema.fields import CELLS_NAME
from pipelines.tables.schema.schema import Schema
from pipelines.tables.table_files import PARQUET, kind_of_file, parquet_schema
from trainer.model.evaluation import HeldOut
from trainer.model.target import schema_of

OPTION = "--input"


class Rows(Protocol):
    """Rows to predict.

    Attributes:
      total: Size of the table, in units.
      unit: Unit of progress: "row" or "byte".
      carried_types: Name -> type of the carried columns of a raw table.
    """

    @property
    def total(self) -> int: ...

    @property
    def unit(self) -> str: ...

    @property
    def carried_types(self) -> Mapping[str, pa.DataType]: ...

    def parts(self, num_rows: int) -> Iterator[Part]:
        """Yields inputs of the model, carried columns, and units read so far.

        A part has about ``num_rows`` rows.
        """


def open_rows(path: pathlib.Path, manifest: Manifest, carried: Sequence[str]) -> Rows:
    """Returns the rows at a path, whose columns are checked.

    Args:
      path: A file, a folder or a glob.
      manifest: Manifest of the run, with the columns that its model takes.
      carried: Columns to yield unchanged.

    Raises:
      InputError: no table, or columns that the model cannot take.
    """
    schema = schema_of(manifest)
    if schema is None or any(map(_is_prepared, list_files(str(path), partitions=True))):
        return _Prepared(path, manifest, carried)
    _check_cells(manifest)
    return _Raw(path, schema, carried)


def _check_cells(manifest: Manifest) -> None:
    """Refuses a run whose examples were read from their table in another way."""
    found = manifest.dataset.get("cells")
    if found != CELLS_NAME:
        raise InputError(
            f"Expected the training examples to be prepared with cells {CELLS_NAME}; "
            f"they are {found}, and this release would read some cells of "
            f"{OPTION} as other numbers. Give a table that was prepared as they were, "
            "or prepare, batch and train again."
        )


def _is_prepared(file: InputFile) -> bool:
    if kind_of_file(file.path) != PARQUET or not file.size:
        return False
    return DATASET_METADATA_KEY in (parquet_schema(file).metadata or {})


class _Prepared:
    """Rows of files with the columns of the batches."""

    unit = "row"

    def __init__(
        self, path: pathlib.Path, manifest: Manifest, carried: Sequence[str]
    ) -> None:
        self._held_out = HeldOut(path, manifest, option=OPTION)
        self._held_out.check_others(carried)
        self._carried = list(carried)
        self.carried_types: dict[str, pa.DataType] = {}  # numbers, or lists of a length
        self.total = self._held_out.num_rows

    def parts(self, num_rows: int) -> Iterator[Part]:
        done = 0
        for columns, rows in self._held_out.parts(num_rows, self._carried):
            done += rows.num_rows
            carried = pa.Table.from_batches([rows.select(self._carried)])
            yield columns, carried, done


class _Raw:
    """Rows of a raw table, which the schema describes."""

    unit = "byte"

    def __init__(
        self, path: pathlib.Path, schema: Schema, carried: Sequence[str]
    ) -> None:
        self._rows = RawInputs(str(path), schema, carried)
        self.total = self._rows.num_bytes
        self.carried_types = self._rows.carried_types

    def parts(self, num_rows: int) -> Iterator[Part]:
        return self._rows.parts(num_rows)
