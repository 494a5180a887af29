"""Functions that users bring as ``module:function``, and their errors as one line."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from accounting.validation import InputError


def load_function(spec: str, option: str = "model") -> Callable[..., Any]:
    """Returns the function that ``module:function`` names, given by ``--option``.

    Raises:
      InputError: no such module or function, or the module raises.
    """
    module_name, _, name = spec.partition(":")
    what = f"{option}={spec!r}"
    remedy = f"Give --{option} as module:function, importable from the current folder."
    if not module_name or not name:
        raise InputError(f"Expected {what} to name a function. {remedy}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
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
            f"{' '.join(str(error).split())} ({_place(error)}). Mend it there."
        ) from None


def _place(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_users(frame.filename)]
    place = (theirs or frames)[-1]
    return f"{place.filename}, line {place.lineno}"


def _is_users(filename: str) -> bool:
    libraries = ("site-packages", "importlib", "contextlib")
    here = pathlib.Path(__file__).parent
    return pathlib.Path(filename).parent != here and not any(
        name in filename for name in libraries
    )
