"""A table with a schema, as a format of ``convert``.

Formal guarantees:
  - Columns that the schema needs and a file lacks, or whose type their kind does not
    accept, are refused before any row is read, all in one line.
  - The prepared data carries the schema, for batches, models and predictions.
  - A table that `dpsgd bound` wrote passes on its note, and the split of a row does not
    depend on other rows, whose number is sensitive.
  - Ids of users are prepared only on request, for a later `dpsgd bound`, and so are
    values of categories, for `dpsgd statistics`.

Public: schema and options.  Sensitive: rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from accounting.core.validation import InputError
from pipelines.core.users.bounded import BOUNDED, Bounded
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    check_files_once,
    description_of,
)
from pipelines.tables.columns import Converted, convert, refusals
from pipelines.tables.convert import (
    DEFAULT_ROW_GROUP_ROWS,
    ConvertOptions,
    Format,
    ParsedBlock,
    as_array,
)
from pipelines.tables.file_parts import (
    line_ranges,
    row_group_ranges,
)
from pipelines.tables.prepared_files import ROW_GROUP_BYTES
from pipelines.tables.raw_files import InputFile
from pipelines.tables.schema.column_kinds import LABEL, Label, Output
from pipelines.tables.schema.schema import FRACTION, Schema, refuse_missing
from pipelines.tables.table_files import (
    PARQUET,
    RawBlock,
    first_row,
    is_packed,
    parquet_schema,
    read_blocks,
    table_columns,
    table_kind,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions(ConvertOptions):
    """How a table becomes Parquet.  All fields are public.

    Attributes:
      schema: Schema of the table.
      with_users: Whether ids of users are kept, under the name of their column.
      with_values: Whether values of categories that the schema does not list are kept.
    """

    schema: Schema
    with_users: bool = False
    with_values: bool = False

    partitions = True

    @property
    def label(self) -> str:
        """Name of the column of labels."""
        return self.schema.label_name

    @property
    def classes(self) -> Sequence[str]:
        """Classes of the label, if they are listed."""
        found = self.schema.label.classes
        return found if isinstance(found, tuple) else ()

    def open(self, files: Sequence[InputFile]) -> TableFormat:
        """Returns the format of files of one kind that have all columns.

        Raises:
          InputError: other files, or users that are not bounded.
        """
        if self.schema.user and not self.with_users:
            raise InputError(
                f"Expected column {self.schema.user} of kind user to be bounded: "
                "`dpsgd prepare` does so with --max-examples-per-user and "
                '--num-examples. Give these, or write kind = "drop".'
            )
        return TableFormat(self, files)


def row_group_rows(schema: Schema) -> int:
    """Returns the rows of a row group that a worker can hold."""
    row_bytes = sum(
        np.dtype(output.dtype).itemsize * math.prod(output.shape)
        for output in schema.outputs
    )
    return max(1, min(DEFAULT_ROW_GROUP_ROWS, ROW_GROUP_BYTES // row_bytes))


def prepared_schema(
    schema: Schema,
    *,
    with_users: bool = False,
    with_values: bool = False,
    bounded: Bounded | None = None,
) -> pa.Schema:
    """Returns the Arrow schema of the prepared data, with its description.

    Args:
      schema: Schema of the table.
      with_users: Whether ids of users are kept, in the last column.
      with_values: As in ``TableOptions``.
      bounded: Note that users are bounded, if they are.
    """
    note = {} if bounded is None else {BOUNDED: bounded.to_json()}
    description = json.dumps({**schema.description, **note})
    texts = schema.unlisted if with_values else {}
    types = {
        output.name: pa.large_string() if output.name in texts else _arrow_type(output)
        for output in schema.outputs
    }
    fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
    if with_users:
        fields.append(pa.field(schema.user, pa.large_string(), nullable=False))
    return pa.schema(fields, metadata={DATASET_METADATA_KEY: description.encode()})


def _arrow_type(output: Output) -> pa.DataType:
    kind = pa.from_numpy_dtype(np.dtype(output.dtype))
    if not output.shape:
        return kind
    return pa.list_(pa.field("item", kind, nullable=False), output.shape[0])


class TableFormat(Format):
    """Blocks of rows of CSV, TSV or Parquet, and their columns by a schema.

    Args:
      options: Schema of the table, and which texts are kept.
      files: Files of one kind.

    Raises:
      InputError: other files, or columns that do not fit the schema.
    """

    def __init__(self, options: TableOptions, files: Sequence[InputFile]) -> None:
        self._table = schema = options.schema
        self._with_values = options.with_values
        self._kind = table_kind(files)
        bounded = self._bounded(files)
        self.has_users = options.with_users or bounded is not None
        self.schema = prepared_schema(
            schema,
            with_users=options.with_users,
            with_values=options.with_values,
            bounded=bounded,
        )
        self.shares = schema.split.shares if schema.split.by == FRACTION else None
        left_out: dict[str, None] = {}
        for file in files:
            if file.size:
                left_out.update(dict.fromkeys(self._check_columns(file)))
                self.first_row = first_row(file, self._kind, schema.input)
        self.left_out = tuple(left_out)

    def _bounded(self, files: Sequence[InputFile]) -> Bounded | None:
        """Returns the note of the files that users are bounded, if there is one."""
        if self._kind != PARQUET:
            return None
        schemas = [(parquet_schema(file), file.shown) for file in files if file.size]
        found = {Bounded.of(description_of(*each)) for each in schemas}
        if len(found) > 1:
            raise InputError(
                "Expected all files of --input to be of one `dpsgd bound`. Give the "
                "folder that it wrote, alone."
            )
        (bounded,) = found
        if bounded is not None and bounded.has_users:
            raise InputError(
                "Expected --input to hold rows, not records of users. Give the table "
                f'that `dpsgd bound` read, and write kind = "user" for column '
                f"{bounded.user_column}."
            )
        if bounded is not None:
            check_files_once(file.path for file in files if file.size)
        if bounded is not None and self._table.split.by == FRACTION:
            raise InputError(
                "Expected [split] not to be by fraction, of a table whose users are "
                "bounded: where a split ends would depend on how many rows each has. "
                'Write by = "hash" and column = "...".'
            )
        return bounded

    def _check_columns(self, file: InputFile) -> list[str]:
        """Returns the columns that are not in the schema."""
        found = check_columns(file, self._kind, self._table)
        known = {*self._table.columns, *self._table.needed}
        return [name for name in found if name not in known]

    def blocks(self, file: InputFile) -> Iterator[tuple[RawBlock, int]]:
        """Yields blocks of rows, and the number of bytes read so far."""
        return read_blocks(file, self._kind, self._table.needed, self._table.input)

    def ranges(self, file: InputFile, num_bytes: int) -> list[InputFile]:
        """Returns parts of a file; arguments as for ``Format.ranges``."""
        if file.size <= num_bytes:
            return [file]
        if self._kind == PARQUET:
            return row_group_ranges(file, num_bytes)
        return [file] if is_packed(file) else line_ranges(file, num_bytes)

    def parse(self, block: RawBlock) -> ParsedBlock:
        """Converts the columns of a block: see ``Format.parse``."""
        even, reasons = even_rows(block)
        found = Converted()
        if len(even):
            found = convert(self._table, block.columns, with_values=self._with_values)
        good = first_faults(found, even, reasons)
        splits = found.splits
        if splits is None and self.shares is None:
            splits = np.zeros(0, np.int8)
        return ParsedBlock(
            num_rows=block.num_rows,
            reasons=reasons,
            splits=None if splits is None else splits[good],
            table=to_table(found, good, self.schema),
            classes=_classes(self._table.label, found, good),
        )


def _classes(label: Label, found: Converted, good: np.ndarray) -> list[int]:
    """Returns the indices of the listed classes that well-formed rows have."""
    if not isinstance(label.classes, tuple) or LABEL not in found.arrays:
        return []
    return np.unique(found.arrays[LABEL][good]).tolist()


def check_columns(
    file: InputFile, kind: str, schema: Schema, *, inputs_only: bool = False
) -> list[str]:
    """Returns the columns of a file, after checking those that are needed.

    Args:
      file: File of a table.
      kind: From ``table_kind``.
      schema: Schema of the table.
      inputs_only: Whether neither label nor split is needed.

    Raises:
      InputError: a column is missing, or of a type that its kind does not accept.
    """
    found = table_columns(file, kind, schema.input)
    needed = schema.inputs if inputs_only else schema.needed
    has_header = kind == PARQUET or bool(schema.input.header)
    refuse_missing(needed, list(found), file.shown, has_header=has_header)
    types = {name: found[name] for name in needed}
    wrong = refusals(schema, types, inputs_only=inputs_only)
    if wrong:
        raise InputError(
            f"Expected columns of {file.shown} to be of the kinds that the schema "
            f"gives them; these are not: {', '.join(wrong)}."
        )
    return list(found)


def even_rows(block: RawBlock) -> tuple[np.ndarray, dict[int, str]]:
    """Returns the indices of even rows, and index -> reason of the uneven ones."""
    even = np.setdiff1d(np.arange(block.num_rows), block.uneven)
    return even, dict.fromkeys(block.uneven.tolist(), "another number of cells")


def first_faults(
    found: Converted, rows: np.ndarray, reasons: dict[int, str]
) -> np.ndarray:
    """Returns which rows are well-formed, bool of shape (rows,).

    Args:
      found: Converted rows, with their faults.
      rows: Indices of the rows.
      reasons: Index -> reason, to which the first fault of each malformed row is added.
    """
    good = np.ones(len(rows), bool)
    for faulty, reason in found.faults:
        for row in rows[faulty & good].tolist():
            reasons[row] = reason
        good &= ~faulty
    return good


def to_table(found: Converted, good: np.ndarray, schema: pa.Schema) -> pa.Table:
    """Returns the well-formed rows as a table.  Sensitive.

    Args:
      found: Columns of all rows.
      good: Whether each row is well-formed.
      schema: From ``prepared_schema``.
    """
    if not len(good):
        return schema.empty_table()
    keep = slice(None) if good.all() else good
    arrays = [
        found.texts[field.name].filter(pa.array(good))
        if field.name in found.texts
        else as_array(found.arrays[field.name][keep], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
