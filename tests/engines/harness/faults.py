"""Kills one part of a cluster in mid-job, and checks that the job survives.

The part gets SIGKILL by its process id, together with its children, as when a container
dies.  It is then replaced, as Kubernetes would.  It is killed when a condition holds,
never at a time:

    sampling    some blocks are sampled, others are not
    writing     some batch files exist, others do not
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from accounting.core.validation import InputError
from pipelines.batches.folder import MANIFEST_NAME
from tests.engines.harness.cluster import Cluster
from tests.engines.harness.hosts import Process
from tests.engines.harness.jobs import (
    Job,
    Outcome,
    last_line,
    num_sampled,
    num_written,
    run_on,
    start_on,
)
from tests.engines.harness.polling import wait_for

SAMPLING, WRITING = "sampling", "writing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Which part is killed, and when.

    Attributes:
      part: "engine" (a TaskManager; a Spark worker with its executor), "pool" (with its
        Python workers) or "job server".
      phase: ``SAMPLING`` or ``WRITING``.
    """

    part: str
    phase: str


FAULTS = (
    Fault(part="engine", phase=SAMPLING),
    Fault(part="pool", phase=WRITING),
    Fault(part="job server", phase=WRITING),
)


def run_with_fault(
    cluster: Cluster, job: Job, fault: Fault, out: pathlib.Path
) -> Outcome:
    """Runs a job to its end, and kills a part of the cluster in the middle.

    Args:
      cluster: Where the job runs.
      job: What runs.
      fault: What is killed, and when.
      out: A new folder for the batches.

    Raises:
      InputError: the job failed, or ended before the fault.
    """

    def disturb(client: Process) -> None:
        _await_phase(fault.phase, out, client)
        victim, replace = _victim(cluster, fault.part)
        victim.kill()
        if (out / MANIFEST_NAME).exists():
            raise InputError(f"Expected to kill {victim.name} before the job's end.")
        replace()

    run = _resume if fault.part == "job server" else run_on
    outcome = run(cluster, job, out, disturb)
    wait_for("every worker to be back", cluster.all_there)
    return outcome


def _resume(
    cluster: Cluster, job: Job, out: pathlib.Path, disturb: Callable[[Process], None]
) -> Outcome:
    """The first client fails with its job server; the second resumes its work."""
    client = start_on(cluster, job, out)
    disturb(client)
    wait_for("the client to give up", lambda: not client.running(), 300)
    if not client.wait():
        raise InputError("Expected a client to fail whose job server is dead.")
    if not last_line(client.log).startswith("error: Expected the engine"):
        raise InputError(f"Expected one line of error: {last_line(client.log)}")
    outcome = run_on(cluster, job, out)
    cluster.cancel_jobs()
    return outcome


def _await_phase(phase: str, out: pathlib.Path, client: Process) -> None:
    def reached() -> bool:
        if not client.running():
            raise InputError(f"Expected a job in the middle: {last_line(client.log)}")
        return num_sampled(out) > 0 if phase == SAMPLING else num_written(out) > 0

    wait_for(f"the job to be {phase}", reached, 300)


def _victim(cluster: Cluster, part: str) -> tuple[Process, Callable[[], None]]:
    """Returns the process to kill, and the function that replaces it."""
    host = cluster.hosts.workers[-1]
    if part == "engine":
        return cluster.engines[host], lambda: cluster.start_engine(host)
    if part == "pool":
        return cluster.pools[host], lambda: cluster.start_pool(host)
    server = cluster.job_server
    if server is None:
        raise InputError("Expected a job server to kill.")
    return server, cluster.start_job_server
