"""Users' functions, given as ``module:function``, and their errors as one line.

Formal guarantees:
  - No error of ``withhold_values``, nor any error chained to it, holds the text of an
    error that was raised on an example; nor does TensorFlow log it.
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

from accounting.core.validation import InputError


def check_name(spec: str, option: str) -> tuple[str, str]:
    """Returns module and name of ``module:function``.

    Args:
      spec: Value of the flag.
      option: Name of the flag, without dashes.

    Raises:
      InputError: module or name is missing.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise InputError(
            f"Expected {option}={spec!r} to name a function. {remedy_of(option)}"
        )
    return module_name, name


def remedy_of(option: str) -> str:
    """Returns how to give a function by ``--option``, in words."""
    return f"Give --{option} as module:function, importable from the current folder."


def load_function(spec: str, option: str = "model") -> Callable[..., Any]:
    """Returns the function that ``spec`` names; arguments as for `check_name`.

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
    """Makes modules in the current folder importable."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@contextlib.contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Raises errors of a user's code as one line, with file and line number.

    Only for code that has seen no example: the line contains the text of the error.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"Expected {what} to work; it raised {type(error).__name__}: "
            f"{' '.join(str(error).split())} ({place_of(error)}). Fix it there."
        ) from None


def withhold_values(
    function: Callable[..., Any], kind: type[Exception] = Exception
) -> Callable[..., Any]:
    """Returns ``function`` with the text of its errors withheld.

    For code that sees examples: TensorFlow's errors quote the values that they refuse.

    Args:
      function: Any function.  Its InputErrors, which quote no example, stay.
      kind: Class of errors that may quote an example.
    """

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        from trainer.tf_compat import withheld_logs  # loaded by all who see examples

        try:
            with withheld_logs():
                return function(*args, **more)
        except InputError as error:
            refusal = error
        except kind as error:
            refusal = InputError(_without_text(error))
        # Outside the handlers: an error raised within one is chained to the other.
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


def place_of(error: Exception) -> str:
    """Returns file and line of the user's code that raised an error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    place = (_users_frames(error) or frames)[-1]
    return f"{place.filename}, line {place.lineno}"


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
    ours = [pathlib.Path(__file__).parents[2] / package for package in _OWN]
    libraries = {"site-packages", "dist-packages"}
    return not (
        filename.startswith("<frozen")
        or "__autograph_generated_file" in filename
        or libraries & set(path.parts)
        or any(path.is_relative_to(folder) for folder in (*_STDLIB, *ours))
    )
