"""A table ordered in time such that its distribution shifts periodically.

The values of one column split the rows into two halves, small and large.  Step t of T,
counted from 0, gets b rows, of which the share

    p_t = (1 - cos(2 pi (t + 1/2) / P)) / 2

has large values, as day and night alternate; P is the period in steps.  Deterministic
batches of b rows keep that order.

Formal guarantees:
  - Every row is used at most once, and both halves equally often, up to one row.
  - The half that each row of a step comes from is the same for every seed; the order of
    rows within a half is a random permutation.
  - The table appears complete or not at all; an existing table is used only if it was
    made from the same files, column and sizes.
  - Its description says that its rows were ordered, as do statements of runs on it.

The order depends on all rows: no privacy is claimed.  Public: everything, since the
rows must be public.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, section 4 (periodic distribution shift).
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError, check_int
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.storage import write_atomically
from pipelines.files.unfinished import staged_folder
from pipelines.inputs.input_files import find_files
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    description_of,
    list_blocks,
)
from pipelines.inputs.source_table import ORDERED_BY

#: Number of rows in a row group.
_GROUP_ROWS = 16_384


def shares(num_steps: int, period: int) -> np.ndarray:
    """Returns the share of rows with large values in each step, shape (num_steps,).

    Args:
      num_steps: Number of steps T.
      period: Period P in steps.

    Example:
      >>> shares(4, 4).round(3).tolist()
      [0.146, 0.854, 0.854, 0.146]
    """
    times = (np.arange(num_steps) + 0.5) / period
    return (1 - np.cos(2 * np.pi * times)) / 2


def num_steps_of(num_rows: int, batch_size: int, period: int) -> int:
    """Returns the number of steps in the whole periods for which the rows suffice.

    Args:
      num_rows: Number of rows in the table.
      batch_size: Number of rows per step.
      period: Period in steps.

    Raises:
      InputError: the rows suffice for less than two periods.
    """
    check_int("batch_size", batch_size, at_least=1)
    check_int("period", period, at_least=2)
    num_periods = num_rows // (batch_size * period)
    if num_periods < 2:
        raise InputError(
            f"Expected two periods or more in {num_rows} rows; period={period} of "
            f"batch_size={batch_size} takes {batch_size * period}. Give a shorter "
            "--period or a smaller --batch-size."
        )
    return num_periods * period


def order(values: np.ndarray, *, batch_size: int, period: int, seed: int) -> np.ndarray:
    """Returns the indices of the rows in their order in time; see `num_steps_of`.

    Args:
      values: Values that split the rows in halves, (rows,); missing values are small.
      seed: Seed of the permutations.
    """
    num_steps = num_steps_of(len(values), batch_size, period)
    random = np.random.default_rng(seed)
    ranked = np.argsort(np.nan_to_num(values, nan=-np.inf), kind="stable")
    half = (len(values) + 1) // 2
    small, large = (random.permutation(side) for side in (ranked[:half], ranked[half:]))
    # The cumulative sum is rounded, so that rounding errors do not accumulate.
    total = np.floor(np.cumsum(shares(num_steps, period)) * batch_size + 1e-6)
    num_large = np.diff(total, prepend=0).astype(int)
    is_large = np.concatenate([np.arange(batch_size) < number for number in num_large])
    found = np.empty(len(is_large), np.int64)
    found[is_large] = large[: is_large.sum()]
    found[~is_large] = small[: (~is_large).sum()]
    return found


def write(
    source: str, out: pathlib.Path, *, column: str, batch_size: int, period: int
) -> None:
    """Writes the ordered table, unless it exists; see `num_steps_of`.

    Args:
      source: Parquet of the rows: a folder, a file or a glob.
      out: Folder of the new table.
      column: Column that splits the rows in halves; "name:index" for a column of lists.

    Raises:
      InputError: there is no such column, or there are too few rows.
    """
    asked = {
        "files": sorted(list_blocks(source).footers.values()),
        "shift_by": column,
        "batch_size": batch_size,
        "period": period,
    }
    note = out.with_name(f"{out.name}.json")
    if out.exists():
        if not note.exists() or read_json(note) != asked:
            raise InputError(
                f"Expected the rows in {out} to be in the requested order; "
                f"{note.name} beside it says otherwise. Give the same command, or "
                "another --out."
            )
        return
    table = pa.concat_tables(
        pq.read_table(path) for path, _ in find_files(source).files
    )
    rows = order(values_of(table, column), batch_size=batch_size, period=period, seed=0)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(note, pretty_json(asked))
    with staged_folder(str(out)) as staged:
        path = pathlib.Path(staged) / "part-00000.parquet"
        told = {**description_of(table.schema, source), ORDERED_BY: column}
        noted = {DATASET_METADATA_KEY: json.dumps(told).encode()}
        ordered = table.take(pa.array(rows)).replace_schema_metadata(noted)
        pq.write_table(ordered, path, row_group_size=_GROUP_ROWS)


def values_of(table: pa.Table, column: str) -> np.ndarray:
    """Returns the values of a column, or of one position in a column of lists.

    Args:
      table: The table.
      column: "name" or "name:index".

    Raises:
      InputError: there is no such column, or it does not hold numbers.
    """
    name, _, index = column.partition(":")
    if name not in table.column_names:
        raise InputError(
            f"Expected shift_by={column!r} to name a column: "
            f"{', '.join(table.column_names)}."
        )
    values = np.array(table[name].to_pylist())
    place = int(index) if index.isdecimal() else None
    if values.ndim == 2 and place is not None and place < values.shape[1]:
        values = values[:, place]
    if values.ndim != 1 or values.dtype.kind not in "fiub":
        raise InputError(
            f"Expected shift_by={column!r} to be a column of numbers. Give "
            f"{name}:INDEX for one position in a column of lists."
        )
    return values.astype(np.float64)
