"""Calls at the same moment, for tests of what one process at a time may do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accounting.core.validation import InputError


def at_once(*acts: Callable[[], Any]) -> list[bool]:
    """Calls functions at the same moment; returns which of them were not refused."""
    barrier = threading.Barrier(len(acts))

    def call(act: Callable[[], Any]) -> bool:
        barrier.wait()
        try:
            act()
        except InputError:
            return False
        return True

    with ThreadPoolExecutor(len(acts)) as threads:
        return list(threads.map(call, acts))
