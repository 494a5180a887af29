"""Bounded rows for tests of what follows `dpsgd prepare`: batches, runs, audits."""

from __future__ import annotations

import dataclasses
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.core.hashing import hash_ids
from pipelines.core.keys import new_key
from pipelines.core.users import UserBound
from pipelines.tables.bounding import USER, bound_pieces
from pipelines.tables.prepared_files import write_record


def bound_rows(
    source: pathlib.Path,
    out: pathlib.Path,
    settings: UserBound,
    *,
    row_group_rows: int = 1 << 17,
) -> str:
    """Writes ``out/train`` as `prepare` does, and returns its path.

    Args:
      source: Parquet with numbers and a column of ids.
      out: New folder.
      settings: Which rows are kept, by a new key.
      row_group_rows: Rows of a row group, at most.
    """
    key, table = new_key(), pq.read_table(source)
    ids = table[settings.user_column].cast(pa.large_string()).combine_chunks()
    rows = table.drop_columns([settings.user_column])
    (out / "train").mkdir(parents=True)
    piece, work = out.with_suffix(".piece"), out.with_suffix(".work")
    work.mkdir()
    pq.write_table(rows.append_column(USER, pa.array(hash_ids(ids, key))), piece)
    bound_pieces(
        [piece],
        out / "train",
        settings,
        key,
        rows.schema,
        table=str(source),
        row_group_rows=row_group_rows,
        work=work,
        memory_limit=1 << 30,
        num_threads=1,
    )
    write_record(out, rows.schema, dataclasses.asdict(settings))
    return str(out / "train")
