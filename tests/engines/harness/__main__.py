"""Command line of the engine harness."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import cyclopts

from accounting.core.validation import InputError
from tests.engines.harness import embedded, faults, jobs, parts, report
from tests.engines.harness.cluster import Cluster, environment
from tests.engines.harness.flink import FlinkCluster
from tests.engines.harness.hosts import HEAD, make_hosts, why_no_namespaces
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
Others = Annotated[str, cyclopts.Parameter(allow_leading_hyphen=True)]


@app.command
def build(*, clusters: bool = False) -> None:
    """Fetch and build the missing parts of the engines.

    Args:
      clusters: Also fetch cluster jars (500 MB).
    """
    for engine in parts.ENGINES:
        parts.provide(engine, cluster=clusters)


@app.command(name="all")
def run_all(*, rows: int = 2_000_000, speed_rows: int = 60_000_000) -> None:
    """Run embedded engines, clusters, faults and speed.

    Args:
      rows: Of the large job.
      speed_rows: Of the job on one worker and on two.
    """
    parts.provide_tools()
    if not all(map(parts.present, parts.ENGINES)):
        _tell("engines are built while others run: the first rows/s are too low")
    with _providing() as provided, _workspace() as folder:
        large, small = _make_jobs(folder, rows)
        table = [_local(large, small)]
        for engine in parts.ENGINES:
            provided[engine].result()
            table.append(_embedded(engine, large, small, folder))
            table.append(_cluster(engine, large, small, folder))
        try:
            timed = _speed_jobs(folder, speed_rows)
            speeds = [_speed(engine, *timed, folder) for engine in parts.ENGINES]
            report.show_speed(speeds)
        finally:
            report.show_rows(table)  # last, and also if speed could not be measured
    _refuse_differences(table)
    _refuse_waste([*table, *speeds])


@app.command
def cluster(engine: Engine, /, *, rows: int = 2_000_000) -> None:
    """Run every sampler and fault on a cluster.

    Args:
      engine: Which.
      rows: Of the large job.
    """
    parts.provide(engine)
    with _workspace() as folder:
        large, small = _make_jobs(folder, rows)
        table = [_local(large, small), _cluster(engine, large, small, folder)]
    report.show_rows(table)
    _refuse_differences(table)
    _refuse_waste(table)


@app.command
def speed(engine: Engine, /, *, speed_rows: int = 60_000_000) -> None:
    """Time one job on one worker and on two, pinned to cores.

    Args:
      engine: Which.
      speed_rows: Of the job.
    """
    parts.provide(engine)
    with _workspace() as folder:
        measured = _speed(engine, *_speed_jobs(folder, speed_rows), folder)
    report.show_speed([measured])
    _refuse_waste([measured])


@app.command
def run(engine: Engine, /, *command: Others, workers: int = 2) -> None:
    """Run a `dpsgd batches` command on a new cluster.

    For example, python -m tests.engines.harness run flink -- --input data/train \\
    --out batches --batch-size 1024 --epochs 1

    Args:
      engine: Which.
      command: Options of the command.
      workers: Number of worker hosts.
    """
    parts.provide(engine)
    with _workspace() as folder, _started(engine, workers, folder) as started:
        line = ["python", "-m", "dpsgd", "batches", *command, *started.options()]
        client = started.hosts.start(HEAD, "client", line, environment())
        status = client.wait()
        print(client.log.read_text(), end="")
    sys.exit(status)


@contextlib.contextmanager
def _providing() -> Iterator[dict[str, concurrent.futures.Future[None]]]:
    """Yields engine -> future that is done when all its parts are present."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        yield {engine: pool.submit(parts.provide, engine) for engine in parts.ENGINES}
    finally:
        pool.shutdown(cancel_futures=True)


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
    _tell(f"making {rows:,} rows, and batches of them on the local runner")
    return jobs.make_jobs(folder / "input", rows)


def _local(large: jobs.Job, small: Sequence[jobs.Job]) -> report.Row:
    outcome, same = jobs.make_references(large, small)
    return report.Row(
        engine="local",
        mode="in process",
        rows_per_second=large.rows / outcome.seconds,
        identical=[outcome.identical, *same],
    )


