"""Executes the runs of a comparison: one by one in this process, or several at once.

Formal guarantees:
  - A run in a separate process gives the same bits as in this process: it uses as many
    threads, and does not depend on what runs at the same time.
  - At most ``jobs`` runs go on at once, and at most as many as fit into
    ``memory_limit`` if each takes as much as the largest so far.  The first run is
    alone, and one run is always allowed.
  - A process imports the module that registers a method of the user.
  - If one run fails, or this process is stopped, the others stop at their next step and
    keep a checkpoint, from which they resume.

Public: what the runs publish, and how much memory they took.
"""

from __future__ import annotations

import collections
import importlib
import resource
import sys
from collections.abc import Sequence
from multiprocessing import connection

from accounting.core.validation import InputError
from pipelines.files.separate_process import Process
from trainer.experiments.comparison import runs as compare_runs
from trainer.experiments.comparison.runs import Say
from trainer.run.preflight import Request
from trainer.settings import methods
from trainer.settings.comparison_settings import ComparisonSettings

#: For ``Process``: takes a module and a request, trains, returns peak memory in bytes.
TRAIN = "trainer.experiments.comparison.jobs:train_and_measure"


def train_and_measure(module: str, request: Request) -> int:
    """Trains, and returns the peak memory of this process in bytes.

    Args:
      module: Module that registers the method.
      request: The run.
    """
    importlib.import_module(module)
    compare_runs.train_here(request)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def check_jobs(settings: ComparisonSettings) -> None:
    """Refuses several jobs for a method that the running script itself registers.

    Other processes would not know it.
    """
    for each in settings.trained:
        if settings.jobs > 1 and _home(each.method) == "__main__":
            raise InputError(
                f"Expected jobs={settings.jobs} to be 1 for method={each.method!r}, "
                "which the running script registers: other processes do not run it. "
                "Give --jobs 1, or register it in a module that the script imports."
            )


def _home(method: str) -> str:
    """Returns the name of the module that registers a method."""
    return methods.get(method).hooks.__module__


def train_one_by_one(requests: Sequence[Request], say: Say) -> None:
    """Trains in this process; arguments as for `train_at_once`."""
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
    """Trains several runs at once, each in a separate process.

    Args:
      requests: Runs that are not finished, the largest first: its memory is measured.
      jobs: Maximum number of runs at once.
      memory_limit: Maximum memory of all runs together, in bytes.
      say: Called with each line of progress.
      train: "module:function" that takes a module and a request, and returns bytes.

    Raises:
      InputError: a run was refused, or its process ended without a result.
    """
    waiting = collections.deque(requests)
    running: dict[int, tuple[Process, Request]] = {}
    most, room = 0, jobs
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
                assert isinstance(ended, int)  # the index of a request
                taken = _result(*running.pop(ended))
                most = max(most, taken)
                if _room(jobs, memory_limit, most) < room:
                    room = _room(jobs, memory_limit, most)
                    say(_fewer(jobs, memory_limit, taken))
    finally:
        for process, _ in running.values():
            process.stop()
        for process, _ in running.values():
            process.wait()


def _room(jobs: int, memory_limit: int, most: int) -> int:
    """Returns how many runs may go on at once; one before memory was measured."""
    return max(1, min(jobs, memory_limit // most)) if most else 1


def _fewer(jobs: int, memory_limit: int, taken: int) -> str:
    return (
        f"a run took {taken / 2**20:,.0f} MiB: {_room(jobs, memory_limit, taken)} of "
        f"jobs={jobs} at once fit into memory_limit={memory_limit / 2**20:,.0f} MiB"
    )


def _result(process: Process, request: Request) -> int:
    """Returns the memory that a run took, in bytes; errors name the run."""
    try:
        taken: int = process.result()
    except InputError as error:
        raise InputError(
            f"{error} That was {request.run}; the same command goes on with it."
        ) from None
    return taken
