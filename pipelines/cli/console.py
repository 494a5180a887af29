"""What the commands of this package show people: progress bars and tables.

Progress goes to standard error, results to standard output, so that a pipe gets results
alone.  Public values only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import click

#: Seconds between lines where standard error is not a terminal.
_LINE_SECONDS = 15.0


def format_size(num_bytes: float) -> str:
    """Returns a number of bytes for people.

    Example:
      >>> format_size(3 << 20)
      '3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


class Bars:
    """Progress bars that appear with the first progress; safe to use from threads.

    Example:
      >>> with Bars(["blocks"]) as bars:
      ...     bars.set_total("blocks", 1)
      ...     bars.advance("blocks", 1)
    """

    def __init__(self, labels: Iterable[str]) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
        )
        self._is_terminal = self._progress.console.is_terminal
        self._last_line = time.monotonic()
        self._told: dict[str, float] = {}
        self._tasks = {
            label: self._progress.add_task(label, total=None, start=False)
            for label in labels
        }

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace  # an error is shown by who catches it
        if self._progress.live.is_started:  # otherwise it would print an empty line
            self._progress.stop()

    def set_total(self, label: str, total: int) -> None:
        """Says how much there is to do."""
        self._progress.update(self._tasks[label], total=total)

    def advance(self, label: str, amount: int) -> None:
        """Says that ``amount`` more is done."""
        self._start(label)
        self._progress.advance(self._tasks[label], amount)
        self._tell(label)

    def update(self, label: str, done: int, total: int) -> None:
        """Says that ``done`` of ``total`` is done."""
        self._start(label)
        self._progress.update(self._tasks[label], completed=done, total=total)
        self._tell(label)

    def _start(self, label: str) -> None:
        task = self._tasks[label]
        if self._progress.tasks[task].start_time is None:
            if self._is_terminal:
                self._progress.start()  # not before there is something to show
            self._progress.start_task(task)

    def _tell(self, label: str) -> None:
        """Where nobody sees a bar move, a line now and then says the same."""
        now = time.monotonic()
        task = self._progress.tasks[self._tasks[label]]
        quiet = now - self._last_line < _LINE_SECONDS and task.completed != task.total
        if self._is_terminal or quiet or self._told.get(label) == task.completed:
            return
        self._last_line, self._told[label] = now, task.completed
        left = task.time_remaining
        click.echo(
            f"{label}: {task.completed:,.0f} of {task.total or 0:,.0f}"
            + (f", {left:.0f} s left" if left is not None else ""),
            err=True,
        )


def show(title: str, fields: dict[str, Any], as_json: bool) -> None:
    """Prints ``fields`` as JSON, or as a table with a line for each."""
    if as_json:
        click.echo(json.dumps(fields, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name.replace("_", " "), _for_people(name, value))
    Console().print(table)


def _for_people(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_for_people('', v)}" for key, v in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if "bytes" in name.split("_"):
        return format_size(value)
    if name.endswith("padding"):
        return f"{value:.1%}"
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return "none" if value is None else str(value)
