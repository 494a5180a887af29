"""What the standalone clusters of Flink and Spark have in common.

Each worker host runs one worker of the engine and one pool of Python workers.  A client
on the head submits jobs: ``dpsgd batches`` with ``Cluster.options``.
"""

from __future__ import annotations

import abc
import contextlib
import os
import pathlib
import sys
from collections.abc import Sequence

from tests.engines.harness import parts
from tests.engines.harness.embedded import RUNNERS, job_server_command
from tests.engines.harness.hosts import HEAD, Hosts, Process
from tests.engines.harness.polling import wait_for

POOL_PORT = 50000
JOB_PORT = 8099


class Cluster(abc.ABC):
    """A master and a job server on the head; workers and pools on the other hosts.

    Args:
      hosts: Where the parts run.
      folder: For configuration, logs and temporary files; made if missing.
    """

    engine: str

    def __init__(self, hosts: Hosts, folder: pathlib.Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.engines: dict[str, Process] = {}
        self.pools: dict[str, Process] = {}
        self.job_server: Process | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @abc.abstractmethod
    def start_master(self) -> None:
        """Starts the master; returns when it answers."""

    @abc.abstractmethod
    def start_engine(self, host: str) -> None:
        """Starts the engine's worker on a host, or replaces one that died."""

    @abc.abstractmethod
    def num_engines(self) -> int:
        """Returns the number of workers that the master counts as alive."""

    @abc.abstractmethod
    def job_server_options(self) -> list[str]:
        """Returns the job server's options that name the master."""

    @abc.abstractmethod
    def cancel_jobs(self) -> None:
        """Cancels jobs whose client or job server died."""

    def java_options(self) -> Sequence[str]:
        """Returns options of the job server's Java."""
        return ()

    def job_server_environment(self) -> dict[str, str]:
        """Returns the environment variables of the job server."""
        return environment()

    def start(self) -> None:
        """Starts all parts; returns when the master counts every worker as alive."""
        self.start_master()
        for host in self.hosts.workers:
            self.start_pool(host)
            self.start_engine(host)
        self.start_job_server()
        count = len(self.hosts.workers)
        wait_for(f"{count} workers of {self.engine}", lambda: self.all_there())

    def all_there(self) -> bool:
        """Returns whether the master counts every worker as alive."""
        return self.num_engines() == len(self.hosts.workers)

    def start_pool(self, host: str) -> None:
        """Starts the pool of Python workers of a host."""
        module = "apache_beam.runners.worker.worker_pool_main"
        command = ["python", "-m", module, "--service_port", str(POOL_PORT)]
        self.pools[host] = self.hosts.start(host, "pool", command, environment())

    def start_job_server(self) -> None:
        """Starts Beam's job server for this cluster."""
        artifacts = self.folder / "artifacts"
        command = job_server_command(
            self.engine, JOB_PORT, artifacts, self.java_options()
        )
        self.job_server = self.hosts.start(
            HEAD,
            f"{self.engine}-job-server",
            [*command, *self.job_server_options()],
            self.job_server_environment(),
        )

    def options(self) -> list[str]:
        """Returns the options with which ``dpsgd batches`` submits to this cluster."""
        return [
            f"--runner={RUNNERS[self.engine]}",
            f"--job_endpoint=localhost:{JOB_PORT}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{POOL_PORT}",
            # Starting a Python worker takes seconds, so that it outlives a stage.
            "--environment_cache_millis=600000",
            f"--parallelism={len(self.hosts.workers)}",
        ]

    def python_workers(self) -> list[int]:
        """Returns the process ids of the Python workers that the pools started."""
        return [pid for pool in self.pools.values() for pid in children(pool.pid)]


def children(pid: int) -> list[int]:
    """Returns the process ids of the running children of a process."""
    found = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):  # of each thread
        with contextlib.suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return found


def environment() -> dict[str, str]:
    """Returns variables with this program's ``python`` and ``java`` first on the PATH.

    A pool starts its workers as plain ``python``.
    """
    variables = parts.environment()
    folder = pathlib.Path(sys.executable).parent
    variables["PATH"] = f"{folder}{os.pathsep}{variables['PATH']}"
    variables["PYTHONPATH"] = str(parts.ROOT)
    return variables
