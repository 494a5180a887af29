"""Progress of a run: steps, steps per second, time left.

On a terminal, a progress bar; elsewhere, a line at intervals.  Only public numbers are
reported: steps, times and metrics of held-out examples.
"""

from __future__ import annotations

from typing import Protocol

from pipelines.files.progress_bars import Bars


class Reporter(Protocol):
    """Receives the progress of a run."""

    def say(self, text: str) -> None:
        """Reports one line."""

    def start(self, num_steps: int, done: int) -> None:
        """Reports the start of the steps.

        Args:
          num_steps: Number of steps of the run.
          done: Number of steps done before.
        """

    def advance(self, done: int) -> None:
        """Reports that ``done`` steps are done."""

    def stop(self) -> None:
        """Reports the end of the steps."""


class Silent:
    """Reports nothing."""

    def say(self, text: str) -> None:
        """Reports one line."""

    def start(self, num_steps: int, done: int) -> None:
        """As in ``Reporter``: see `Reporter.start`."""

    def advance(self, done: int) -> None:
        """Reports that ``done`` steps are done."""

    def stop(self) -> None:
        """Reports the end of the steps."""


class Terminal:
    """Reports to standard error.

    Args:
      label: Name of the activity.
      unit: Name of the counted unit, in the singular.

    Example:
      >>> with Terminal() as reporter:
      ...     reporter.start(10, done=0)
      ...     reporter.advance(10)
    """

    def __init__(self, label: str = "training", *, unit: str = "step") -> None:
        self._label = label
        self._bars = Bars({label: None}, unit=unit)
        self._num_steps = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def say(self, text: str) -> None:
        self._bars.say(text)

    def start(self, num_steps: int, done: int) -> None:
        """As in ``Reporter``: see `Reporter.start`."""
        self._num_steps = num_steps
        self._bars.begin(self._label, done, num_steps)

    def advance(self, done: int) -> None:
        self._bars.update(self._label, done, self._num_steps)

    def stop(self) -> None:
        self._bars.stop()
