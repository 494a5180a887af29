"""Progress from workers that share the process of the command line.

On the local runner workers are threads of this process and report here; on a cluster
nobody listens, and Beam's own counters say the same.  Only public numbers pass: blocks
read and steps written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_listener: Callable[[str, int], None] | None = None


def advance(kind: str, amount: int = 1) -> None:
    """Reports that ``amount`` more of ``kind`` ("blocks" or "steps") are done."""
    if _listener is not None:
        _listener(kind, amount)


@contextlib.contextmanager
def listen(listener: Callable[[str, int], None]) -> Iterator[None]:
    """Calls ``listener(kind, amount)`` for every report within the context."""
    global _listener
    _listener, before = listener, _listener
    try:
        yield
    finally:
        _listener = before
