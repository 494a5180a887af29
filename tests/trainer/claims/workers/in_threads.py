"""Outcomes of workers that are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.trainer.thread_workers import Together
from trainer.core.step.workers import Workers


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
