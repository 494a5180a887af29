"""Errors of code that sees examples, without their text.

No error of a function that `withhold_values` returned, nor any error chained to it,
holds the text of an error that was raised on an example, and TensorFlow does not log
that text.
"""

from __future__ import annotations

import functools
import pathlib
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

from accounting.core.validation import InputError

#: Errors of too little memory.
_OF_MEMORY = ("ResourceExhaustedError", "MemoryError")


class InterruptedRunError(InputError):
    """An error of memory, disk, network or batches, which tells nothing about values.

    A run may go on after it: see ``checkpoints``.
    """


def redact_errors(
    function: Callable[..., Any], kind: type[Exception] = Exception
) -> Callable[..., Any]:
    """Returns ``function`` with the text of its errors withheld.

    Code that sees examples needs it: TensorFlow's errors quote the values they refuse.

    Args:
      function: Any function.  Its InputErrors, which quote no example, stay.
      kind: Class of errors that may quote an example.
    """

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        from trainer.core.tf_compat import redacted_logs  # whoever sees examples has it

        try:
            with redacted_logs():
                return function(*args, **more)
        except InputError as error:
            refusal = error
        except kind as error:
            is_short = type(error).__name__ in _OF_MEMORY
            made = InterruptedRunError if is_short else InputError
            refusal = made(_without_text(error))
        # Outside the handlers: an error raised within one is chained to the other.
        refusal.__cause__ = refusal.__context__ = None
        raise refusal

    return call


def _without_text(error: Exception) -> str:
    name, theirs = type(error).__name__, _users_frames(error)
    remedy = (
        "Look for labels outside the classes, for ids outside the range of an "
        "embedding, and into code of your own."
    )
    if name in _OF_MEMORY:
        remedy = "Memory is short: make batches with a smaller --physical-batch-size."
    elif theirs:
        remedy = f"Fix {theirs[-1].filename}, line {theirs[-1].lineno}."
    return (
        f"Expected the model, its loss and metrics to take every example; {name} was "
        f"raised. Its message may hold values of examples and is withheld. {remedy}"
    )


def place_of(error: Exception) -> str | None:
    """Returns file and line of the user's code that raised an error; None elsewhere."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = _users_frames(error)
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else None


def _users_frames(error: Exception) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_users_file(frame.filename)]


#: Packages of this project.
_OWN = ("accounting", "dpsgd", "pipelines", "trainer")
_STDLIB = [
    pathlib.Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")
]


def is_users_file(filename: str) -> bool:
    """Whether a Python file is a user's: not Python's, not installed, not ours."""
    path = pathlib.Path(filename)
    ours = [pathlib.Path(__file__).parents[3] / package for package in _OWN]
    libraries = {"site-packages", "dist-packages"}
    return not (
        filename.startswith("<frozen")
        or "__autograph_generated_file" in filename
        or libraries & set(path.parts)
        or any(path.is_relative_to(folder) for folder in (*_STDLIB, *ours))
    )
