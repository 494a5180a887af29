"""Progress on standard error: bars on a terminal, elsewhere a line now and then.

Public values only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich import progress
from rich.console import Console

#: Seconds between lines where standard error is not a terminal.
_LINE_SECONDS = 15.0


class Bars:
    """Progress bars, which appear with the first progress; thread-safe.

    Example:
      >>> with Bars({"blocks": 1}) as bars:
      ...     bars.advance("blocks", 1)
    """

    def __init__(self, totals: Mapping[str, int | None], *, unit: str = "") -> None:
        """Makes the bars.

        Args:
          totals: Label of each bar -> its total, None if it is not known yet.
          unit: Name of the unit in the singular ("step"); empty to show no speed.
        """
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn() if unit else progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True, highlight=False, soft_wrap=True),
        )
        self._unit = unit
        self._is_terminal = self._progress.console.is_terminal
        self._last_line = time.monotonic()
        self._told: dict[str, float] = {}
        self._tasks = {
            label: self._progress.add_task(label, total=total, start=False, speed="")
            for label, total in totals.items()
        }

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops the bars."""
        if self._progress.live.is_started:  # otherwise it would print an empty line
            self._progress.stop()

    def say(self, text: str) -> None:
        """Prints a line, above the bars if there are any."""
        self._progress.console.print(text, markup=False)

    def begin(self, label: str, done: int, total: int) -> None:
        """Starts a bar for work that another process may have begun.

        Args:
          label: Label of the bar.
          done: Units done so far, which do not count for the speed.
          total: Units in all.
        """
        self._progress.reset(self._tasks[label], total=total, completed=done, speed="")
        self._told.pop(label, None)
        self._last_line = time.monotonic()
        if self._is_terminal:
            self._progress.start()

    def advance(self, label: str, amount: int) -> None:
        """Adds to the progress.

        Args:
          label: Label of the bar.
          amount: Units done since the last call.
        """
        self._move(label, advance=amount)

    def update(self, label: str, done: int, total: int) -> None:
        """Sets the progress.

        Args:
          label: Label of the bar.
          done: Units done so far.
          total: Units in all.
        """
        self._move(label, completed=done, total=total)

    def _move(self, label: str, **how: float) -> None:
        """Updates a bar; without a terminal prints a line every ``_LINE_SECONDS``."""
        number = self._tasks[label]
        task = self._progress.tasks[number]
        if task.start_time is None:
            if self._is_terminal:
                self._progress.start()  # not before there is something to show
            self._progress.start_task(number)
        self._progress.update(number, **how)  # type: ignore[arg-type]
        speed = f"{task.speed:.1f} {self._unit}s/s" if self._unit and task.speed else ""
        self._progress.update(number, speed=speed)
        now = time.monotonic()
        quiet = now - self._last_line < _LINE_SECONDS and task.completed != task.total
        if self._is_terminal or quiet or self._told.get(label) == task.completed:
            return
        self._last_line, self._told[label] = now, task.completed
        unit, left = self._unit and f"{self._unit} ", task.time_remaining
        print(
            f"{label}: {unit}{task.completed:,.0f} of {task.total or 0:,.0f}"
            + (f", {speed}" if speed else "")
            + (f", {left:.0f} s left" if left is not None else ""),
            file=sys.stderr,
        )
