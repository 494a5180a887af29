"""What workers that are threads come to, and what they send."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.trainer.thread_workers import Together, Worker
from trainer.workers.base import Workers


class Heard(Worker):
    """A worker of which all that it gathers is heard."""

    def __init__(self, together: Together, rank: int, sent: list[bytes]) -> None:
        super().__init__(together, rank)
        self._sent = sent

    def gather(self, value: bytes) -> list[bytes]:
        self._sent.append(value)
        return super().gather(value)


def outcomes(
    count: int, work: Callable[[Workers], Any], sent: list[bytes] | None = None
) -> list[Any]:
    """What ``work`` of each worker returns or raises, by rank.

    Args:
      count: Of the workers.
      work: Of one of them.
      sent: Gets what they gather.
    """
    together, heard = Together(count), [] if sent is None else sent

    def one(rank: int) -> Any:
        try:
            return work(Heard(together, rank, heard))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
