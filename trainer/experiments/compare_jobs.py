"""Runs of a comparison: one after the other here, or several in processes of their own.

Formal guarantees:
  - A run in a process of its own is the run that this process would make: it has as
    many threads, and the bits of its results do not depend on what runs beside it.
  - Not more than ``jobs`` runs at once, and not more than fit into ``memory_limit`` if
    each takes as much as the largest so far.  The first run is alone, and one run is
    always let.
  - If one run fails, or this process is stopped, the others stop at their next step and
    keep a checkpoint: started again, they go on from there.

Public: what the runs publish, and how much memory they took.
"""

from __future__ import annotations

import collections
import resource
import sys
from collections.abc import Sequence
from multiprocessing import connection

from accounting.validation import InputError
from pipelines.files.separate_process import Process
from trainer.experiments import compare_runs
from trainer.experiments.compare_runs import Say
from trainer.run.preflight import Request

#: For ``Process``: trains what is requested and returns the memory it took.
TRAIN = "trainer.experiments.compare_jobs:train_and_measure"


def train_and_measure(request: Request) -> int:
    """Trains, and returns the most bytes of memory that this process had."""
    compare_runs.train_here(request)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def train_one_by_one(requests: Sequence[Request], say: Say) -> None:
    """Trains in this process.

    Args:
      requests: Runs that are not finished.
      say: Takes a line of progress.

    Raises:
      InputError: refused by the trainer.
    """
    for number, request in enumerate(requests, start=1):
        say(f"[{number}/{len(requests)}] training: {request.run.name}")
        compare_runs.train_here(request)


def train_at_once(
    requests: Sequence[Request],
    *,
    jobs: int,
    memory_limit: int,
    say: Say,
    train: str = TRAIN,
) -> None:
    """Trains in processes of their own.

    Args:
      requests: Runs that are not finished; the largest first, by which memory is
        measured.
      jobs: Runs at once, at most.
      memory_limit: Bytes of all runs at once.
      say: Takes a line of progress.
      train: "module:function" of a request, which returns bytes.

    Raises:
      InputError: a run was refused, or its process ended without a result.
    """
    waiting = collections.deque(requests)
    running: dict[int, tuple[Process, Request]] = {}
    most = 0
    try:
        while waiting or running:
            while waiting and len(running) < _room(jobs, memory_limit, most):
                request = waiting.popleft()
                number = len(requests) - len(waiting)
                say(f"[{number}/{len(requests)}] training: {request.run.name}")
                process = Process(train, request)
                running[process.fileno()] = process, request
            for ended in connection.wait(running):
                assert isinstance(ended, int)  # as all of them
                taken = _result(*running.pop(ended))
                if taken > most and _room(jobs, memory_limit, taken) < jobs:
                    say(_fewer(jobs, memory_limit, taken))
                most = max(most, taken)
    finally:
        for process, _ in running.values():
            process.stop()
        for process, _ in running.values():
            process.wait()


def _room(jobs: int, memory_limit: int, most: int) -> int:
    """Returns how many runs may go on at once; one while nothing was measured."""
    return max(1, min(jobs, memory_limit // most)) if most else 1


def _fewer(jobs: int, memory_limit: int, taken: int) -> str:
    return (
        f"a run took {taken / 2**20:,.0f} MiB: {_room(jobs, memory_limit, taken)} of "
        f"jobs={jobs} at once fit into memory_limit={memory_limit / 2**20:,.0f} MiB"
    )


def _result(process: Process, request: Request) -> int:
    """Returns the bytes that a run took.

    Raises:
      InputError: what the process raised, with the name of the run.
    """
    try:
        taken: int = process.result()
    except InputError as error:
        raise InputError(
            f"{error} That was {request.run}; the same command goes on with it."
        ) from None
    return taken
