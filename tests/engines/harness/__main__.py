"""Command line of the engine harness."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import cyclopts

from accounting.core.validation import InputError
from tests.engines.harness import faults, jobs, parts
from tests.engines.harness.cluster import Cluster
from tests.engines.harness.flink import FlinkCluster
from tests.engines.harness.hosts import make_hosts, why_no_namespaces
from tests.engines.harness.spark import SparkCluster

CLUSTERS: dict[str, Callable[..., Cluster]] = {
    "flink": FlinkCluster,
    "spark": SparkCluster,
}

app = cyclopts.App(
    name="python -m tests.engines.harness",
    help="Run the batch job on Flink and Spark on this machine.",
    default_parameter=cyclopts.Parameter(negative=()),
)
Engine = Literal["flink", "spark"]


@app.command
def build(*, clusters: bool = False) -> None:
    """Fetch and build the missing parts of the engines.

    Args:
      clusters: Also fetch cluster jars (500 MB).
    """
    for engine in parts.ENGINES:
        parts.provide(engine, cluster=clusters)


@app.command(name="all")
def run_all(
    *engines: Engine, rows: int = 2_000_000, speed_rows: int = 60_000_000
) -> None:
    """Run every sampler and every fault on a cluster, then one job on 1 and 2 workers.

    Args:
      engines: Which; both by default.
      rows: Of the large job.
      speed_rows: Of the job on one worker and on two, pinned to cores; 0 for none.
    """
    chosen = engines or parts.ENGINES
    for engine in chosen:
        parts.provide(engine)
    with _workspace() as folder:
        large, small = _make_jobs(folder, rows)
        for job in (large, *small):
            _check(jobs.run_here(job, job.reference), job, "local")
        for engine in chosen:
            _cluster(engine, large, small, folder)
        if speed_rows:
            timed = _make_jobs(folder / "speed", speed_rows)
            for engine in chosen:
                _speed(engine, *timed, folder)


@contextlib.contextmanager
def _workspace() -> Iterator[pathlib.Path]:
    """Yields a folder that is removed at the end; keeps its logs after a failure."""
    parts.FOLDER.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(dir=parts.FOLDER, prefix="run-"))
    try:
        yield folder
    except InputError as error:
        kept = parts.FOLDER / "logs"
        shutil.rmtree(kept, ignore_errors=True)
        for log in folder.rglob("*.log"):
            target = kept / log.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, target)
        raise InputError(f"{error} Logs are in {kept}.") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _started(
    engine: str, workers: int, folder: pathlib.Path, cores: Sequence[int] = ()
) -> Iterator[Cluster]:
    """Yields a running cluster with its own folder and logs."""
    home = folder / f"{engine}-{workers}"
    if not shutil.which("ip"):
        parts.install("iproute2")
    if reason := why_no_namespaces():
        _tell(f"one worker host: {reason}")
    with make_hosts(workers, home / "logs", cores) as hosts:
        cluster = CLUSTERS[engine](hosts, home)
        _tell(f"starting a {engine} cluster of {len(hosts.workers)}")
        cluster.start()
        yield cluster


def _tell(message: str) -> None:
    print(f"engines: {message}", file=sys.stderr)


def _make_jobs(folder: pathlib.Path, rows: int) -> tuple[jobs.Job, list[jobs.Job]]:
    _tell(f"making {rows:,} rows")
    return jobs.make_jobs(folder / "input", rows)


def _cluster(
    engine: str, large: jobs.Job, small: Sequence[jobs.Job], folder: pathlib.Path
) -> None:
    with _started(engine, 2, folder) as cluster:
        for job in (*small, large):
            out = cluster.folder / f"{job.source.name}-{job.sampler}"
            _check(jobs.run_on(cluster, job, out), job, engine)
        for fault in faults.FAULTS:
            _tell(f"{engine} cluster: killing the {fault.part} while {fault.phase}")
            out = cluster.folder / f"without-{fault.part.replace(' ', '-')}"
            _check(faults.run_with_fault(cluster, large, fault, out), large, engine)
            shutil.rmtree(out)


def _speed(
    engine: str, large: jobs.Job, small: Sequence[jobs.Job], folder: pathlib.Path
) -> None:
    """Times one job on one worker and on two, each pinned to its own core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or why_no_namespaces():
        raise InputError("Expected two cores and namespaces, to pin two hosts.")
    for workers in (1, 2):
        with _started(engine, workers, folder / "speed", cores) as cluster:
            # The small job lets Java compile what the timed job uses.
            jobs.run_on(cluster, small[0], cluster.folder / "small")
            found = jobs.run_on(cluster, large, cluster.folder / "out")
            _check(found, large, f"{engine}, {workers} worker(s)")
            shutil.rmtree(cluster.folder / "out")


def _check(outcome: jobs.Outcome, job: jobs.Job, where: str) -> None:
    """Prints what was measured; refuses other bytes and wasted memory."""
    what = f"{where}, {job.sampler}, {job.rows:,} rows"
    allowed = jobs.allowed_bytes(job) if outcome.peak_bytes else 0
    print(
        f"{what}: {outcome.seconds:.0f} s, {outcome.peak_bytes >> 20:,} of "
        f"{allowed >> 20:,} MiB",
        flush=True,
    )
    if not outcome.identical:
        raise InputError(f"Expected {what}, to write the bytes of the first run.")
    if outcome.peak_bytes > allowed:
        raise InputError(
            f"Expected a Python worker of {what}, to stay within {allowed >> 20} MiB, "
            f"one block or one range of steps; it took {outcome.peak_bytes >> 20} MiB."
        )


def main() -> None:
    """Runs the command line; an error that the user can mend is one line."""
    try:
        app()
    except InputError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("error: Stopped.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
