"""The processes of a run: this one alone, or all that ``mpiexec`` started.

They agree on what they do, before and between the steps.

Formal guarantees:
  - If the work of ``together`` raises an InputError at one worker, ``together`` raises
    it at every worker.  It names the first that failed, unless that is the chief or all
    failed alike.
  - ``compare`` refuses workers with a value that differs from the chief's, and names
    workers and value.  They exchange digests.
  - ``settle_step`` accepts a step only if the workers together have its parts 0, 1,
    ..., each once, as many as the plan says; others by a chance of one in 2^40.
  - If a worker has received a stop signal, ``settle_step`` returns it at every worker;
    once they stop by it, signals that reach others later change nothing.
  - The chief alone reports an error that all workers know of.
  - A process that no launcher started, or that is the only one, loads no MPI.
  - A process that was started with others never continues without them.
  - An error that only one worker knows of ends all workers, once it was reported.
  - MPI sends and listens on the network device that the user named alone.  Without a
    name, workers on one host use loopback; workers on several hosts are refused.

Public: what is compared, and which workers differ.  Sensitive: the parts of a step.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import hashlib
import json
import os
import signal
import socket
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError, check_float
from pipelines.files.processes import StoppedError, ignore_signals
from trainer.core.step.workers import Alone, TakenStep, Workers

if TYPE_CHECKING:
    from trainer.claims.mpi import MpiWorkers

_Result = TypeVar("_Result")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_REMEDIES = {"batches": "Give all of them the same folder, or copies of it."}
_REMEDY = "Start all of them by one command, with the same software and code."


class AgreedError(InputError):
    """An error that all workers know of."""


class AgreedStopError(StoppedError):
    """A stop signal that all workers know of."""


class Group(Workers):
    """Several workers, which exchange bytes and sums."""

    @abc.abstractmethod
    def gather(self, value: bytes) -> list[bytes]:
        """Returns the ``value`` of every worker, by rank.

        Args:
          value: Bytes of any number, which may differ between workers.
        """

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Returns ``work()``, as `Workers.together`; names the worker that failed."""
        refusal = b""
        try:
            result = work()
        except InputError as error:
            refusal = str(error).encode()
        refusals = self.gather(refusal)
        if any(refusals):
            names = _names(self)
            [rank, text] = next((r, t.decode()) for r, t in enumerate(refusals) if t)
            everybody = all(found == refusals[0] for found in refusals)
            who = "" if everybody or not rank else f"{names[rank]}: "
            leave(self, AgreedError(f"{who}{text}"))
        return result

    def chiefs(self, value: bytes) -> bytes:
        """Returns the chief's ``value``, as `Workers.chiefs`."""
        return self.gather(value if self.is_chief else b"")[0]

    def compare(self, values: Mapping[str, Any]) -> None:
        """Accepts equal values; arguments as for `Workers.compare`."""
        digests = {n: fingerprint([value]) for n, value in _fields(values).items()}
        found = [json.loads(one) for one in self.gather(json.dumps(digests).encode())]
        for name in dict.fromkeys(name for one in found for name in one):
            values_of = [one.get(name) for one in found]
            others = [r for r, value in enumerate(values_of) if value != values_of[0]]
            if others:
                _refuse(self, name, others)

    def settle_step(self, taken: TakenStep) -> int | None:
        """Accepts the parts of a step, as `Workers.settle_step`."""
        asked = [int(taken.signal_number == one) for one in _SIGNALS]
        failed = int(taken.failure is not None)
        # Sums of marks need one exchange, and tell 0, 1, ... from all others.
        marks = sum(map(_mark, taken.parts))
        mine = np.array([len(taken.parts), marks, failed, *asked], np.int64)
        count, marks, failures, *signals = self.sum(mine).tolist()
        if failures:
            self.together(lambda: _raise(taken.failure))
        wanted = taken.parts_per_step or max(1, count)
        if count != wanted or marks != sum(map(_mark, range(count))):
            text = (
                f"Expected the workers to have each part of step {taken.step} once; "
                "they do not. Give all of them the same batches, then the same command "
                "again."
            )
            leave(self, AgreedError(text))
        numbers = [
            int(one) for one, seen in zip(_SIGNALS, signals, strict=True) if seen
        ]
        return max(numbers, default=None)


def _raise(failure: InputError | None) -> None:
    if failure is not None:
        raise failure


def leave(workers: Workers, error: AgreedError | AgreedStopError) -> NoReturn:
    """Ends this worker by an error that all workers know of; the chief reports it.

    Args:
      workers: All workers of the run; each calls this.
      error: The error, the same at every worker.

    Raises:
      AgreedError, AgreedStopError: ``error``, at the chief.
      SystemExit: at the others.
    """
    if isinstance(error, AgreedStopError) and workers.count > 1:
        ignore_signals()  # the launcher's reaches each worker at a time of its own
    if workers.is_chief:
        raise error
    raise SystemExit(error.exit_status if isinstance(error, AgreedStopError) else 2)


def same_arrays(workers: Workers, arrays: Iterable[np.ndarray], step: int) -> None:
    """Accepts workers whose weights are the same bits.

    Args:
      workers: All workers of the run; each calls this.
      arrays: The weights and all other state of a step; not read for a single worker.
      step: Number of steps that were taken.

    Raises:
      AgreedError: names the workers that differ.
    """
    if not isinstance(workers, Group):
        return
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    found = workers.gather(digest.digest())
    others = [rank for rank, one in enumerate(found) if one != found[0]]
    if others:
        names = _names(workers)
        leave(
            workers,
            AgreedError(
                f"Expected the same weights at all workers after step {step}; those of "
                f"{' and '.join(names[rank] for rank in others)} differ from those of "
                f"{names[0]}: a processor or its memory gives other results. Leave out "
                "that host, then give the same command again."
            ),
        )


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name} {field}".strip(): value
        for name, fields in values.items()
        for field, value in (
            fields.items() if isinstance(fields, dict) else [("", fields)]
        )
    }


def _refuse(workers: Group, name: str, others: Sequence[int]) -> NoReturn:
    names = _names(workers)
    remedies = (text for start, text in _REMEDIES.items() if name.startswith(start))
    leave(
        workers,
        AgreedError(
            f"Expected the same {name} at all workers; "
            f"{' and '.join(names[rank] for rank in others)} differs from {names[0]}. "
            f"{next(remedies, _REMEDY)}"
        ),
    )


def _names(workers: Group) -> list[str]:
    hosts = workers.gather(socket.gethostname().encode())
    return [f"worker {rank} on {host.decode()}" for rank, host in enumerate(hosts)]


@functools.cache
def _mark(part: int) -> int:
    """Returns 40 bits that look random: sums of a million of them fit int64."""
    return int.from_bytes(hashlib.sha256(b"%d" % part).digest()[:5], "big")


# -- launch --------------------------------------------------------------------------

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
      InputError: an unknown launcher.
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
