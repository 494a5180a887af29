"""Records of users, each of which holds the rows of one user, in columns (k, ...).

Rows are in the order of the input, padded with zeros, which have weight 0 in the column
``ROW_WEIGHTS``.  Users are in the order of their keyed numbers.

Formal guarantees:
  - one record of each user: it holds all kept rows of the user, and no other user's.
  - the rest is zero, in every column, and has weight 0.
  - a record fits a row group: a k for which it would not is refused before any work.
  - pure function: files are the same bytes on every engine.

Sensitive: rows and weights, which reveal how many rows a user has.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from accounting.core.validation import InputError, check_int
from pipelines.core.batches.columns import Column, row_bytes
from pipelines.core.users.bounded import ROW_WEIGHTS
from pipelines.inputs.parquet_blocks import numeric_columns, table_columns
from pipelines.job.spill import read_slice, spill_path
from pipelines.tables.convert import arrow_table
from pipelines.tables.prepared_files import ROW_GROUP_BYTES, new_table
from pipelines.users.bound_job import (
    KEPT_ROW,
    ROWS_OF_PARTS,
    BoundJob,
    Run,
    part_of,
    write_pieces,
)

#: Rows of a row group, at most.
_MOST_ROWS = 1 << 17


def records_schema(rows: pa.Schema, most: int) -> pa.Schema:
    """Returns the schema of records of users.

    Args:
      rows: Schema of rows.
      most: Number of rows in a record.

    Raises:
      InputError: a column that batches cannot hold, a column ``ROW_WEIGHTS``, or more
        rows than fit a row group.
    """
    columns = numeric_columns(rows)
    if ROW_WEIGHTS in rows.names:
        raise InputError(
            f"Expected no column {ROW_WEIGHTS}: it is to tell rows from padding. "
            "Rename it."
        )
    columns = (*columns, Column(name=ROW_WEIGHTS, dtype="float32"))
    check_int(
        "max_examples_per_user",
        most,
        at_most=max(1, ROW_GROUP_BYTES // row_bytes(columns)),
        remedy="One record holds so many rows of a user. Keep fewer, or sample rows.",
    )
    return pa.schema([_field(column, most) for column in columns], rows.metadata)


def _field(column: Column, most: int) -> pa.Field:
    kind = pa.from_numpy_dtype(column.numpy_dtype.base)
    for size in (*reversed(column.shape), most):
        kind = pa.list_(pa.field("item", kind, nullable=False), size)
    return pa.field(column.name, kind, nullable=False)


def _row_columns(job: BoundJob) -> tuple[Column, ...]:
    found = numeric_columns(job.schema)
    return tuple(
        Column(name=column.name, dtype=column.dtype, shape=column.shape[1:])
        for column in found
        if column.name != ROW_WEIGHTS
    )


def _row_type(columns: tuple[Column, ...]) -> np.dtype:
    fields = [(f"{i}", c.numpy_dtype) for i, c in enumerate(columns)]
    return np.dtype([("user", KEPT_ROW["user"]), *fields])


def gathered_path(job: BoundJob, run: Run) -> str:
    """Returns the file of ``gather``.

    Args:
      job: The job.
      run: The run.
    """
    return spill_path(job.folder(ROWS_OF_PARTS), run.number)


def gather(job: BoundJob, run: Run) -> None:
    """Writes the kept rows of a run, by part.

    Args:
      job: Job with all rows chosen.
      run: The run.
    """
    kept = np.concatenate([job.kept(part, run) for part in range(job.num_parts)])
    kept = kept[np.argsort(kept["row"])]
    columns = _row_columns(job)
    rows = np.zeros(len(kept), _row_type(columns))
    rows["user"] = kept["user"]
    first = 0
    for table in job.kept_rows(run, kept):
        for i, values in enumerate(table_columns(table, columns).values()):
            rows[f"{i}"][first : first + len(table)] = values
        first += len(table)
    parts = part_of(rows["user"], job.num_parts)
    counts = np.bincount(parts, minlength=job.num_parts)
    by_part = rows[np.argsort(parts, kind="stable")]
    write_pieces(gathered_path(job, run), by_part, counts)


def write_users(job: BoundJob, part: int) -> None:
    """Writes the records of a part's users.

    Args:
      job: Job with all rows gathered.
      part: Number of the part.
    """
    columns = _row_columns(job)
    kind = _row_type(columns)
    pieces = [
        np.frombuffer(read_slice(gathered_path(job, run), part), kind)
        for run in job.runs
    ]
    rows = np.concatenate(pieces)
    rows = rows[np.argsort(rows["user"], kind="stable")]
    with new_table(job.output(part), job.schema) as writer:
        most = job.settings.max_examples_per_user
        size = max(1, min(_MOST_ROWS, ROW_GROUP_BYTES // (most * kind.itemsize)))
        starts = np.flatnonzero(np.diff(rows["user"], prepend=~rows["user"][:1]))
        for first in range(0, len(starts), size):
            ends = [*starts[first + size : first + size + 1], len(rows)]
            some = rows[starts[first] : ends[0]]
            table = _records(some, columns, most, job.schema)
            writer.write_table(table, row_group_size=len(table))


def _records(
    rows: np.ndarray, columns: tuple[Column, ...], most: int, schema: pa.Schema
) -> pa.Table:
    """Returns the records of rows that are sorted by user."""
    is_first = np.diff(rows["user"], prepend=~rows["user"][:1]) != 0
    starts = np.flatnonzero(is_first)
    user = np.cumsum(is_first) - 1
    place = np.arange(len(rows)) - starts[user]
    arrays = []
    for i, column in enumerate(columns):
        values = np.zeros((len(starts), most), column.numpy_dtype)
        values[user, place] = rows[f"{i}"]
        arrays.append(values)
    weights = np.zeros((len(starts), most), np.float32)
    weights[user, place] = 1.0
    return arrow_table((*arrays, weights), schema)
