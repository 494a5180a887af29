"""Tables of numbers whose users are bounded, for tests of what comes after."""

from __future__ import annotations

import pathlib
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.core.users.user_ids import hash_ids
from pipelines.inputs.parquet_blocks import list_row_groups
from pipelines.inputs.source_table import keep_table, table_of
from pipelines.tables.bounding import USER, BoundSettings, Limits, bound_pieces

KEY = bytes(range(32))


def bound(path: pathlib.Path | str, out: pathlib.Path, settings: BoundSettings) -> None:
    """Writes the rows of a Parquet file of numbers, at most so many of each user."""
    table = pq.read_table(path)
    ids = table[settings.user_column].combine_chunks().cast(pa.large_string())
    rows = table.drop_columns(settings.user_column)
    out.mkdir()
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        users = pa.array(hash_ids(ids, KEY))
        pq.write_table(rows.append_column(USER, users), work / "piece.parquet")
        bound_pieces(
            [work / "piece.parquet"],
            out,
            settings,
            KEY,
            rows.schema,
            table="",
            limits=Limits(work=work / "w", memory_limit=2 << 30, num_threads=1),
            row_group_rows=1 << 17,
            row_groups_per_file=32,
        )
    keep_table(out, table_of(list_row_groups(str(path))))
