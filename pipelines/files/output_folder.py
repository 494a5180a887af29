"""``--out``: whether it can become the folder that a command makes."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Sequence

from accounting.core.validation import InputError


def is_free(path: pathlib.Path) -> bool:
    """Whether there is nothing at a path, or an empty folder."""
    try:
        return not os.path.lexists(path) or not any(path.iterdir())
    except OSError:
        return False


def refuse_used(path: pathlib.Path) -> None:
    """Refuses, by an InputError, a path with anything but an empty folder.

    Nor can a mount point be replaced at the end of the work.
    """
    if not is_free(path) or os.path.ismount(real_path(path)):
        raise InputError(
            f"Expected --out {path} to be a new or an empty folder, and no mount "
            "point. Choose another, or remove it."
        )


def make_parents(path: pathlib.Path, made: list[pathlib.Path]) -> None:
    """Makes the folders above a path, and appends those that were missing.

    Args:
      path: The path.
      made: List to append to, also if an OSError is raised.
    """
    for parent in reversed(path.parents):
        if not parent.exists():
            with contextlib.suppress(FileExistsError):  # another process was faster
                parent.mkdir()
                made.append(parent)


def remove_empty(folders: Sequence[pathlib.Path]) -> None:
    """Removes those of the folders that are there and empty, the deepest first."""
    for folder in sorted(folders, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):
            folder.rmdir()


def real_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the target of links; some path for a loop, which the system refuses."""
    return pathlib.Path(os.path.realpath(path))
