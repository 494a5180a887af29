"""Outcomes of workers that are threads, and what they send."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.trainer.thread_workers import Together, Worker
from trainer.core.step.workers import Workers


class Heard(Worker):
    """A worker whose gathered values are recorded."""

    def __init__(self, together: Together, rank: int, sent: list[bytes]) -> None:
        super().__init__(together, rank)
        self._sent = sent

    def gather(self, value: bytes) -> list[bytes]:
        self._sent.append(value)
        return super().gather(value)


def outcomes(
    count: int, work: Callable[[Workers], Any], sent: list[bytes] | None = None
) -> list[Any]:
    """Returns what each worker's ``work`` returns or raises, by rank.

    Args:
      count: Number of workers.
      work: Work of one worker.
      sent: List to which the workers' gathered values are appended.
    """
    together, heard = Together(count), [] if sent is None else sent

    def one(rank: int) -> Any:
        try:
            return work(Heard(together, rank, heard))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
