"""The processes of a run: this one alone, or all that ``mpiexec`` started.

A process that no launcher started, or that is the only one, loads no MPI.  A process
that was started with others never continues without them.  An error that only one
worker knows of ends all workers, once it was reported.

MPI sends and listens only on the network device that the user named.  Without a name,
workers on one host use loopback, and workers on several hosts are refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

from accounting.core.validation import InputError, check_float
from pipelines.files.processes import StoppedError
from trainer.claims.worker_group import AgreedError, AgreedStopError
from trainer.core.step.workers import Alone, Workers

if TYPE_CHECKING:
    from trainer.claims.mpi import MpiWorkers

#: Variables of MPICH: number of processes, rank, number of processes on this host.
_SIZE, _RANK, _LOCAL = "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"

#: Variable of MPICH: network devices that it listens on; unset, it listens on all.
_DEVICES = "UCX_NET_DEVICES"

#: Parameters of glibc's ``mallopt``, with values: bytes from which an allocation has
#: pages of its own, which are returned when it is freed; free bytes that are kept.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 1 << 25), (-1, 1 << 30)

#: Variables by which other launchers tell that there are several processes: Open MPI,
#: which is untested; ``mpiexec -pmi-port``, which tells the number to MPI alone; and
#: Slurm's ``srun``, which may not tell it to MPI.
_OF_OTHERS = "OMPI_COMM_WORLD_SIZE", "PMI_PORT", "SLURM_STEP_NUM_TASKS"

#: Seconds that a worker waits for the others, which may be evaluating or saving.
DEFAULT_TIMEOUT = 600.0


def announced(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns this process's rank and the number of processes, as the launcher says.

    Args:
      environment: Environment variables of the process.

    Example:
      >>> announced({"PMI_SIZE": "3", "PMI_RANK": "1"}), announced({})
      ((1, 3), (0, 1))

    Raises:
      InputError: the launcher is unknown.
    """
    for name in _OF_OTHERS if _SIZE not in environment else ():
        if environment.get(name, "1") != "1":
            raise InputError(
                f"Expected the mpiexec of MPICH, without -pmi-port; {name} says that "
                "another launcher started this process, which does not tell of the "
                "others, and each would train alone. Start all of them by the mpiexec "
                "of `pip install mpich`, or one by `srun --ntasks 1`."
            )
    return int(environment.get(_RANK, "0")), int(environment.get(_SIZE, "1"))


def _keep_to_device(environment: MutableMapping[str, str], count: int) -> None:
    """Chooses loopback for workers on one host; otherwise the user names the device."""
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
        # MPI need not be installed for a single worker.
        from trainer.claims.mpi import MpiWorkers
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
        raise InputError(
            f"Expected MPI for the {count} workers that were started: "
            f"{type(error).__name__} of mpi4py. Run `pip install mpi4py mpich` on "
            "every host."
        ) from None
    return MpiWorkers


def _keep_memory() -> None:
    """Keeps the memory of freed vectors up to 32 MiB each, for the next exchange.

    To allocate it again took a twentieth of a step with large tables.
    """
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        library = ctypes.CDLL(None)
        for setting, value in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            library.mallopt(setting, value)


@functools.cache
def of_this_process(timeout: float = DEFAULT_TIMEOUT) -> Workers:
    """Returns the workers of a run, of which this process is one.

    Args:
      timeout: Seconds that a worker waits for the others, above 0.

    Raises:
      InputError: there are others, but MPI is missing, the network device is not named,
        or a worker did not arrive in time.
    """
    check_float("worker_timeout", timeout, above=0)
    rank, count = announced(os.environ)
    if count == 1:
        return Alone()
    try:
        _keep_to_device(os.environ, count)
        start = _load_mpi(count)
    except InputError:
        if rank:  # rank 0 reports it
            raise SystemExit(2) from None
        raise
    _keep_memory()
    return start(count=count, timeout=timeout)


@contextlib.contextmanager
def ending_together(workers: Workers) -> Iterator[None]:
    """Ends all workers by an error that the others do not know of."""
    try:
        yield
    except (AgreedError, AgreedStopError, SystemExit):
        raise
    except BaseException as error:
        workers.fail(error.exit_status if isinstance(error, StoppedError) else 2)
        raise
