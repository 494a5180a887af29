"""What workers do in ``test_mpi``: ``mpiexec -n 2 python program.py NAME``."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time

import numpy as np

from accounting.core.validation import InputError
from pipelines.files.processes import stoppable
from trainer.claims import launch, mpi, worker_group
from trainer.core.step.workers import Workers


def _shorten(workers: Workers, timeout: float) -> float:
    """Sets the timeout of workers that have all started, however slowly."""
    assert isinstance(workers, mpi.MpiWorkers)
    workers._timeout = timeout
    return timeout


def exchange(workers: Workers) -> None:
    """Sums and gathers of all sizes, many times, the last of them a megabyte."""
    for size in (0, 1, 3, 1 << 17):
        values = np.arange(size, dtype=np.int64) * (1 << 40) + workers.rank
        total = sum(range(workers.count))
        wanted = np.arange(size, dtype=np.int64) * (workers.count << 40) + total
        np.testing.assert_array_equal(workers.sum(values), wanted)
        found = workers.gather(bytes([workers.rank]) * (size + 5 * workers.rank))
        assert found == [bytes([r]) * (size + 5 * r) for r in range(workers.count)]
    assert workers.chiefs(b"of the chief") == b"of the chief"
    if not workers.rank:
        print("exchanged")


def finish(workers: Workers) -> None:
    """The chief continues for longer than the timeout when the others are done."""
    _shorten(workers, 0.1)
    if not workers.rank:
        time.sleep(2)
        print("finished")


def refuse(workers: Workers) -> None:
    """The second worker refuses, and all know of it."""

    def own() -> None:
        if workers.rank:
            raise InputError("Expected a file.")

    workers.together(own)


def signal_late(workers: Workers) -> None:
    """All stop, and then the signal reaches each of them once more."""
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    with stoppable():
        worker_group.leave(
            workers, worker_group.AgreedStopError("Stopped.", signal.SIGTERM)
        )


def hang(workers: Workers) -> None:
    """The last worker stops, and the others wait for it."""
    _shorten(workers, 1.0)
    if workers.rank == workers.count - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    workers.gather(b"")


def killed(workers: Workers) -> None:
    """The second worker is killed, and the first one waits for it."""
    if workers.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    workers.gather(b"")


def main(name: str, timeout: str) -> None:
    """Runs a function of this module as ``dpsgd`` would."""
    try:
        workers = launch.of_this_process(float(timeout))
        with launch.ending_together(workers):
            globals()[name](workers)
    except worker_group.AgreedStopError as error:
        sys.exit(error.exit_status)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
