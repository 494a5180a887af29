"""Rows of a user's pipeline (BigQuery, Avro, a database) to prepared Parquet.

    OUT/train/part-00000-of-00004.parquet ...  and the same below OUT/val and OUT/test

``PrepareRows`` converts dicts by a schema, as `dpsgd prepare` does with files, and
writes them by Beam's Parquet sink.  Batches are made from the files, in a second
pipeline: sampling needs the number of rows and the place of each.

Formal guarantees:
  - A row becomes the numbers that ``prepare`` makes of it in a file.
  - Every row is in one split, decided by the row alone: a pipeline has no order.
  - Files appear complete or not at all; a bundle that is run again writes no row twice.
  - A schema with a column of users needs a ``BoundUsers``, which bounds only the rows
    for training; no file holds ids, and the files for training hold the note about it.
  - With on_bad_row="fail" a malformed row fails the pipeline; with "skip" it is left
    out.  No message holds its content, and no counter its number: engines show them.

Public: the schema.  Sensitive: rows and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.io.parquetio import WriteToParquetBatched

from accounting.validation import InputError, check_choice
from pipelines.files.folders import make_private_folder
from pipelines.files.output_folder import check_output
from pipelines.files.paths import StrPath, absolute, is_remote, join
from pipelines.tables.columns import convert, refusals
from pipelines.tables.convert import ON_BAD_ROW, SPLITS
from pipelines.tables.schema.schema import FRACTION, HASH, Schema, refuse_missing
from pipelines.tables.table_format import first_faults, prepared_schema, to_table

if TYPE_CHECKING:
    from pipelines.inputs.bounded import Bounded
    from pipelines.users.bound_rows import BoundUsers

#: Maximum number of rows that are converted at once.
_MOST_ROWS = 4096


class PrepareRows(beam.PTransform):
    """Converts rows by a schema, and writes them.

    Input: a PCollection of dicts, from names of columns to values.  Output: a
    PCollection of the paths of all files.

    Args:
      schema: Schema of the rows, with a split by hash or by time.
      out: New or empty folder, or a path in a store.
      on_bad_row: "fail" or "skip" a malformed row.
      files_per_split: Number of files per split; 0 lets Beam choose.
      users: Bounds the users of a schema with a column of users.

    Raises:
      InputError: a split by shares, which needs an order, a folder in use, or users
        that are not bounded.

    Example:
      >>> with beam.Pipeline() as pipeline:  # doctest: +SKIP
      ...     rows = pipeline | beam.io.ReadFromAvro("people.avro")
      ...     _ = rows | PrepareRows(Schema.read("schema.toml"), "data")
    """

    def __init__(
        self,
        schema: Schema,
        out: StrPath,
        *,
        on_bad_row: str = "fail",
        files_per_split: int = 0,
        users: BoundUsers | None = None,
    ) -> None:
        super().__init__()
        if schema.split.by == FRACTION:
            raise InputError(
                "Expected a split by hash or time: the rows of a pipeline have no "
                f'order. Write by = "{HASH}" and column = "..." below [split] of the '
                "schema."
            )
        check_choice("on_bad_row", on_bad_row, ON_BAD_ROW)
        if schema.user != ("" if users is None else users.note.user_column):
            raise InputError(
                "Expected the rows of users of a schema to be bounded: for its column "
                f"of kind user, {schema.user or 'which there is none'}, give users="
                "BoundUsers(user_column=...), and for a schema without one give none."
            )
        self._users = users
        self._schema, self._on_bad_row = schema, on_bad_row
        self._num_files = files_per_split
        self._out = absolute(out)

    def expand(self, rows: beam.PCollection) -> beam.PCollection:
        """Makes the folder, and wires conversion and writing.

        Raises:
          InputError: the folder is in use.
        """
        if not is_remote(self._out):
            check_output(self._out)
            make_private_folder(self._out, remedy="Choose another folder.")
        if self._users is not None:
            rows = self._with_bounded_training(rows, self._users)
        parts = (
            rows
            | "Group" >> beam.BatchElements(max_batch_size=_MOST_ROWS)
            | "Convert"
            >> beam.ParDo(_Convert(self._schema, self._on_bad_row)).with_outputs(
                *SPLITS
            )
        )
        written = [
            parts[split]
            | f"Write {split}"
            >> WriteToParquetBatched(
                join(self._out, split, "part"),
                _file_schema(self._schema, self._note(split)),
                codec="zstd",
                file_name_suffix=".parquet",
                num_shards=self._num_files,
            )
            for split in SPLITS
        ]
        return written | beam.Flatten()

    def _note(self, split: str) -> Bounded | None:
        return self._users.note if self._users and split == SPLITS[0] else None

    def _with_bounded_training(
        self, rows: beam.PCollection, users: BoundUsers
    ) -> beam.PCollection:
        """Returns all rows with their ids, after bounding those for training."""
        training, others = (
            rows
            | "GroupToSplit" >> beam.BatchElements(max_batch_size=_MOST_ROWS)
            | "Split"
            >> beam.ParDo(_Split(self._schema)).with_outputs("others", main="training")
        )
        return (
            training | "Bound" >> users.with_ids(),
            others,
        ) | "Join" >> beam.Flatten()


def _file_schema(schema: Schema, bounded: Bounded | None = None) -> pa.Schema:
    # Pickling forgets that elements of lists are never null.
    return prepared_schema(schema, nullable_items=True, bounded=bounded)


class _Split(beam.DoFn):
    """Lists of rows -> single rows; those that are not for training have a tag."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def process(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        """Yields the rows; a row without a split is refused later."""
        name = self._schema.split.column
        column = _columns(self._schema, rows, (name,))
        splits = convert(self._schema, column, check_only=True).splits
        assert splits is not None  # not by shares
        for row, split in zip(rows, splits.tolist(), strict=True):
            yield beam.pvalue.TaggedOutput("others", row) if split else row


@beam.typehints.with_output_types(pa.Table)
class _Convert(beam.DoFn):
    """Lists of rows -> a table for each split."""

    def __init__(self, schema: Schema, on_bad_row: str) -> None:
        self._schema, self._on_bad_row = schema, on_bad_row

    def process(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        """Yields tables, tagged with their splits."""
        reasons: dict[int, str] = {}
        found = convert(self._schema, _columns(self._schema, rows, self._schema.needed))
        good = first_faults(found, np.arange(len(rows)), reasons)
        if reasons and self._on_bad_row != "skip":
            reason = min(reasons.values())
            remedy = "Fix it."
            if not reason.startswith(f"{self._schema.label_name} "):
                remedy = 'Fix it, or leave such rows out with on_bad_row="skip".'
            raise InputError(f"Expected well-formed rows: {reason}. {remedy}")
        assert found.splits is not None  # not by shares
        arrow_schema = _file_schema(self._schema)
        for number, split in enumerate(SPLITS):
            mine = good & (found.splits == number)
            if mine.any():
                yield beam.pvalue.TaggedOutput(
                    split, to_table(found, mine, arrow_schema)
                )


def _columns(
    schema: Schema, rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, pa.Array]:
    """Returns columns of the rows.  Sensitive.

    Args:
      schema: Schema of the rows.
      rows: Rows of the pipeline.
      names: Names of the columns.

    Raises:
      InputError: a column is missing, or of a type that its kind does not accept.
    """
    refuse_missing(names, list(rows[0]), "the rows of the pipeline")
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            # The message of the error quotes a value.
            raise InputError(
                f"Expected values of one type in column {name}: "
                f"{type(error).__name__}. Convert them before PrepareRows."
            ) from None
    types = {name: column.type for name, column in columns.items()}
    if wrong := refusals(schema, types):
        raise InputError(
            "Expected columns of the kinds that the schema gives them; these are not: "
            f"{', '.join(wrong)}."
        )
    return columns
