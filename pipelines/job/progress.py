"""How far the workers of a job are, from their reports or their files.

On the local runner workers are threads of this process and report here.  On a cluster
they are other processes; then ``poll`` counts what they have finished.

Public: the reported numbers of blocks read, of steps written, of blocks drawn in the
search for boundaries, and of bytes of tables.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from accounting.core.validation import InputError

#: Kinds of progress.
BLOCKS, STEPS, BOUNDARIES, TASKS = "blocks", "steps", "boundaries", "tasks"

_listener: Callable[[str, int], None] | None = None


def advance(kind: str, amount: int = 1) -> None:
    """Reports progress.

    Args:
      kind: BLOCKS, STEPS, BOUNDARIES or TASKS.
      amount: Number done since the last report.
    """
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


@contextlib.contextmanager
def ending_at(event: threading.Event) -> Iterator[None]:
    """Stops the workers of this process at their next report after ``event`` is set."""
    tell = _listener

    def check(kind: str, amount: int) -> None:
        if event.is_set():
            raise InputError("Stopped.")  # the setter of the event raises the reason
        if tell:
            tell(kind, amount)

    with listen(check):
        yield


@contextlib.contextmanager
def poll(count: Callable[[], dict[str, int]], seconds: float) -> Iterator[None]:
    """Reports the results of ``count`` instead of the workers' reports.

    Args:
      count: Returns kind -> number done so far.  Its OSErrors are ignored.
      seconds: Seconds between two counts.
    """
    tell, reported = _listener, dict[str, int]()

    def report() -> None:
        with contextlib.suppress(OSError):
            for kind, done in count().items():
                if tell and done > reported.get(kind, 0):
                    tell(kind, done - reported.get(kind, 0))
                    reported[kind] = done

    with listen(lambda *_: None):
        try:
            with every(seconds, report):
                yield
        finally:
            report()


@contextlib.contextmanager
def every(seconds: float, report: Callable[[], None]) -> Iterator[None]:
    """Calls ``report`` in a thread of its own, again and again within a context.

    Args:
      seconds: Seconds between two calls, and before the first.
      report: What to call.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(seconds):
            report()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
