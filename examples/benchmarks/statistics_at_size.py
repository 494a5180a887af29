"""Time and memory of `dpsgd statistics`, by number of rows.

    python -m examples.benchmarks.statistics_at_size --rows 1000000,4000000 --work FOLDER

Rows have eight numbers without a range, of which two are often missing, and a label.
They are made a million at a time, and prepared, nearly all as the part `val`.  Then
ranges are found by one command in a process of its own.  Seconds of processors and the peak of its
resident memory are printed: other programs change them little.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.benchmarks.users_at_size import measure

_ROWS_OF_FILE = 1 << 20
_NUMBERS = 8
_SCHEMA = """\
version = 1
[split]
shares = [1, 100000, 1]
[columns.y]
kind = "label"
task = "binary"
"""


def rows_of(seed: int, count: int) -> pa.Table:
    """Returns rows: the same ones for the same seed.

    Args:
      seed: Which rows.
      count: How many.
    """
    rng = np.random.default_rng((11, seed))
    columns = {"y": pa.array(rng.integers(0, 2, count))}
    for place in range(_NUMBERS):
        values = rng.lognormal(place, 1, count)
        is_missing = rng.random(count) < 0.3 * (place < 2)
        columns[f"n{place}"] = pa.array(values, mask=is_missing)
    return pa.table(columns)


def prepare(work: pathlib.Path, num_rows: int) -> None:
    """Writes the table and prepares it.

    Args:
      work: New folder.
      num_rows: Of the table.
    """
    (work / "raw").mkdir(parents=True)
    for number, first in enumerate(range(0, num_rows, _ROWS_OF_FILE)):
        rows = rows_of(number, min(_ROWS_OF_FILE, num_rows - first))
        pq.write_table(rows, work / "raw" / f"part-{number:05d}.parquet")
    numbers = [f'[columns.n{n}]\nkind = "numeric"\n' for n in range(_NUMBERS)]
    (work / "schema.toml").write_text("".join([_SCHEMA, *numbers]))
    command = [
        "prepare", f"--input={work}/raw", f"--schema={work}/schema.toml",
        f"--out={work}/data",
    ]  # fmt: skip
    measure(command, work / "prepare.log")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1000000,4000000,16000000")
    parser.add_argument("--work", type=pathlib.Path, required=True)
    options = parser.parse_args()
    for num_rows in map(int, options.rows.split(",")):
        work = options.work / str(num_rows)
        prepare(work, num_rows)
        command = [
            "statistics", f"--input={work}/data/val", f"--schema={work}/schema.toml",
            f"--out={work}/found.toml", "--epsilon=3", "--delta=1e-8",
        ]  # fmt: skip
        found = measure(command, work / "statistics.log")
        print(json.dumps({"rows": num_rows, **found}), flush=True)
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
