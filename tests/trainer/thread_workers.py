"""Workers that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from trainer.claims.worker_group import Group
from trainer.core.step.workers import Workers


class Together:
    """Workers that are threads of one process; one that is lost breaks all."""

    def __init__(self, count: int) -> None:
        self._arrived = threading.Barrier(count, timeout=60)
        self.given: list[Any] = [None] * count

    def one(self, rank: int) -> Worker:
        return Worker(self, rank)

    def break_all(self) -> None:
        """Ends the exchanges of all workers by an error."""
        self._arrived.abort()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self._arrived.wait()
        everything = list(self.given)
        self._arrived.wait()
        return everything


class Worker(Group):
    def __init__(self, together: Together, rank: int) -> None:
        self.rank, self.count = rank, len(together.given)
        self._together = together

    def fail(self, status: int = 2) -> None:
        """The others no longer wait for this one."""
        self._together.break_all()

    def sum(self, values: np.ndarray) -> np.ndarray:
        assert values.dtype == np.int64
        # A copy: who has the sum goes on, and may change what it gave.
        total = np.sum(self._together.exchange(self.rank, values.copy()), axis=0)
        return np.asarray(total)

    def gather(self, value: bytes) -> list[bytes]:
        return self._together.exchange(self.rank, value)


def outcomes(count: int, work: Callable[[Workers], Any]) -> list[Any]:
    """Returns what each worker's ``work`` returns or raises, by rank.

    Args:
      count: Number of workers.
      work: Work of one worker.
    """
    together = Together(count)

    def one(rank: int) -> Any:
        try:
            return work(together.one(rank))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
