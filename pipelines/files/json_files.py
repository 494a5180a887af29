"""JSON files, with errors of one line."""

from __future__ import annotations

import json
from typing import Any

from accounting.core.validation import InputError
from pipelines.files.paths import StrPath
from pipelines.files.storage import read_bytes


def pretty_json(value: Any) -> bytes:
    """Returns ``value`` as indented JSON with sorted keys."""
    return (
        json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    ).encode()


def read_known(path: StrPath, *, remedy: str = "") -> bytes:
    """Returns the contents of a file that should be there.

    Args:
      path: Path of the file.
      remedy: What the user can do if it is missing.

    Raises:
      InputError: missing, or no access.
    """
    try:
        return read_bytes(path)
    except FileNotFoundError:
        raise InputError(f"Expected {path} to exist. {remedy}".strip()) from None
    except OSError as error:
        raise InputError(
            f"Expected {path} to be readable: {error.strerror or type(error).__name__}."
            " Restore access to it, then give the same command again."
        ) from None


def read_json(path: StrPath, *, remedy: str = "") -> Any:
    """Returns the JSON value in a file; arguments as for ``read_known``.

    Raises:
      InputError: as ``read_known``, or not JSON.
    """
    data = read_known(path, remedy=remedy)
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(
            f"Expected {path} to be a JSON file: {type(error).__name__}."
        ) from None
