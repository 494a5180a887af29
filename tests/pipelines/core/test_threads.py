"""Guarantees of pipelines.core.threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.core.threads import in_order


def test_results_come_in_order_whoever_is_ready_first() -> None:
    odd_is_done = [threading.Event() for _ in range(10)]
    finished: list[int] = []

    def work(item: int) -> int:
        pair = odd_is_done[item // 2]
        if item % 2:
            finished.append(item)
            pair.set()
        else:
            assert pair.wait(600)
            finished.append(item)
        return item

    with ThreadPoolExecutor(2) as pool:
        assert list(in_order(pool, work, range(20), 4)) == list(range(20))
    assert finished[:2] == [1, 0]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_items_are_taken_as_there_is_room(depth: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    with ThreadPoolExecutor(3) as pool:
        for used, _ in enumerate(in_order(pool, str, items(), depth), start=1):
            assert len(taken) == min(20, used + depth - 1)


def test_what_was_not_begun_is_dropped_when_the_caller_stops() -> None:
    go_on = threading.Event()
    done: list[int] = []

    def work(item: int) -> None:
        if item:
            assert go_on.wait(600)
        done.append(item)

    with ThreadPoolExecutor(1) as pool:
        results = in_order(pool, work, range(100), 50)
        next(results)
        results.close()
        go_on.set()
    assert len(done) <= 2
