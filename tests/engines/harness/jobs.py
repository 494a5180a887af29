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
        fields = needed(self.sampler, cap=BATCH_SIZE + BATCH_SIZE // 16)
        own = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
        return [
            "python", "-m", "dpsgd", "batches", "--input", str(self.source),
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


def run_here(job: Job, out: pathlib.Path) -> Outcome:
    """Runs a job by the local runner.

    Args:
      job: What runs.
      out: Folder for the batches.

    Raises:
      InputError: it failed.
    """
    begin = time.monotonic()
    result = subprocess.run(
        job.command(out), cwd=parts.ROOT, env=environment(),
        capture_output=True, text=True,
    )  # fmt: skip
    if result.returncode:
        raise InputError(f"Expected {job.sampler} to succeed: {result.stderr[-500:]}")
    return _outcome(job, out, time.monotonic() - begin)


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
