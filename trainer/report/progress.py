"""Progress of a run that a person can follow: steps, steps per second, time left.

On a terminal a bar; elsewhere a line now and then.  Only public numbers pass: steps,
times and metrics of held-out examples.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

#: Seconds between lines where standard error is not a terminal.
_LINE_SECONDS = 15.0


class Reporter(Protocol):
    """What a run tells about its progress."""

    def say(self, text: str) -> None:
        """Reports one line."""

    def start(self, num_steps: int, done: int) -> None:
        """Reports the start of the steps."""

    def advance(self, done: int) -> None:
        """Reports that ``done`` steps are done."""

    def stop(self) -> None:
        """Reports the end of the steps."""


class Silent:
    """Reports nothing."""

    def say(self, text: str) -> None:
        """Reports one line."""

    def start(self, num_steps: int, done: int) -> None:
        """Reports the start of the steps."""

    def advance(self, done: int) -> None:
        """Reports that ``done`` steps are done."""

    def stop(self) -> None:
        """Reports the end of the steps."""


class Terminal:
    """Reports to standard error.

    Example:
      >>> with Terminal() as reporter:
      ...     reporter.start(10, done=0)
      ...     reporter.advance(10)
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=None, speed="", start=False)
        self._pace = _Pace()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """Reports one line."""
        self._console.print(text, markup=False)

    def start(self, num_steps: int, done: int) -> None:
        """Reports the start of the steps."""
        self._pace = _Pace(num_steps, done)
        self._bar.reset(self._task, total=num_steps, completed=done)
        self._bar.start()

    def advance(self, done: int) -> None:
        """Reports that ``done`` steps are done."""
        self._pace.done = done
        self._bar.update(self._task, completed=done, speed=self._pace.speed)
        if self._bar.disable and self._pace.line_is_due():
            print(f"training: {self._pace}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Reports the end of the steps."""
        self._bar.stop()


class _Pace:
    def __init__(self, num_steps: int = 0, done: int = 0) -> None:
        self.done = done
        self._num_steps = num_steps
        self._first = done
        self._start = self._last_line = time.monotonic()

    @property
    def _per_second(self) -> float:
        elapsed = time.monotonic() - self._start
        return (self.done - self._first) / elapsed if elapsed > 0 else 0.0

    @property
    def speed(self) -> str:
        return f"{self._per_second:.1f} steps/s"

    def line_is_due(self) -> bool:
        now = time.monotonic()
        due = now - self._last_line >= _LINE_SECONDS or self.done == self._num_steps
        if due:
            self._last_line = now
        return due

    def __str__(self) -> str:
        left = self._num_steps - self.done
        seconds = left / self._per_second if self._per_second > 0 else 0.0
        return (
            f"step {self.done} of {self._num_steps}, {self.speed}, {seconds:.0f} s left"
        )
