"""Who the workers of this process are: it alone, or those that ``mpiexec`` started.

Formal guarantees:
  - A process that no launcher started, or that is the only one, loads no MPI.
  - A process that was started with others never goes on without them.
  - What only one worker knows to have failed ends all of them, once it was said.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from accounting.validation import InputError, check_float
from trainer.workers.agreement import AgreedError, AgreedStopError
from trainer.workers.base import Alone, Workers

#: Number of processes and place among them, by launcher: MPICH and Intel MPI (also of
#: Slurm, as PMI-2), Open MPI.
_LAUNCHERS = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)

#: Seconds that a worker waits for the others, who may evaluate or save meanwhile.
DEFAULT_TIMEOUT = 600.0


def announced(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns this process's place, from 0, and the number of processes.

    Args:
      environment: Variables of the process.

    Example:
      >>> announced({"PMI_SIZE": "3", "PMI_RANK": "1"}), announced({})
      ((1, 3), (0, 1))
    """
    for size, rank in _LAUNCHERS:
        if environment.get(size, "").isdigit():
            return int(environment.get(rank, "0")), int(environment[size])
    return 0, 1


@contextlib.contextmanager
def joined(timeout: float = DEFAULT_TIMEOUT) -> Iterator[Workers]:
    """Yields the workers that this process is one of.

    Args:
      timeout: Seconds that a worker waits for the others.

    Raises:
      InputError: there are others, and no MPI to reach them by; or they do not come.
    """
    check_float("worker_timeout", timeout, above=0)
    rank, count = announced(os.environ)
    if count == 1:
        yield Alone()
        return
    try:
        # Where nobody asks for it, MPI need not be installed.
        from trainer.workers.mpi import MpiWorkers
    except (ImportError, RuntimeError) as error:  # the latter, of a missing library
        if rank:
            raise SystemExit(2) from None
        raise InputError(
            f"Expected MPI for the {count} workers that were started: "
            f"{type(error).__name__} of mpi4py. Run `pip install mpi4py mpich` on "
            "every host."
        ) from None
    workers = MpiWorkers(count=count, timeout=timeout)
    try:
        yield workers
    except (AgreedError, AgreedStopError, SystemExit):
        raise
    except BaseException:
        workers.fail()
        raise
