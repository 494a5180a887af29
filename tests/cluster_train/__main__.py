"""Trains on hosts of this machine, with faults, and holds all results together.

    python -m tests.cluster_train            what `make cluster-train` runs
    python -m tests.cluster_train --speed default     examples/s of steps of 65,536 of
    python -m tests.cluster_train --speed lazy        either model, on an idle machine

Needs root, for network namespaces; without it says so and ends.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import sys
import tempfile
from typing import Any, Literal

import cyclopts
from rich.console import Console
from rich.table import Table

from accounting.core.validation import InputError
from tests.cluster_train import jobs
from tests.cluster_train.cluster import MPIEXEC, Cluster, listening
from tests.cluster_train.faults import FAULTS, Fault, run_with_fault
from tests.cluster_train.jobs import Input
from tests.engines.harness.hosts import Hosts, make_hosts, why_no_namespaces
from tests.engines.harness.polling import wait_for

#: Of the runs with faults.
_SMALL: dict[str, Any] = {
    "batch_size": 256, "num_steps": 300, "parts": 3, "gaps": True
}  # fmt: skip
#: Of those that are timed.
_LARGE: dict[str, Any] = {
    "batch_size": 65_536, "num_steps": 60, "parts": 8, "num_evaluations": 2
}  # fmt: skip
_TIMED: dict[str, dict[str, Any]] = {
    "default": {},
    # 78 million weights, of which a step reads few, and all are completed every 82
    # steps: of a run of 820 that evaluates ten times, as it does by itself.
    "lazy": {
        "num_buckets": 375_000,
        "num_steps": 164,
        "more": ("--optimizer=sgd", "--embedding-noise=lazy"),
    },
}
#: On three workers, what two have shown is not shown again.
_FAULTS = {2: FAULTS, 3: FAULTS[:2]}


@dataclasses.dataclass
class Row:
    """What a number of workers did."""

    workers: int
    examples_per_second: float = 0.0
    identical: bool = True
    survived: list[str] = dataclasses.field(default_factory=list)


def main(
    *, speed: Literal["default", "lazy"] | None = None, seed: int | None = None
) -> None:
    """Train on one, two and three hosts of this machine.

    Args:
      speed: Time large steps of this model; no faults.
      seed: Of the moments of faults; random by default.
    """
    reason = why_no_namespaces() or (
        None if MPIEXEC else "no mpiexec: pip install mpich"
    )
    if reason:
        _tell(f"skipped: {reason}")
        return
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="dpsgd-cluster-") as name:
        folder = pathlib.Path(name)
        size = {**_LARGE, **_TIMED[speed]} if speed else _SMALL
        _tell(f"making {size['num_steps']} steps of {size['batch_size']:,} examples")
        given = jobs.make_input(folder / "input", **size)
        rows = [_alone(given, folder)]
        for workers in (2,) if speed else _FAULTS:
            rows.append(
                _together(
                    given, folder, workers, () if speed else _FAULTS[workers], draw
                )
            )
    _show(rows)
    if not all(row.identical for row in rows):
        sys.exit("error: Expected the same bytes from every number of workers.")


def _tell(message: str) -> None:
    print(f"cluster-train: {message}", file=sys.stderr)


def _cores(workers: int) -> list[int]:
    """A core for each host; where there are fewer, some share one."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[number % len(cores)] for number in range(workers)]


def _alone(given: Input, folder: pathlib.Path) -> Row:
    _tell("1 worker")
    home = folder / "1"
    with make_hosts(1, home / "logs", _cores(1)) as hosts:
        return Row(1, _whole(Cluster(hosts, home), given, home / "whole"))


def _together(
    given: Input,
    folder: pathlib.Path,
    workers: int,
    faults: tuple[Fault, ...],
    draw: random.Random,
) -> Row:
    home, wanted = folder / str(workers), folder / "1" / "whole"
    with make_hosts(workers, home / "logs", _cores(workers)) as hosts:
        cluster = Cluster(hosts, home)
        _tell(f"{workers} workers")
        row = Row(workers, _whole(cluster, given, home / "whole"))
        runs = [home / "whole"]
        for fault in faults:
            after = draw.randint(1, 7)
            _tell(f"{workers} workers: {fault.name} after {after} of 11 evaluations")
            runs.append(home / fault.name.replace(" ", "-"))
            run_with_fault(cluster, given, fault, runs[-1], after)
            row.survived.append(fault.name)
        row.identical = all(jobs.same(run, wanted) for run in runs)
    return row


def _whole(cluster: Cluster, given: Input, run: pathlib.Path) -> float:
    """Trains undisturbed, and looks at what listens meanwhile."""
    job = cluster.train("whole", given.arguments(run))
    several = len(cluster.hosts.workers) > 1
    for rank, host in enumerate(cluster.hosts.workers if several else ()):
        _check_listening(cluster.hosts, host, cluster.worker(job, rank), run)
    speed = jobs.speed(job, run, given)
    if job.wait():
        raise InputError(f"Expected a run to end well: {job.log.read_text()[-500:]}")
    return speed


def _check_listening(hosts: Hosts, host: str, pid: int, run: pathlib.Path) -> None:
    wait_for("steps", lambda: jobs.num_evaluations(run) > 0, 600)
    found = set(listening(pid).values())
    if found - {"127.0.0.1"} != {hosts.address(host)}:
        raise InputError(
            f"Expected {host} to listen on {hosts.address(host)} alone, not on {found}."
        )


def _show(rows: list[Row]) -> None:
    table = Table(title="Training on hosts of this machine, each pinned to a core")
    for column in ("workers", "examples/s", "identical bytes", "faults survived"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            str(row.workers),
            f"{row.examples_per_second:,.0f}",
            "yes" if row.identical else "NO",
            ", ".join(row.survived),
        )
    Console().print(table)


if __name__ == "__main__":
    try:
        cyclopts.run(main)
    except InputError as error:
        sys.exit(f"error: {error}")
