"""Writes prepared rows of Criteo's shape as fast as the disk takes them.

The values are random and carry no signal: this is input for throughput and memory.

    python -m tests.benchmarks.prepared_rows --rows 46000000 --out rows46m
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY
from tests.criteo import described

ROWS_PER_GROUP = 131_072
ROWS_PER_FILE = 32 * ROWS_PER_GROUP
BUCKETS = 100_000
DESCRIPTION = json.dumps(described(BUCKETS))
SCHEMA = pa.schema(
    [
        ("label", pa.int8()),
        ("integers", pa.list_(pa.float32(), 13)),
        ("categories", pa.list_(pa.int32(), 26)),
    ],
    metadata={DATASET_METADATA_KEY: DESCRIPTION.encode()},
)


def make_table(num_rows: int, random: np.random.Generator) -> pa.Table:
    """Returns ``num_rows`` random rows."""

    def lists(values: np.ndarray, size: int) -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(values), size)

    label = random.integers(0, 2, num_rows, dtype=np.int8)
    integers = random.integers(0, 5000, 13 * num_rows).astype(np.float32)
    categories = random.integers(0, BUCKETS, 26 * num_rows, dtype=np.int32)
    return pa.table(
        [pa.array(label), lists(integers, 13), lists(categories, 26)], schema=SCHEMA
    )


def write_table(path: pathlib.Path, num_rows: int, rows_per_group: int) -> None:
    """Writes ``num_rows`` rows, all distinct, as one file."""
    table = make_table(num_rows, np.random.default_rng(0))
    pq.write_table(table, path, row_group_size=rows_per_group)


def write_rows(out: pathlib.Path, num_rows: int, *, repeat: bool = False) -> None:
    """Writes ``num_rows`` rows to ``out``, of which 16 row groups are distinct.

    Args:
      out: A new folder.
      num_rows: Of all files together.
      repeat: Whether these 16 are on the disk once or twice, and a footer names them
        again and again: 0.7 GB at most, of which every row is read as of a full file.
    """
    out.mkdir(parents=True)
    random = np.random.default_rng(0)
    tables = [make_table(ROWS_PER_GROUP, random) for _ in range(16)]
    first = num_rows - num_rows % (16 * ROWS_PER_GROUP) if repeat else 0
    if first:
        _write_groups(out / "distinct.parquet", tables, 16 * ROWS_PER_GROUP)
        _repeat_groups(out / "distinct.parquet", first // (16 * ROWS_PER_GROUP))
    for number, start in enumerate(range(first, num_rows, ROWS_PER_FILE)):
        path = out / f"part-{number:05d}.parquet"
        _write_groups(path, tables, min(ROWS_PER_FILE, num_rows - start))


def _write_groups(path: pathlib.Path, tables: list[pa.Table], num_rows: int) -> None:
    with pq.ParquetWriter(
        path, SCHEMA, compression="none", use_dictionary=False
    ) as writer:
        for index, start in enumerate(range(0, num_rows, ROWS_PER_GROUP)):
            table = tables[index % 16].slice(0, num_rows - start)
            writer.write_table(table, row_group_size=ROWS_PER_GROUP)


def _repeat_groups(path: pathlib.Path, times: int) -> None:
    """Replaces the footer of a file by one that names all of its groups ``times``."""
    groups, footer = pq.read_metadata(path), io.BytesIO()
    repeated = pq.read_metadata(path)
    for _ in range(times - 1):
        repeated.append_row_groups(groups)
    repeated.write_metadata_file(footer)
    with open(path, "r+b") as file:
        file.seek(-(groups.serialized_size + 8), os.SEEK_END)
        file.truncate()
        file.write(footer.getvalue()[4:])  # without the magic of a file's begin


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    write_rows(arguments.out, arguments.rows)


if __name__ == "__main__":
    main()
