"""Rows of a raw table as inputs of a model, for predictions.

Formal guarantees:
  - A row becomes the inputs that ``prepare`` makes of it; neither label nor split is
    needed.
  - All rows come in the order of the table: a malformed row is an error with file,
    number and reason, and nothing of its content.
  - Columns that are missing, or of a type that their kind does not accept, are refused
    before any row is read.
  - Memory does not depend on the number of rows.

Public: schema and names of columns.  Sensitive: rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from accounting.core.validation import InputError, did_you_mean
from pipelines.tables.columns import convert
from pipelines.tables.raw_files import InputFile, list_files
from pipelines.tables.schema.schema import Schema
from pipelines.tables.table_files import (
    RawBlock,
    first_row,
    read_blocks,
    table_columns,
    table_kind,
)
from pipelines.tables.table_format import (
    check_columns,
    even_rows,
    first_faults,
)

#: Inputs of some rows, their carried columns, and the number of bytes read so far.
Part = tuple[dict[str, np.ndarray], pa.Table, int]


class RawInputs:
    """The rows of CSV, TSV or Parquet, without labels.

    Args:
      pattern: A file, a folder or a glob.
      schema: Schema of the training examples, from the manifest of their batches.
      carried: Columns that are passed on unchanged, such as an id.

    Attributes:
      num_bytes: Bytes of all files.
      carried_types: Name -> type of the carried columns.

    Raises:
      InputError: no table, or columns that do not fit the schema.
    """

    def __init__(
        self, pattern: str, schema: Schema, carried: Sequence[str] = ()
    ) -> None:
        self._files = list_files(pattern, partitions=True)
        self._kind = table_kind(self._files)
        self._schema, self._carried = schema, tuple(carried)
        self.num_bytes = sum(file.size for file in self._files)
        self.carried_types: dict[str, pa.DataType] = {}
        for file in self._files:
            if file.size:
                check_columns(file, self._kind, schema, inputs_only=True)
                self._check_carried(file, self.carried_types)

    def _check_carried(self, file: InputFile, types: dict[str, pa.DataType]) -> None:
        """Refuses a carried column that is missing, or whose type differs by file."""
        columns = table_columns(file, self._kind, self._schema.input)
        for name in self._carried:
            if name not in columns:
                raise InputError(
                    f"Expected column {name}, which is to be carried, in {file.shown}; "
                    f"it has {', '.join(columns)}.{did_you_mean(name, list(columns))}"
                )
            first = types.setdefault(name, columns[name])
            if first != columns[name]:
                raise InputError(
                    f"Expected column {name}, which is to be carried, to be of one "
                    f"type in all files, not {first} and {columns[name]}. Convert it, "
                    "or do not carry it."
                )

    def parts(self, num_rows: int) -> Iterator[Part]:
        """Yields all rows in order, at least ``num_rows`` at a time except at the end.

        Raises:
          InputError: a malformed row, or a damaged file.
        """
        waiting: list[Part] = []
        any_rows = False
        for part in self._blocks():
            any_rows = True
            waiting.append(part)
            if sum(_num_rows(inputs) for inputs, _, _ in waiting) >= num_rows:
                yield _joined(waiting)
                waiting = []
        if not any_rows:
            raise InputError(f"Expected rows in {self._files[0].shown}; it has none.")
        if waiting:
            yield _joined(waiting)

    def _blocks(self) -> Iterator[Part]:
        needed = tuple(dict.fromkeys((*self._schema.inputs, *self._carried)))
        before = 0
        for file in self._files:
            first = first_row(file, self._kind, self._schema.input)
            for block, done in read_blocks(
                file, self._kind, needed, self._schema.input
            ):
                inputs = _inputs(block, self._schema, file, first)
                first += block.num_rows
                if block.num_rows:
                    yield inputs, self._carry(block), before + done
            before += file.size

    def _carry(self, block: RawBlock) -> pa.Table:
        return pa.table({name: _plain(block.columns[name]) for name in self._carried})


def _plain(array: pa.Array) -> pa.Array:
    """Returns values without a dictionary, since dictionaries differ by file."""
    is_dictionary = pa.types.is_dictionary(array.type)
    return array.dictionary_decode() if is_dictionary else array


def _num_rows(inputs: dict[str, np.ndarray]) -> int:
    return len(next(iter(inputs.values())))


def _joined(parts: Sequence[Part]) -> Part:
    names = parts[0][0]
    inputs = {n: np.concatenate([each[n] for each, _, _ in parts]) for n in names}
    return inputs, pa.concat_tables([each for _, each, _ in parts]), parts[-1][2]


def _inputs(
    block: RawBlock, schema: Schema, file: InputFile, first: int
) -> dict[str, np.ndarray]:
    """Returns the inputs of a block whose first row is number ``first`` of a file."""
    even, reasons = even_rows(block)
    arrays: dict[str, np.ndarray] = {}
    if len(even):
        found = convert(schema, block.columns, inputs_only=True)
        first_faults(found, even, reasons)
        arrays = found.arrays
    if reasons:
        row = min(reasons)
        raise InputError(
            f"Expected well-formed rows; {file.shown}:{first + row}: {reasons[row]}. "
            "Fix it, or remove it."
        )
    return arrays
