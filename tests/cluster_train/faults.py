"""What is done to a run in the middle, and how it has to end then."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import signal

from accounting.core.validation import InputError
from tests.cluster_train.cluster import Cluster
from tests.cluster_train.jobs import Input, num_evaluations
from tests.engines.harness.hosts import Process
from tests.engines.harness.polling import wait_for


@dataclasses.dataclass(frozen=True)
class Fault:
    """A signal to one worker.

    Attributes:
      name: For the table.
      rank: Of the worker; -1 is the last one.
      number: Of the signal.
      says: What the run prints before it ends.
      status: Its exit status; None for any but 0.
    """

    name: str
    rank: int
    number: int
    says: str = ""
    status: int | None = None


FAULTS = (
    Fault("worker killed", -1, signal.SIGKILL),
    Fault("chief killed", 0, signal.SIGKILL),
    Fault("worker hangs", -1, signal.SIGSTOP, r"worker \d on worker\d did not answer"),
    Fault("worker stopped", -1, signal.SIGTERM, r"error: Stopped after step \d+", 143),
)

#: Seconds that a worker waits for others; a fault has to be noticed by then.
TIMEOUT = 60


def run_with_fault(
    cluster: Cluster, given: Input, fault: Fault, run: pathlib.Path, after: int
) -> None:
    """Trains with a fault in the middle, and gives the same command again.

    Args:
      cluster: Its workers train.
      given: What they train on.
      fault: What happens to one of them.
      run: New folder.
      after: Evaluations before it happens.

    Raises:
      InputError: the run does not end as it should.
    """
    arguments = given.arguments(run, f"--worker-timeout={TIMEOUT}")
    arguments.append("--checkpoint-every=7")
    first = cluster.train(f"{run.name}-disturbed", arguments)
    _disturb(cluster, first, fault, run, after)
    status = first.wait()
    log = first.log.read_text()
    if fault.status not in (None, status) or not status:
        raise InputError(f"Expected {fault.name} to end a run; it ended with {status}.")
    if not re.search(fault.says, log):
        raise InputError(f"Expected {fault.name} to be told; {first.log} does not.")
    log = finish(cluster, f"{run.name}-again", arguments)
    if "continuing after step" not in log:
        raise InputError(f"Expected a run to go on: {log[-300:]}")


def _disturb(
    cluster: Cluster, job: Process, fault: Fault, run: pathlib.Path, after: int
) -> None:
    def reached() -> bool:
        if not job.running():
            raise InputError(f"Expected a run in the middle: {job.log.read_text()}")
        return num_evaluations(run) > after

    wait_for(f"{after} evaluations", reached, 600)
    rank = fault.rank % len(cluster.hosts.workers)
    os.kill(cluster.worker(job, rank), fault.number)


def finish(cluster: Cluster, name: str, arguments: list[str]) -> str:
    """Trains to the end; returns what was printed.

    Args:
      cluster: Its workers train.
      name: Of the job.
      arguments: Of `dpsgd train`.

    Raises:
      InputError: the run failed.
    """
    job = cluster.train(name, arguments)
    if job.wait():
        raise InputError(f"Expected a run to end well: {job.log.read_text()[-500:]}")
    return job.log.read_text()
