"""The cores and memory of this machine, and work on threads with results in order."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

#: The limit of a container, in bytes or "max".
_CONTAINER_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory() -> int:
    """Returns the bytes of memory that this machine or container has."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(_CONTAINER_LIMIT.read_text()))
    return min(limits)


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
