"""Paths of this machine, and of stores: those with a scheme, such as ``s3://``."""

from __future__ import annotations

import os
import secrets

StrPath = str | os.PathLike[str]

SCHEME = "://"
WILDCARDS = "*?["


def is_remote(path: StrPath) -> bool:
    """Whether ``path`` is a store's."""
    return SCHEME in os.fspath(path)


def absolute(path: StrPath) -> str:
    """Returns ``path`` as every process of this machine understands it."""
    text = os.fspath(path)
    return text.rstrip("/") if is_remote(text) else os.path.abspath(text)


def join(folder: StrPath, *names: str) -> str:
    """Returns the path of something in a folder.

    Args:
      folder: Here, or in a store.
      *names: Of folders within, and of the file.
    """
    if is_remote(folder):
        return "/".join([os.fspath(folder).rstrip("/"), *names])
    return os.path.join(folder, *names)


def hidden_path(path: str) -> str:
    """Returns a path beside ``path`` that nobody else uses."""
    folder, name = path.rsplit("/", 1) if "/" in path else (".", path)
    return f"{folder}/.{name}.{secrets.token_hex(8)}"
