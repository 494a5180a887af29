"""Who the workers of this process are: it alone, or those that ``mpiexec`` started.

Formal guarantees:
  - A process that no launcher started, or that is the only one, loads no MPI.
  - A process that was started with others never goes on without them.
  - What only one worker knows to have failed ends all of them, once it was said.
  - Sums travel, and are listened for, on the network device that the user named; on
    loopback where all workers are on one host and none was named.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

from accounting.validation import InputError, check_float
from trainer.workers.agreement import AgreedError, AgreedStopError
from trainer.workers.base import Alone, Workers

if TYPE_CHECKING:
    from trainer.workers.mpi import MpiWorkers

#: Of MPICH: number of processes, place among them, how many are on this host.
_SIZE, _RANK, _LOCAL = "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"

#: Devices that MPICH uses, and listens on: of all where it is not set.
_DEVICES = "UCX_NET_DEVICES"

#: Of glibc: from how many bytes on memory is the system's, and how much of the rest is
#: kept when it is free.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 1 << 25), (-1, 1 << 30)

#: Of Open MPI, which was not tried.
_OTHER_SIZE = "OMPI_COMM_WORLD_SIZE"

#: Seconds that a worker waits for the others, who may evaluate or save meanwhile.
DEFAULT_TIMEOUT = 600.0


def announced(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns this process's place, from 0, and the number of processes.

    Args:
      environment: Variables of the process.

    Example:
      >>> announced({"PMI_SIZE": "3", "PMI_RANK": "1"}), announced({})
      ((1, 3), (0, 1))

    Raises:
      InputError: a launcher that is not known.
    """
    if environment.get(_OTHER_SIZE, "1") != "1":
        raise InputError(
            f"Expected the mpiexec of MPICH; {_OTHER_SIZE} says that Open MPI started "
            "this, which was not tried. `pip install mpich` brings the other."
        )
    return int(environment.get(_RANK, "0")), int(environment.get(_SIZE, "1"))


def check_alone(environment: Mapping[str, str]) -> None:
    """Accepts a process that no launcher started with others.

    Args:
      environment: Variables of the process.

    Raises:
      InputError: there are others, each of which would train by itself.
    """
    _, count = announced(environment)
    if count > 1:
        raise InputError(
            f"Expected one process, not {count}: `dpsgd train` alone trains on several "
            "workers. Start this one without mpiexec."
        )


def _keep_to_device(environment: MutableMapping[str, str], count: int) -> None:
    """Lets MPI use one network device, which the user names unless nothing travels."""
    if environment.get(_DEVICES):
        return
    if environment.get(_LOCAL) != str(count):
        raise InputError(
            f"Expected {_DEVICES} to name the network device by which workers reach "
            "each other, such as eth0: MPI would listen on all, and what it carries "
            f"has no noise. Give `mpiexec -genv {_DEVICES} eth0 ...`."
        )
    environment[_DEVICES] = "lo"


def _load_mpi(count: int) -> type[MpiWorkers]:
    try:
        # Where nobody asks for it, MPI need not be installed.
        from trainer.workers.mpi import MpiWorkers
    except (ImportError, RuntimeError) as error:  # the latter, of a missing library
        raise InputError(
            f"Expected MPI for the {count} workers that were started: "
            f"{type(error).__name__} of mpi4py. Run `pip install mpi4py mpich` on "
            "every host."
        ) from None
    return MpiWorkers


def _keep_memory() -> None:
    """Keeps vectors that are freed: the next exchange needs as much.

    To get them from the system again would be a twentieth of a step with large tables.
    """
    with contextlib.suppress(AttributeError, OSError):  # another library of C
        library = ctypes.CDLL(None)
        for setting, value in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            library.mallopt(setting, value)


@contextlib.contextmanager
def joined(timeout: float = DEFAULT_TIMEOUT) -> Iterator[Workers]:
    """Yields the workers that this process is one of.

    Args:
      timeout: Seconds that a worker waits for the others.

    Raises:
      InputError: there are others, and no MPI to reach them by, or no network device
        that was named; or they do not come.
    """
    check_float("worker_timeout", timeout, above=0)
    rank, count = announced(os.environ)
    if count == 1:
        yield Alone()
        return
    try:
        _keep_to_device(os.environ, count)
        start = _load_mpi(count)
    except InputError:
        if rank:  # the first one says it
            raise SystemExit(2) from None
        raise
    _keep_memory()
    workers = start(count=count, timeout=timeout)
    try:
        yield workers
    except (AgreedError, AgreedStopError, SystemExit):
        raise
    except BaseException:
        workers.fail()
        raise
