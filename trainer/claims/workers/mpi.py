"""Workers as the processes of MPI: ``mpiexec -n 3 dpsgd train ...``.

They send each other sums without noise, and digests, without encryption: their network
must be private or encrypted.

Formal guarantees, besides those of ``agreement``:
  - No wait of a run is endless: a worker that waits longer than the timeout names by
    rank and host those that did not arrive, and the job ends.  Only a worker that is
    done waits without a limit, for others that are still writing.
  - A worker that ends by an error that the others do not know of ends the job, after it
    has reported the error.

References:
  MPI Forum (2021), MPI 4.0: MPI_Iallreduce, MPI_Iallgatherv, MPI_Abort.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator

import mpi4py
import numpy as np

from accounting.core.validation import InputError
from trainer.claims.workers.agreement import Group
from trainer.core.run.withheld import InterruptedRunError

mpi4py.rc.initialize = False  # ``_start`` initialises it, with a timeout
from mpi4py import MPI  # noqa: E402

#: Seconds between polls, in which another worker can use the same core.
_POLL_SECONDS = 50e-6

#: Seconds in which a worker that also waits answers.
_GRACE_SECONDS = 2.0

#: Tags of messages: "are you waiting?", and "I am".
_ASK, _HERE = 1, 2


class MpiWorkers(Group):
    """All processes that the launcher started.

    Args:
      count: Number of processes, as the launcher says.
      timeout: Seconds that a worker waits for the others, above 0.

    Attributes:
      rank: Rank of this worker, from 0.
      count: Number of workers.
      hosts: Name of each worker's host, by rank.

    Raises:
      InputError: launcher and library belong to different MPIs, or a worker did not
        arrive in time.
    """

    def __init__(self, *, count: int, timeout: float) -> None:
        self._timeout = timeout
        _start(count, timeout)
        self._world = MPI.COMM_WORLD
        self.rank, self.count = self._world.rank, self._world.size
        if self.count != count:
            raise InputError(
                f"Expected {count} workers, as the launcher says; the library of "
                f"mpi4py, {_library()}, finds {self.count}. Use its own mpiexec, such "
                "as that beside this python."
            )
        self._failed = 2  # until the first exchange is complete
        self.hosts = ["an unknown host"] * count
        atexit.register(self._end)
        hosts = self.gather(socket.gethostname().encode())
        self.hosts = [host.decode() for host in hosts]
        self._failed = 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of all workers' ``values``.  Sensitive.

        Args:
          values: int64 array of the same shape at every worker; may be overwritten.

        Raises:
          InputError: a worker did not arrive in time.
        """
        total = np.require(values, np.int64, ["C", "W"])
        self._wait(self._world.Iallreduce(MPI.IN_PLACE, total, MPI.SUM))
        return total

    def gather(self, value: bytes) -> list[bytes]:
        """Returns the ``value`` of every worker, by rank.

        Args:
          value: Bytes of any number, which may differ between workers.

        Raises:
          InputError: a worker did not arrive in time.
        """
        sizes = np.zeros(self.count, np.int64)
        sizes[self.rank] = len(value)
        sizes = self.sum(sizes)
        ends = np.cumsum(sizes)
        found = np.empty(ends[-1], np.uint8)
        places = (sizes.tolist(), (ends - sizes).tolist())
        self._wait(self._world.Iallgatherv(value, [found, places, MPI.BYTE]))
        return [part.tobytes() for part in np.split(found, ends[:-1])]

    def fail(self, status: int = 2) -> None:
        """Makes the end of this process end all workers, with an exit status."""
        self._failed = status

    def _end(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if self._failed:
            self._world.Abort(self._failed)
        # A worker that ended earlier would end the chief, which may still be writing.
        self._wait(self._world.Ibarrier(), math.inf)
        MPI.Finalize()

    # -- waits ---------------------------------------------------------------------

    def _wait(self, request: MPI.Request, timeout: float | None = None) -> None:
        timeout = timeout or self._timeout
        end = time.monotonic() + timeout
        while not request.Test():
            self._answer()
            if time.monotonic() > end:
                self._find_late(request)
                end = time.monotonic() + timeout
            time.sleep(_POLL_SECONDS)

    def _answer(self) -> None:
        """Tells each worker that asks that this worker is waiting."""
        for source in self._senders(_ASK):
            self._tell(source, _HERE)

    def _tell(self, rank: int, tag: int) -> None:
        self._world.Isend([None, 0, MPI.BYTE], rank, tag).Free()

    def _senders(self, tag: int) -> Iterator[int]:
        status = MPI.Status()
        while self._world.iprobe(tag=tag, status=status):
            self._world.Recv([None, 0, MPI.BYTE], status.Get_source(), tag)
            yield status.Get_source()

    def _find_late(self, request: MPI.Request) -> None:
        """Returns if all workers arrive, else raises an error that names the others."""
        others = [rank for rank in range(self.count) if rank != self.rank]
        for _ in self._senders(_HERE):
            pass  # answers to an earlier question, after which all arrived
        for rank in others:
            self._tell(rank, _ASK)
        here = {self.rank}
        end = time.monotonic() + _GRACE_SECONDS
        while not request.Test():
            self._answer()
            here.update(self._senders(_HERE))
            # The lowest rank that waits reports; the others only if it does not.
            turn = min(here) == self.rank or len(here) == self.count
            if time.monotonic() > end + (0 if turn else self._timeout):
                self._refuse([rank for rank in others if rank not in here])
            time.sleep(_POLL_SECONDS)

    def _refuse(self, late: list[int]) -> None:
        names = " and ".join(f"worker {r} on {self.hosts[r]}" for r in late)
        raise InterruptedRunError(
            f"Expected all {self.count} workers within {self._timeout:g} seconds; "
            f"{names or 'the network'} did not answer. Look there, then give the same "
            "command again, with a larger --worker-timeout if it was at work."
        )


def _library() -> str:
    return MPI.Get_library_version().split("\n")[0].strip("\x00 ")


def _start(count: int, timeout: float) -> None:
    """Initialises MPI, which waits for all processes without returning to Python.

    A child process therefore watches the timeout.

    Args:
      count: Number of processes.
      timeout: Seconds until all have started.
    """
    if MPI.Is_initialized():
        return
    reader, writer = os.pipe()
    watchman = os.fork()
    if not watchman:
        os.close(writer)
        _watch(reader, count, timeout)
    os.close(reader)
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    os.close(writer)
    os.waitpid(watchman, 0)


def _watch(reader: int, count: int, timeout: float) -> None:
    """Kills the parent unless it closes its end of the pipe within the timeout."""
    try:
        # While one of its sockets is open, the launcher believes the worker alive.
        for name in ("PMI_FD", "HYDI_CONTROL_FD"):
            if (found := os.environ.get(name, "")).isdigit():
                os.close(int(found))
        started, _, _ = select.select([reader], [], [], timeout)
        if not started:
            line = (
                f"error: Expected all {count} workers to start within {timeout:g} "
                f"seconds; one on {socket.gethostname()} did, and waits. Look at the "
                "hosts that do not say this, then give the same command again.\n"
            )
            os.write(2, line.encode())
            os.kill(os.getppid(), signal.SIGKILL)
    finally:
        os._exit(0)
