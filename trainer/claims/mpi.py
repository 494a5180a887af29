"""Workers as the processes of MPI: ``mpiexec -n 3 dpsgd train ...``.

They send each other sums without noise, and digests, without encryption: their network
must be private or encrypted.

Formal guarantees, besides those of ``worker_group``:
  - No wait of a run is endless: a worker that waits longer than the timeout says so,
    and the job ends.  Only a worker that is done waits without a limit, for others that
    are still writing; and all wait in MPI until the last one has started.
  - A worker that ends by an error that the others do not know of ends the job, after it
    has reported the error.

References:
  MPI Forum (2021), MPI 4.0: MPI_Iallreduce, MPI_Iallgatherv, MPI_Abort.
"""

from __future__ import annotations

import atexit
import math
import socket
import sys
import time

import mpi4py
import numpy as np

from accounting.core.validation import InputError
from trainer.claims.worker_group import Group
from trainer.core.run.redact_errors import InterruptedRunError

mpi4py.rc.initialize = False  # ``MpiWorkers`` does, with threads
from mpi4py import MPI  # noqa: E402

#: Seconds between polls, in which another worker can use the same core.
_POLL_SECONDS = 50e-6


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
      InputError: launcher and library belong to different MPIs.
    """

    def __init__(self, *, count: int, timeout: float) -> None:
        self._timeout, self.hosts = timeout, ["an unknown host"]
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        self._world = MPI.COMM_WORLD
        self.rank, self.count = self._world.rank, self._world.size
        if self.count != count:
            raise InputError(
                f"Expected {count} workers, as the launcher says; the library of "
                f"mpi4py, {_library()}, finds {self.count}. Use its own mpiexec, such "
                "as that beside this python."
            )
        self._failed = 2  # until the first exchange is complete
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
        """Waits for all workers, with a core free for others in between."""
        # The lowest rank that waits says so: its end ends the others.
        end = time.monotonic() + (timeout or self._timeout) + self.rank
        while not request.Test():
            if time.monotonic() > end:
                raise InterruptedRunError(
                    f"Expected all {self.count} workers within {self._timeout:g} "
                    f"seconds, on {', '.join(sorted({*self.hosts}))}; one did not "
                    "answer. Look there, then give the same command again, with a "
                    "larger --worker-timeout if it was at work."
                )
            time.sleep(_POLL_SECONDS)


def _library() -> str:
    return MPI.Get_library_version().split("\n")[0].strip("\x00 ")
