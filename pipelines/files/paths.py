"""Paths of this machine, and of stores, which have a scheme such as ``s3://``."""

from __future__ import annotations

import os

from pipelines.core.files.local_files import StrPath as StrPath
from pipelines.core.files.local_files import hidden_path as hidden_path

SCHEME = "://"
WILDCARDS = "*?["


def is_remote(path: StrPath) -> bool:
    """Whether ``path`` is in a store."""
    return SCHEME in os.fspath(path)


def absolute(path: StrPath) -> str:
    """Returns the absolute path; that of a store without slashes at its end."""
    text = os.fspath(path)
    return text.rstrip("/") if is_remote(text) else os.path.abspath(text)


def join(folder: StrPath, *names: str) -> str:
    """Returns the path of a file or folder in a folder.

    Args:
      folder: Folder, local or in a store.
      *names: Names of the folders below it, and of the file.
    """
    if is_remote(folder):
        return "/".join([os.fspath(folder).rstrip("/"), *names])
    return os.path.join(folder, *names)
