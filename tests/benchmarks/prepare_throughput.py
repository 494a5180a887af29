"""Rows per second of ``synth`` and ``prepare``, beside the limits of the machine.

    python tests/benchmarks/prepare_throughput.py --rows 1000000 --threads 2

The limits are measured in the same run, round by round with what is compared:

  - read: ``pyarrow.csv`` reads the text on the same threads, into strings, and stops;
  - write: the bytes of the output are copied to new files and flushed to disk.

``prepare`` does both and what lies between.  A ratio of 1.0 would mean that parsing
twice, hashing and encoding cost nothing.  The median of the rounds is printed, and the
worst, since other programs share the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import pyarrow as pa
import pyarrow.csv

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from pipelines.job.runtime.tasks import Runtime
from pipelines.tables import criteo, synthetic
from pipelines.tables.job import prepare_job

TARGET_ROWS_PER_SECOND = 250_000


def read_text(paths: list[pathlib.Path]) -> None:
    """Reads the text as strings, a block at a time."""
    names = [str(index) for index in range(criteo.NUM_FIELDS)]
    for path in paths:
        reader = pyarrow.csv.open_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(column_names=names),
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string())
            ),
        )
        for _ in reader:
            pass


def write_bytes(source: pathlib.Path, out: pathlib.Path) -> None:
    """Copies the files below ``source`` and flushes them to disk."""
    out.mkdir()
    for number, path in enumerate(sorted(source.rglob("*.parquet"))):
        with open(out / str(number), "wb") as file:
            file.write(path.read_bytes())
            file.flush()
            os.fsync(file.fileno())


def seconds(function: Callable[[], object]) -> float:
    """Returns the wall-clock time of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def measure(
    folder: pathlib.Path, number: int, rows: int, threads: int
) -> dict[str, float]:
    """Returns the seconds of everything that is compared, in one round."""
    raw, data = folder / f"raw-{number}", folder / f"data-{number}"
    steps: dict[str, Callable[[], object]] = {
        "synth": lambda: synthetic.write_synth(
            raw, synthetic.SynthOptions(num_rows=rows, seed=number)
        ),
        "read": lambda: read_text(sorted(raw.iterdir())),
        "prepare": lambda: prepare_job.prepare(
            str(raw),
            data,
            criteo.PrepareOptions(),
            runtime=Runtime(num_threads=threads),
        ),
        "write": lambda: write_bytes(data, folder / f"copy-{number}"),
    }
    return {name: seconds(step) for name, step in steps.items()}


def report(rounds: list[dict[str, float]], rows: int) -> dict[str, object]:
    """Returns rows per second, and ratios of times of the same round."""
    taken = {name: [times[name] for times in rounds] for name in rounds[0]}
    limits = [
        read + write for read, write in zip(taken["read"], taken["write"], strict=True)
    ]
    ratios = [
        prepare / limit for prepare, limit in zip(taken["prepare"], limits, strict=True)
    ]
    speeds = {
        f"{name}_rows_per_second": {
            "median": round(rows / statistics.median(times)),
            "worst": round(rows / max(times)),
        }
        for name, times in {**taken, "limit": limits}.items()
    }
    return {
        "rows": rows,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        **speeds,
        "prepare_time_over_limit": round(statistics.median(ratios), 2),
        "target_rows_per_second": TARGET_ROWS_PER_SECOND,
    }


def main() -> None:
    """Measures and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    pa.set_cpu_count(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        rounds = [
            measure(pathlib.Path(folder), number, arguments.rows, arguments.threads)
            for number in range(arguments.rounds)
        ]
    print(json.dumps(report(rounds, arguments.rows), indent=2))


if __name__ == "__main__":
    main()
