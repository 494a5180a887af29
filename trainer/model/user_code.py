"""Users' functions, given as ``module:function``, and their errors as one line."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from accounting.core.validation import InputError
from trainer.core.run.redact_errors import place_of

_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def functions_of(settings: Any) -> dict[str, str]:
    """Returns the functions that settings name: name of the setting -> its text.

    Args:
      settings: `TrainSettings`.
    """
    options = ("model", "augment", "loss", "metric", "optimizer")
    found = {option: getattr(settings, option) for option in options}
    return {option: spec for option, spec in found.items() if spec and ":" in spec}


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
    """Returns the function that ``spec`` names.

    Args:
      spec: Value of the flag.
      option: Name of the flag, without dashes.

    Raises:
      InputError: there is no such module or function, or the module raises.
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
        importlib.invalidate_caches()


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
            f"Expected {what} to work; it raised {in_one_line(error)}"
        ) from None


def in_one_line(error: Exception) -> str:
    """Returns kind, text and place of an error, without the colours of a terminal."""
    # str() of a KeyError quotes what it was given.
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    line = " ".join(_COLOURS.sub("", text).split()).rstrip(".")
    place = place_of(error)
    where = "." if place is None else f" ({place}). Fix it there."
    return f"{type(error).__name__}: {line}{where}"


def check_views(number: int, augment: Any) -> None:
    """Refuses several views without an augmentation that makes them.

    Args:
      number: Number of views, at least 1.
      augment: The augmentation, or its name; None for none.

    Raises:
      InputError: there is no augmentation.
    """
    if number > 1 and augment is None:
        raise InputError(
            f"Expected an augmentation for views={number}, which it makes. Give "
            "--augment module:function."
        )
