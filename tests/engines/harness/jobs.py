"""Runs the batch job on an engine, times it, and compares it with the local runner.

Compares two folders of batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from accounting.core.plan import SAMPLERS, TRUNCATED_POISSON
from accounting.core.validation import InputError
from pipelines.batches.folder import CHECKSUMS_NAME, MANIFEST_NAME, PRIVATE_NAME
from pipelines.batches.verify import verify
from pipelines.job.spill import BLOCK_PREFIX
from tests.benchmarks import prepared_rows
from tests.engines.harness import parts
from tests.engines.harness.cluster import Cluster, environment
from tests.engines.harness.hosts import HEAD, Process
from tests.engines.harness.polling import wait_for
from tests.sampler_fields import needed

BATCH_SIZE = 1024
_LONGEST = 900.0
_ROWS_OF_SAMPLERS = 50_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One job of ``dpsgd batches``, for any engine.

    Attributes:
      source: Folder of Parquet files.
      rows: Number of rows in it.
      key_file: The sampling key.
      sampler: One of ``SAMPLERS``; it runs for one epoch.
      reference: Folder with the expected result: the local runner's batches, or the
        checksums of the first run if the local runner did not run.
    """

    source: pathlib.Path
    rows: int
    key_file: pathlib.Path
    sampler: str
    reference: pathlib.Path

    def command(self, out: pathlib.Path, options: Sequence[str] = ()) -> list[str]:
        """Returns the command line that writes ``out``.

        Args:
          out: Folder for the batches.
          options: Further options, such as those of a cluster.
        """
        return ["python", "-m", "dpsgd", *self.arguments(out, options)]

    def arguments(self, out: pathlib.Path, options: Sequence[str] = ()) -> list[str]:
        """Returns the arguments of ``dpsgd`` in ``command``, which takes the same."""
        fields = needed(self.sampler, cap=BATCH_SIZE + BATCH_SIZE // 16)
        own = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
        return [
            "batches", "--input", str(self.source),
            "--out", str(out), "--key-file", str(self.key_file),
            "--batch-size", str(BATCH_SIZE), "--epochs", "1",
            "--sampler", self.sampler,
            *own, *options,
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job went.

    Attributes:
      seconds: From the start of the command to its end.
      identical: Whether the batches verify and equal the reference.
      peak_bytes: Peak resident memory of a Python worker, in bytes; 0 if unknown.
    """

    seconds: float
    identical: bool
    peak_bytes: int = 0


def make_jobs(folder: pathlib.Path, rows: int) -> tuple[Job, list[Job]]:
    """Makes inputs; returns a large job, and a small one for every sampler.

    Args:
      folder: For inputs, keys and references.
      rows: Number of rows of the large job.
    """
    prepared_rows.write_rows(folder / "large", rows, repeat=True)
    (folder / "small").mkdir()
    small_file = folder / "small" / "part-0.parquet"
    prepared_rows.write_table(small_file, _ROWS_OF_SAMPLERS, 4000)

    def job(size: str, count: int, sampler: str) -> Job:
        return Job(
            source=folder / size,
            rows=count,
            key_file=folder / "sampling.key",
            sampler=sampler,
            reference=folder / f"local-{size}-{sampler}",
        )

    small = [job("small", _ROWS_OF_SAMPLERS, sampler) for sampler in SAMPLERS]
    return job("large", rows, TRUNCATED_POISSON), small


def run_here(job: Job, out: pathlib.Path, options: Sequence[str] = ()) -> Outcome:
    """Runs a job as a process on this machine.

    Args:
      job: What runs.
      out: Folder for the batches.
      options: Further options of ``dpsgd batches``.

    Raises:
      InputError: it failed.
    """
    begin = time.monotonic()
    run_command(job.command(out, options), f"{job.sampler} on {options}")
    return _outcome(job, out, time.monotonic() - begin)


def run_command(command: Sequence[str], what: str) -> None:
    """Runs a command on this machine.

    Args:
      command: The program and its arguments.
      what: Names it in the error.

    Raises:
      InputError: it failed.
    """
    result = subprocess.run(
        command, cwd=parts.ROOT, env=environment(), capture_output=True, text=True
    )
    if result.returncode:
        raise InputError(f"Expected {what} to succeed: {result.stderr[-500:]}")


def make_references(large: Job, small: Sequence[Job]) -> tuple[Outcome, list[bool]]:
    """Makes the references of jobs with the local runner.

    Args:
      large: Run first, and timed.
      small: Run in one process.

    Returns:
      The outcome of the large job, and of each small one whether it verifies.
    """
    outcome = run_here(large, large.reference)
    outs = [job.reference for job in small]
    run_command(_several(small, outs), "small jobs")
    return outcome, _identical(small, outs)


def run_small_here(
    small: Sequence[Job], folder: pathlib.Path, options: Sequence[str]
) -> list[bool]:
    """Runs small jobs in one process; returns of each whether its bytes are right.

    Args:
      small: The jobs.
      folder: For their batches.
      options: Further options of ``dpsgd batches``.

    Raises:
      InputError: one of them failed.
    """
    outs = [folder / job.sampler for job in small]
    run_command(_several(small, outs, options), f"small jobs on {options}")
    return _identical(small, outs)


def run_small_on(
    cluster: Cluster, small: Sequence[Job], folder: pathlib.Path
) -> list[bool]:
    """Runs small jobs on a cluster; returns of each whether its bytes are right.

    Args:
      cluster: Where they run.
      small: The jobs.
      folder: For their batches.

    Raises:
      InputError: one of them failed, or all of them took too long.
    """
    outs = [folder / job.sampler for job in small]
    command = _several(small, outs, cluster.options())
    client = cluster.hosts.start(HEAD, "client-small", command, environment())
    wait_for("the end of the small jobs", lambda: not client.running(), _LONGEST)
    if client.wait():
        raise InputError(f"Expected small jobs to succeed: {last_line(client.log)}")
    return _identical(small, outs)


def _several(
    small: Sequence[Job], outs: Sequence[pathlib.Path], options: Sequence[str] = ()
) -> list[str]:
    commands = [
        job.arguments(out, options) for job, out in zip(small, outs, strict=True)
    ]
    return ["python", "-m", "tests.engines.harness.run_commands", json.dumps(commands)]


def _identical(small: Sequence[Job], outs: Sequence[pathlib.Path]) -> list[bool]:
    pairs = zip(small, outs, strict=True)
    return [_outcome(job, out, 0.0).identical for job, out in pairs]


def allowed_bytes(job: Job) -> int:
    """Returns the bytes that ``--dry-run`` says a Python worker needs."""
    result = subprocess.run(
        job.command(job.reference, ["--dry-run", "--json"]),
        cwd=parts.ROOT,
        env=environment(),
        capture_output=True,
        check=True,
    )
    return json.loads(result.stdout)["bytes_per_worker"]


def start_on(cluster: Cluster, job: Job, out: pathlib.Path) -> Process:
    """Submits a job to a cluster; returns its client, which ends with the job.

    Args:
      cluster: Where the job runs.
      job: What runs.
      out: Folder for the batches.
    """
    command = job.command(out, cluster.options())
    return cluster.hosts.start(HEAD, f"client-{out.name}", command, environment())


def run_on(
    cluster: Cluster,
    job: Job,
    out: pathlib.Path,
    meanwhile: Callable[[Process], None] = lambda _: None,
) -> Outcome:
    """Runs a job on a cluster to its end.

    Args:
      cluster: Where the job runs.
      job: What runs.
      out: A new folder, or one of the same job that was interrupted.
      meanwhile: Called with the client once it has started.

    Raises:
      InputError: it failed, or took too long.
    """
    begin = time.monotonic()
    client = start_on(cluster, job, out)
    meanwhile(client)
    peak = 0

    def ended() -> bool:
        nonlocal peak
        peak = max([peak, *map(peak_bytes, cluster.python_workers())])
        return not client.running()

    wait_for(f"the end of {out.name}", ended, _LONGEST)
    seconds = time.monotonic() - begin
    if client.wait():
        raise InputError(f"Expected {out.name} to succeed: {last_line(client.log)}")
    return dataclasses.replace(_outcome(job, out, seconds), peak_bytes=peak)


def _outcome(job: Job, out: pathlib.Path, seconds: float) -> Outcome:
    intact = not verify(out).findings
    if intact and not job.reference.exists():
        keep_checksums(out, job.reference)
    identical = intact and same_checksums(out, job.reference)
    return Outcome(seconds=seconds, identical=identical)


def num_sampled(out: pathlib.Path) -> int:
    """Returns the number of sampled blocks of an unfinished job."""
    return len(list(out.glob(f"private/spill/*/{BLOCK_PREFIX}*")))


def num_written(out: pathlib.Path) -> int:
    """Returns the number of finished batch files."""
    return len(list(out.glob("batches-*.tfrecord")))


def peak_bytes(pid: int) -> int:
    """Returns the peak resident memory of a process in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        if found := re.search(r"VmHWM:\s+(\d+) kB", status):
            return int(found[1]) << 10
    return 0


def last_line(log: pathlib.Path) -> str:
    """Returns the last line of a log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


_CHECKSUMS = (MANIFEST_NAME, f"{PRIVATE_NAME}/{CHECKSUMS_NAME}")


def same_checksums(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Returns whether the manifests and the SHA-256 of every file are equal.

    Then the batches of verified folders are equal, which are not read for it.

    Args:
      one: A folder of batches.
      other: Another, or one that ``keep_checksums`` filled.
    """
    return all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in _CHECKSUMS
    )


def keep_checksums(out: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the files that ``same_checksums`` reads.

    Args:
      out: A folder of batches.
      folder: Where the copies go; must not exist.
    """
    (folder / PRIVATE_NAME).mkdir(parents=True)
    for name in _CHECKSUMS:
        shutil.copy(out / name, folder / name)
