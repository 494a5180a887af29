"""Workers that are threads of this process, to test what workers do together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from trainer.workers.base import Workers


class Meeting:
    """Where the threads of ``count`` workers meet.

    Attributes:
      sent: All that was gathered.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: list[bytes] = []
        self._barrier = threading.Barrier(count)
        self._held: list[Any] = [None] * count

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._held[rank] = value
        self._barrier.wait(timeout=60)
        found = list(self._held)
        self._barrier.wait(timeout=60)
        return found


class OneThread:
    """One of them; see ``trainer.workers.base.Workers``."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.count = rank, meeting.count
        self._meeting = meeting

    def sum(self, values: np.ndarray) -> np.ndarray:
        return np.sum(self._meeting.exchange(self.rank, values), axis=0)

    def gather(self, value: bytes) -> list[bytes]:
        found = self._meeting.exchange(self.rank, value)
        self._meeting.sent += found
        return found


def outcomes(
    count: int, work: Callable[[Workers], Any], meeting: Meeting | None = None
) -> list[Any]:
    """What ``work`` of each worker returns or raises, by rank."""
    meeting = meeting or Meeting(count)

    def one(rank: int) -> Any:
        try:
            return work(OneThread(rank, meeting))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
