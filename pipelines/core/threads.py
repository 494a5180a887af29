"""Work on several threads, with results in order."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(
    pool: ThreadPoolExecutor,
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    depth: int,
) -> Generator[_Result, None, None]:
    """Yields ``function(item)`` in order; if closed early, starts no more calls.

    Args:
      pool: Threads that call ``function``.
      function: Function of one item.
      items: Items, which are taken as they are needed.
      depth: Maximum number of items in flight, including the one that the caller uses.
    """
    pending: collections.deque[Future[_Result]] = collections.deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
