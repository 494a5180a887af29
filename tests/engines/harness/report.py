"""Prints the measurements as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.engines.harness.cluster import Share
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
      shares: Worker -> its share of the large job.
      peak_bytes: Largest memory of a Python worker, in bytes.
      allowed_bytes: The bound that the job itself states, in bytes.
    """

    engine: str
    mode: str
    rows_per_second: float
    identical: list[bool]
    faults: list[Record] = dataclasses.field(default_factory=list)
    shares: dict[str, Share] = dataclasses.field(default_factory=dict)
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
      shares: Worker -> its share of the job with two workers.
      peak_bytes: Largest memory of a Python worker in either run, in bytes.
      allowed_bytes: The bound that the job itself states, in bytes.
    """

    engine: str
    rows: int
    one: float
    two: float
    shares: dict[str, Share]
    peak_bytes: int
    allowed_bytes: int


def _console() -> Console:
    """Returns the terminal, or a console of fixed width if output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def show_rows(rows: Sequence[Row]) -> None:
    """Prints faults, shares, and the table of engines."""
    console = _console()
    if any(row.faults for row in rows):
        console.print(_fault_table(rows))
    if any(row.shares for row in rows):
        console.print(_share_table(rows))
    table = Table(title="the same job on every engine")
    for column in ("engine", "mode", "rows/s", "identical bytes", "faults survived"):
        table.add_column(column)
    for row in rows:
        survived = [fault.outcome.identical for fault in row.faults]
        table.add_row(
            row.engine,
            row.mode,
            f"{row.rows_per_second:,.0f}",
            f"{'yes' if all(row.identical) else 'NO'}, {len(row.identical)} jobs",
            f"{sum(survived)} of {len(survived)}" if survived else "-",
        )
    console.print(table)


def _fault_table(rows: Sequence[Row]) -> Table:
    table = Table(title="killed with SIGKILL in mid-job")
    columns = ("engine", "killed", "pid", "at (UTC)", "while", "files done", "seconds",
               "verified, identical")  # fmt: skip
    for column in columns:
        table.add_column(column)
    for fault in (fault for row in rows for fault in row.faults):
        table.add_row(
            fault.engine,
            fault.part,
            str(fault.pid),
            fault.time,
            fault.phase,
            f"{fault.files} of {fault.total_files}",
            f"{fault.outcome.seconds:.0f}",
            "yes" if fault.outcome.identical else "NO",
        )
    return table


def _share_table(rows: Sequence[Row]) -> Table:
    table = Table(title="work of each worker, by the engine's own metrics")
    columns = (
        "engine",
        "worker",
        "read and sampled",
        "written",
        "largest Python worker",
    )
    for column in columns:
        table.add_column(column)
    for row in rows:
        for worker, share in row.shares.items():
            memory = f"{row.peak_bytes >> 20:,} of {row.allowed_bytes >> 20:,} MiB"
            table.add_row(
                row.engine, worker, f"{share.read:.0%}", f"{share.written:.0%}", memory
            )
    return table


def show_speed(speeds: Sequence[Speed]) -> None:
    """Prints the speed-up of a second worker."""
    table = Table(title="two workers against one, each pinned to one core")
    columns = ("engine", "rows", "1 worker", "2 workers", "speed-up", "each sampled",
               "each wrote", "largest Python worker")  # fmt: skip
    for column in columns:
        table.add_column(column)
    for speed in speeds:
        table.add_row(
            speed.engine,
            f"{speed.rows:,}",
            f"{speed.one:.0f} s",
            f"{speed.two:.0f} s",
            f"{speed.one / speed.two:.2f} x",
            " + ".join(f"{share.read:.0%}" for share in speed.shares.values()),
            " + ".join(f"{share.written:.0%}" for share in speed.shares.values()),
            f"{speed.peak_bytes >> 20:,} of {speed.allowed_bytes >> 20:,} MiB",
        )
    _console().print(table)
