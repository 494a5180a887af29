"""A line on a terminal's standard error that says what is being computed.

Formal guarantees:
  - Where standard error is no terminal, nothing is printed: a pipe gets only results.
  - The line is gone when the work ends, also by an error.

Public: everything.
"""

from __future__ import annotations

import sys

_CLEAR = "\r\x1b[2K"


class Progress:
    """The line; use it as a context manager."""

    def __init__(self) -> None:
        """Looks whether standard error is a terminal."""
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Clears the line."""
        self._write("")

    def show(self, text: str) -> None:
        """Replaces the line."""
        self._write(f"{text} ...")

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        if self._shown:
            print(f"{_CLEAR}{text}", end="", file=sys.stderr, flush=True)
