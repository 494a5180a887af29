"""Functions that users bring as ``module:function``, and their errors as one line.

Formal guarantees:
  - What ``withhold_values`` raises, errors chained to it included, holds no text of an
    error that was raised on an example.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from accounting.validation import InputError


def check_name(spec: str, option: str) -> tuple[str, str]:
    """Returns module and name of ``module:function``, given by ``--option``.

    Args:
      spec: What the user wrote.
      option: Name of the flag.

    Raises:
      InputError: one of them is missing.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise InputError(
            f"Expected {option}={spec!r} to name a function. {remedy_of(option)}"
        )
    return module_name, name


def remedy_of(option: str) -> str:
    """Returns how a function of one's own is given by ``--option``."""
    return f"Give --{option} as module:function, importable from the current folder."


def load_function(spec: str, option: str = "model") -> Callable[..., Any]:
    """Returns the function that ``module:function`` names, given by ``--option``.

    Args:
      spec: What the user wrote.
      option: Name of the flag.

    Raises:
      InputError: no such module or function, or the module raises.
    """
    module_name, name = check_name(spec, option)
    what, remedy = f"{option}={spec!r}", remedy_of(option)
    import_from_here()
    with one_line_errors(what):
        try:
            function = getattr(importlib.import_module(module_name), name, None)
        except ModuleNotFoundError as error:
            raise InputError(
                f"Expected {what} to be importable; there is no module "
                f"{error.name!r}. {remedy}"
            ) from None
    if not callable(function):
        raise InputError(f"Expected {what} to name a function. {remedy}")
    return function


def import_from_here() -> None:
    """Lets modules in the current folder be imported."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Raises errors of a user's code as one line, with where they were raised.

    Only around code that has seen no example: the text of the error is in the line.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"Expected {what} to work; it raised {type(error).__name__}: "
            f"{' '.join(str(error).split())} ({_place(error)}). Fix it there."
        ) from None


def withhold_values(
    function: Callable[..., Any], kind: type[Exception] = Exception
) -> Callable[..., Any]:
    """Returns ``function`` with errors whose text, which may quote an example, is gone.

    For code that sees examples; errors of TensorFlow quote the value that they refuse.

    Args:
      function: Its own InputErrors quote no example, and are kept.
      kind: The errors that may quote an example.
    """

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        try:
            return function(*args, **more)
        except InputError as error:
            refusal = error
        except kind as error:
            refusal = InputError(_without_text(error))
        # Outside of the handlers: an error raised within one carries the other along.
        refusal.__cause__ = refusal.__context__ = None
        raise refusal

    return call


def _without_text(error: Exception) -> str:
    name, theirs = type(error).__name__, _users_frames(error)
    remedy = (
        "Look for ids outside the range of an embedding, and into code of your own."
    )
    if name in ("ResourceExhaustedError", "MemoryError"):
        remedy = "Memory is short: make batches with a smaller --physical-batch-size."
    elif theirs:
        remedy = f"Fix {theirs[-1].filename}, line {theirs[-1].lineno}."
    return (
        f"Expected the model, its loss and metrics to take every example; {name} was "
        f"raised. Its message may hold values of examples and is withheld. {remedy}"
    )


def _place(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    place = (_users_frames(error) or frames)[-1]
    return f"{place.filename}, line {place.lineno}"


def _users_frames(error: Exception) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_users_file(frame.filename)]


#: This project.
_OWN = ("accounting", "dpsgd", "pipelines", "trainer")
_STDLIB = [
    pathlib.Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")
]


def is_users_file(filename: str) -> bool:
    """Whether a file of Python code is neither Python's, nor installed, nor ours."""
    path = pathlib.Path(filename)
    ours = [pathlib.Path(__file__).parents[2] / package for package in _OWN]
    libraries = {"site-packages", "dist-packages"}
    return not (
        filename.startswith("<frozen")
        or "__autograph_generated_file" in filename
        or libraries & set(path.parts)
        or any(path.is_relative_to(folder) for folder in (*_STDLIB, *ours))
    )
