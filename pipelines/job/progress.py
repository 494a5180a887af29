"""Progress of workers, wherever they are.

On the local runner workers are threads of this process and report here.  On a cluster
they are other processes; then ``poll`` counts what they have finished.

Public: all that is reported, which is blocks read, steps written, and blocks drawn in
search of the boundaries of a shuffle, and tasks begun.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from accounting.validation import InputError

#: Kinds of progress.
BLOCKS, STEPS, BOUNDARIES, TASKS = "blocks", "steps", "boundaries", "tasks"

_listener: Callable[[str, int], None] | None = None


def advance(kind: str, amount: int = 1) -> None:
    """Reports progress.

    Args:
      kind: BLOCKS, STEPS, BOUNDARIES or TASKS.
      amount: What was done since the last report.
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
    """Ends the workers in this process at their next report after ``event`` is set."""
    tell = _listener

    def check(kind: str, amount: int) -> None:
        if event.is_set():
            raise InputError("Stopped.")  # whoever set the event says why
        if tell:
            tell(kind, amount)

    with listen(check):
        yield


@contextlib.contextmanager
def poll(count: Callable[[], dict[str, int]], seconds: float) -> Iterator[None]:
    """Reports what ``count`` finds, in place of what workers report.

    Args:
      count: Returns kind -> how many are done so far.  An OSError of it is ignored.
      seconds: Between two counts.
    """
    tell, reported, ended = _listener, dict[str, int](), threading.Event()

    def report() -> None:
        with contextlib.suppress(OSError):
            for kind, done in count().items():
                if tell and done > reported.get(kind, 0):
                    tell(kind, done - reported.get(kind, 0))
                    reported[kind] = done

    def watch() -> None:
        while not ended.wait(seconds):
            report()

    thread = threading.Thread(target=watch, daemon=True)
    with listen(lambda *_: None):
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            report()
