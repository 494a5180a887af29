"""Runs of a comparison: one after the other here, or several in processes of their own.

Formal guarantees:
  - A run in a process of its own is the run that this process would make: it has as
    many threads, and the bits of its results do not depend on what runs beside it.
  - Not more than ``jobs`` runs at once, and not more than fit into ``memory_limit`` if
    each takes as much as the largest so far.  The first run is alone, and one run is
    always let.
  - A method from outside is known there, too, by the module that registers it.
  - If one run fails, or this process is stopped, the others stop at their next step and
    keep a checkpoint: started again, they go on from there.

Public: what the runs publish, and how much memory they took.
"""

from __future__ import annotations

import collections
import importlib
import resource
import sys
from collections.abc import Sequence
from multiprocessing import connection

from accounting.validation import InputError
from pipelines.files.separate_process import Process
from trainer.experiments.comparison import runs as compare_runs
from trainer.experiments.comparison.runs import Say
from trainer.run.preflight import Request
from trainer.settings import methods
from trainer.settings.comparison_settings import ComparisonSettings

#: For ``Process``: of a module and a request; trains and returns the memory it took.
TRAIN = "trainer.experiments.comparison.jobs:train_and_measure"


def train_and_measure(module: str, request: Request) -> int:
    """Trains, and returns the most bytes of memory that this process had.

    Args:
      module: Registers the method.
      request: What to train.
    """
    importlib.import_module(module)
    compare_runs.train_here(request)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def check_jobs(settings: ComparisonSettings) -> None:
    """Accepts methods that other processes know, where there are to be any.

    Raises:
      InputError: a method that the running script registers.
    """
    for each in settings.trained:
        if settings.jobs > 1 and _home(each.method) == "__main__":
            raise InputError(
                f"Expected jobs={settings.jobs} to be 1 for method={each.method!r}: "
                "the script that runs here registers it, and runs in no other process. "
                "Give --jobs 1, or register it in a module that the script imports."
            )


def _home(method: str) -> str:
    """Returns the name of the module that registers a method."""
    return methods.get(method).hooks.__module__


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
      train: "module:function" of a module and a request, which returns bytes.

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
                home = _home(request.settings.method)
                process = Process(train, home, request)
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
