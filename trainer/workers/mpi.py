"""Workers as the processes of MPI: ``mpiexec -n 3 dpsgd train ...``.

What travels between them is sums without noise, and digests, in the clear: their
network has to be a private or an encrypted one.

Formal guarantees, beside those of ``base``:
  - A wait has an end: a worker that does not arrive within the timeout is named, by
    rank and host, by one that waits for it, and then the job ends.
  - A worker that ends by an error that the others do not know of ends the job, after it
    has said the error.

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

from accounting.validation import InputError

mpi4py.rc.initialize = False  # its start waits for the others, and has a clock here
from mpi4py import MPI  # noqa: E402

#: Between two looks at whether all have arrived: a core may be all that a host has.
_POLL_SECONDS = 50e-6

#: In which a worker that waits, too, answers that it does.
_GRACE_SECONDS = 2.0

#: Of messages beside the sums: "who waits?", and "I do".
_ASK, _HERE = 1, 2


class MpiWorkers:
    """All processes that the launcher started.

    Args:
      count: How many there are, by the launcher.
      timeout: Seconds that a worker waits for the others.

    Raises:
      InputError: the launcher and the library are not of one MPI.
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
        self._failed = True  # until the first exchange has come to an end
        self.hosts = ["an unknown host"] * count
        atexit.register(self._end)
        hosts = self.gather(socket.gethostname().encode())
        self.hosts = [host.decode() for host in hosts]
        self._failed = False

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of every worker's ``values``.  Sensitive.

        Args:
          values: int64, of the same shape at every worker; may be overwritten.

        Raises:
          InputError: a worker did not arrive in time.
        """
        total = np.require(values, np.int64, ["C", "W"])
        self._wait(self._world.Iallreduce(MPI.IN_PLACE, total, MPI.SUM))
        return total

    def gather(self, value: bytes) -> list[bytes]:
        """Returns the ``value`` of every worker, by rank.

        Args:
          value: Value of any length.

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

    def fail(self) -> None:
        """Lets the end of this process be that of all of them."""
        self._failed = True

    def _end(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if self._failed:
            self._world.Abort(2)
        # Who ends alone would end the others; the chief may still be writing.
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
        """Tells who asks that this worker waits, too."""
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
        """Returns if all arrive after all, and names those that do not."""
        others = [rank for rank in range(self.count) if rank != self.rank]
        for _ in self._senders(_HERE):
            pass  # of an earlier question, to which all arrived after all
        for rank in others:
            self._tell(rank, _ASK)
        here = {self.rank}
        end = time.monotonic() + _GRACE_SECONDS
        while not request.Test():
            self._answer()
            here.update(self._senders(_HERE))
            # The first of those that wait speaks for all, unless it is late itself.
            turn = min(here) == self.rank or len(here) == self.count
            if time.monotonic() > end + (0 if turn else self._timeout):
                self._refuse([rank for rank in others if rank not in here])
            time.sleep(_POLL_SECONDS)

    def _refuse(self, late: list[int]) -> None:
        names = " and ".join(f"worker {r} on {self.hosts[r]}" for r in late)
        raise InputError(
            f"Expected all {self.count} workers within {self._timeout:g} seconds; "
            f"{names or 'the network'} did not answer. Look there, then give the same "
            "command again, with a larger --worker-timeout if it was at work."
        )


def _library() -> str:
    return MPI.Get_library_version().split("\n")[0].strip("\x00 ")


def _start(count: int, timeout: float) -> None:
    """Starts MPI, which waits until all processes have, and holds Python meanwhile."""
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
    """Ends the parent if it has not let go of the pipe in time."""
    try:
        # The launcher takes an open socket for a process that runs.
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