def _embedded(
    engine: str, large: jobs.Job, small: Sequence[jobs.Job], folder: pathlib.Path
) -> report.Row:
    _tell(f"embedded {engine}: every sampler")
    home = folder / f"{engine}-embedded"
    home.mkdir()
    with embedded.job_server(engine, home / "job-server.log") as options:
        outcome = jobs.run_here(large, home / "large", options)
        same = jobs.run_small_here(small, home, options)
    return report.Row(
        engine=engine,
        mode="embedded",
        rows_per_second=large.rows / outcome.seconds,
        identical=[outcome.identical, *same],
    )


def _cluster(
    engine: str, large: jobs.Job, small: Sequence[jobs.Job], folder: pathlib.Path
) -> report.Row:
    with _started(engine, 2, folder) as cluster:
        _tell(f"{engine} cluster: every sampler")
        home = cluster.folder
        same = jobs.run_small_on(cluster, small, home)
        outcome = jobs.run_on(cluster, large, home / "large")
        records = []
        for fault in faults.FAULTS:
            _tell(f"{engine} cluster: killing the {fault.part} while {fault.phase}")
            out = home / f"without-{fault.part.replace(' ', '-')}"
            records.append(faults.run_with_fault(cluster, large, fault, out))
            shutil.rmtree(out)
        workers = len(cluster.hosts.workers)
    return report.Row(
        engine=engine,
        mode=f"cluster, {workers} worker{'s' if workers > 1 else ''}",
        rows_per_second=large.rows / outcome.seconds,
        identical=[*same, outcome.identical],
        faults=records,
        peak_bytes=outcome.peak_bytes,
        allowed_bytes=jobs.allowed_bytes(large),
    )


def _speed_jobs(folder: pathlib.Path, rows: int) -> tuple[jobs.Job, jobs.Job]:
    """Returns the job to be timed and a small one that warms a cluster up."""
    _tell(f"making {rows:,} rows")
    large, (small, *_) = jobs.make_jobs(folder / "speed-input", rows)
    return large, small


def _speed(
    engine: str, large: jobs.Job, small: jobs.Job, folder: pathlib.Path
) -> report.Speed:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or why_no_namespaces():
        raise InputError("Expected two cores and namespaces, to pin two hosts.")
    outcomes: dict[int, jobs.Outcome] = {}
    for workers in (1, 2):
        _tell(f"{engine}, {workers} worker(s): {large.rows:,} rows")
        with _started(engine, workers, folder / "speed", cores) as cluster:
            # The small job lets Java compile what the timed job uses.
            jobs.run_on(cluster, small, cluster.folder / "small")
            outcomes[workers] = jobs.run_on(cluster, large, cluster.folder / "out")
            shutil.rmtree(cluster.folder / "out")
    if not all(outcome.identical for outcome in outcomes.values()):
        raise InputError(f"Expected {engine} to write the same bytes in every run.")
    return report.Speed(
        engine=engine,
        rows=large.rows,
        one=outcomes[1].seconds,
        two=outcomes[2].seconds,
        peak_bytes=max(outcome.peak_bytes for outcome in outcomes.values()),
        allowed_bytes=jobs.allowed_bytes(large),
    )


def _refuse_differences(table: Sequence[report.Row]) -> None:
    for row in table:
        survived = [fault.outcome.identical for fault in row.faults]
        if not all([*row.identical, *survived]):
            raise InputError(
                f"Expected {row.engine}, {row.mode}, to write the bytes of the local "
                "runner in every job."
            )


def _refuse_waste(measured: Sequence[report.Row | report.Speed]) -> None:
    for each in measured:
        if each.peak_bytes > each.allowed_bytes:
            raise InputError(
                f"Expected a Python worker on {each.engine} to stay within "
                f"{each.allowed_bytes >> 20} MiB, one block or one range of steps; it "
                f"took {each.peak_bytes >> 20} MiB."
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
