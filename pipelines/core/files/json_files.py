"""JSON files, with errors of one line."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

from accounting.core.validation import InputError
from pipelines.core.files.local_files import StrPath


def pretty_json(value: Any) -> bytes:
    """Returns ``value`` as indented JSON with sorted keys."""
    return (
        json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    ).encode()


def _read_here(path: StrPath) -> bytes:
    return pathlib.Path(path).read_bytes()


def find(path: StrPath, read: Callable[[StrPath], bytes] = _read_here) -> bytes | None:
    """Returns the contents of a file; None if there is none.

    Args:
      path: Path of the file.
      read: Reads a file, or raises an OSError.

    Raises:
      InputError: no access.
    """
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"Expected {path} to be readable: {error.strerror or type(error).__name__}."
            " Restore access to it, then give the same command again."
        ) from None


def read_known(
    path: StrPath, *, remedy: str = "", read: Callable[[StrPath], bytes] = _read_here
) -> bytes:
    """Returns the contents of a file that should be there.

    Args:
      path: Path of the file.
      remedy: What the user can do if it is missing.
      read: Reads a file, or raises an OSError.

    Raises:
      InputError: missing, or no access.
    """
    found = find(path, read)
    if found is None:
        raise InputError(f"Expected {path} to exist. {remedy}".strip())
    return found


def read_json(path: StrPath, **more: Any) -> Any:
    """Returns the JSON value in a file; arguments as for ``read_known``.

    Raises:
      InputError: as ``read_known``, or not JSON.
    """
    data = read_known(path, **more)
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(
            f"Expected {path} to be a JSON file: {type(error).__name__}."
        ) from None
