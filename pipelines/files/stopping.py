"""SIGINT and SIGTERM: a stopped command cleans up and prints one line.

Formal guarantees:
  - A signal raises an exception that is not an ``Exception``: no library handles it as
    a failure of its own, which it may retry, log with a traceback, or ignore.
  - Whatever a library raises instead of it, ``stoppable`` ends in ``StoppedError``.
  - When a context ends, the earlier handlers are restored; after ``ignore_signals``,
    signals stay ignored.

References:
  Exit status 128 + number of the signal: POSIX.1-2017, Shell Command Language, section
  2.8.2, and common practice (130 for SIGINT, 143 for SIGTERM).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AGAIN = "Stopped by a signal. Give the same command again."
#: For commands that begin anew.
LEAVES_NOTHING = _AGAIN
#: For commands that resume their work.
RESUMES = f"{_AGAIN.rstrip('.')}: it goes on where it stopped."


class StoppedError(BaseException):
    """A signal stopped the command.

    Args:
      message: One line for the user.
      number: Number of the signal.
    """

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        # Libraries that add to a message make a new exception from ``args``.
        super().__init__(message, number)
        self.number = number

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def exit_status(self) -> int:
        """Exit status that a shell reports for a process that the signal ended."""
        return 128 + self.number


@contextlib.contextmanager
def on_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Calls ``handler(number)`` for every signal; does nothing outside the main thread.

    Python delivers signals only to the main thread.
    """
    before = {}
    for number in _SIGNALS:
        with contextlib.suppress(ValueError):
            before[number] = signal.signal(number, lambda number, _: handler(number))
    try:
        yield
    finally:
        for number, old in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, old)


def ignore_signals() -> None:
    """Ignores signals for good, in a process that is about to end."""
    for number in _SIGNALS:
        with contextlib.suppress(ValueError):  # as in ``on_signals``
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def stoppable(message: str = _AGAIN) -> Iterator[None]:
    """Turns a signal into a StoppedError.

    Args:
      message: One line with what the user can do next.

    Raises:
      StoppedError: a signal arrived.
    """
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        raise StoppedError(message, number)

    try:
        with on_signals(stop):
            yield
    except BaseException:
        if received:
            raise StoppedError(message, received[0]) from None
        raise
