"""JSON files of this machine and of stores, with errors of one line."""

from __future__ import annotations

from typing import Any

from pipelines.core.files import json_files
from pipelines.core.files.json_files import pretty_json as pretty_json
from pipelines.files.paths import StrPath
from pipelines.files.storage import read_bytes


def read_known(path: StrPath, *, remedy: str = "") -> bytes:
    """Returns the contents of a file that should be there.

    Args:
      path: Path of the file.
      remedy: What the user can do if it is missing.

    Raises:
      InputError: missing, or no access.
    """
    return json_files.read_known(path, remedy=remedy, read=read_bytes)


def read_json(path: StrPath, *, remedy: str = "") -> Any:
    """Returns the JSON value in a file; arguments as for ``read_known``.

    Raises:
      InputError: as ``read_known``, or not JSON.
    """
    return json_files.read_json(path, remedy=remedy, read=read_bytes)
