"""Prints the measurements, one line each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tests.engines.harness.faults import Record


@dataclasses.dataclass(kw_only=True)
class Row:
    """Measurements of one engine in one mode.

    Attributes:
      engine: "local", "flink" or "spark".
      mode: "in process", "embedded" or "cluster" with its number of workers.
      rows_per_second: Of the large job, from the start of the command to its end.
      identical: For each job, whether its bytes equal the local runner's.
      faults: One record for each killed process.
      peak_bytes: Largest memory of a Python worker, in bytes.
      allowed_bytes: The bound that the job itself states, in bytes.
    """

    engine: str
    mode: str
    rows_per_second: float
    identical: list[bool]
    faults: list[Record] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    allowed_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Times of one job on one worker and on two, each pinned to its own core.

    Attributes:
      engine: "flink" or "spark".
      rows: Number of rows of the job.
      one: Seconds with one worker.
      two: Seconds with two.
      peak_bytes: Largest memory of a Python worker in either run, in bytes.
      allowed_bytes: The bound that the job itself states, in bytes.
    """

    engine: str
    rows: int
    one: float
    two: float
    peak_bytes: int
    allowed_bytes: int


def show_rows(rows: Sequence[Row]) -> None:
    """Prints each row and its faults."""
    for row in rows:
        same = "identical bytes" if all(row.identical) else "OTHER BYTES"
        print(
            f"{row.engine}, {row.mode}: {row.rows_per_second:,.0f} rows/s, {same} in "
            f"{len(row.identical)} jobs{_memory(row)}"
        )
        for fault in row.faults:
            same = "identical bytes" if fault.outcome.identical else "OTHER BYTES"
            print(
                f"  killed {fault.part} ({fault.pid}) at {fault.time} UTC while "
                f"{fault.phase}, {fault.files} of {fault.total_files} files done: "
                f"{same} after {fault.outcome.seconds:.0f} s"
            )


def show_speed(speeds: Sequence[Speed]) -> None:
    """Prints the speed-up of a second worker, each pinned to one core."""
    for speed in speeds:
        print(
            f"{speed.engine}, {speed.rows:,} rows: {speed.one:.0f} s on 1 worker, "
            f"{speed.two:.0f} s on 2, {speed.one / speed.two:.2f} x"
            f"{_memory(speed)}"
        )


def _memory(of: Row | Speed) -> str:
    if not of.allowed_bytes:
        return ""
    return f", {of.peak_bytes >> 20:,} of {of.allowed_bytes >> 20:,} MiB"
