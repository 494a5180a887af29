"""One job on hosts that share nothing but an object store.

Input, key, shuffle and batches are in a bucket of an S3 server on the head.  Its
buckets are folders, as those of nanio are, so that the result can be read from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import time
from collections.abc import Iterator

from accounting.core.validation import InputError
from pipelines.batches.verify import verify
from pipelines.files.key_files import create_key_file
from tests.benchmarks import prepared_rows
from tests.engines.harness import jobs
from tests.engines.harness.cluster import Cluster, environment
from tests.engines.harness.comparing import keep_checksums, same_checksums
from tests.engines.harness.hosts import HEAD, Hosts
from tests.engines.harness.polling import wait_for

_PORT = 9000
#: Of a Python worker, whatever the size of the job.
MOST_BYTES = 10**9
#: Nobody's: the server is reached from these hosts alone.
_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """How the job went.

    Attributes:
      seconds: From the start of the command to its end.
      python_bytes: Peak resident memory of a Python worker.
      java_bytes: Peak resident memory of an engine's worker.
    """

    seconds: float
    python_bytes: int
    java_bytes: int


def make_bucket(folder: pathlib.Path, rows: int) -> pathlib.Path:
    """Makes the folder of a bucket with input and key, and returns it.

    Args:
      folder: Of all buckets.
      rows: Of the input.
    """
    bucket = folder / "bucket"
    prepared_rows.write_rows(bucket / "train", rows, repeat=True)
    create_key_file(bucket / "sampling.key")
    return bucket


@contextlib.contextmanager
def serving(hosts: Hosts, server: str, folder: pathlib.Path) -> Iterator[None]:
    """Serves the buckets on the head, to processes that start within the context.

    Args:
      hosts: Of the cluster.
      server: A command with {address}, {port} and {folder}.
      folder: Of all buckets.
    """
    address = hosts.address(HEAD)
    command = server.format(address=address, port=_PORT, folder=folder)
    found = {**_CREDENTIALS, "AWS_ENDPOINT_URL": f"http://{address}:{_PORT}"}
    before = dict(os.environ)
    os.environ.update(found)
    try:
        hosts.start(HEAD, "s3", shlex.split(command), environment())
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(cluster: Cluster, bucket: pathlib.Path, longest: float) -> Measured:
    """Runs the job to its end.

    Args:
      cluster: Started within ``serving``.
      bucket: From ``make_bucket``.
      longest: Seconds after which it failed.

    Raises:
      InputError: it failed, or took too long.
    """
    command = [*_command("s3://bucket", "s3://bucket/out"), *cluster.options()]
    begin = time.monotonic()
    client = cluster.hosts.start(HEAD, "client", command, environment())
    python = java = 0

    def ended() -> bool:
        nonlocal python, java
        python = max([python, *map(jobs.peak_bytes, cluster.python_workers())])
        engines = (engine.pid for engine in cluster.engines.values())
        java = max([java, *map(jobs.peak_bytes, engines)])
        return not client.running()

    wait_for("the end of the job", ended, longest)
    seconds = time.monotonic() - begin
    if client.wait():
        raise InputError(f"Expected the job to succeed: {jobs.last_line(client.log)}")
    return Measured(seconds=seconds, python_bytes=python, java_bytes=java)


def check(bucket: pathlib.Path) -> None:
    """Compares the batches of ``run`` with those of the local runner, and removes them.

    Args:
      bucket: From ``make_bucket``.

    Raises:
      InputError: they differ, or the bucket holds more than input and batches.
    """
    out, found, local = (bucket / "out", *map(bucket.with_name, ("found", "local")))
    if left := _left(bucket):
        raise InputError(f"Expected nothing beside input and batches; found {left}.")
    if verify(out).findings:
        raise InputError("Expected batches that verify.")
    keep_checksums(out, found)
    shutil.rmtree(out)  # the disk need not hold both
    jobs.run_command(_command(str(bucket), str(local)), "the local job")
    if not same_checksums(found, local):
        raise InputError("Expected the bytes of the local runner.")


def _command(bucket: str, out: str) -> list[str]:
    return [
        "python", "-m", "dpsgd", "batches", "--input", f"{bucket}/train", "--out", out,
        "--key-file", f"{bucket}/sampling.key", "--batch-size", "65536",
        "--epochs", "1", "--sampler", "poisson",
    ]  # fmt: skip


def _left(bucket: pathlib.Path) -> list[str]:
    known = re.compile(
        r"train/.*|sampling\.key|out/(batches-.*|manifest\.json|private/checksums\.json)"
    )
    paths = (path for path in bucket.rglob("*") if path.is_file())
    found = (path.relative_to(bucket).as_posix() for path in paths)
    # Hidden: the server's own.
    return sorted(n for n in found if not known.fullmatch(n) and n[0] != ".")
