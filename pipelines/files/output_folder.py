"""``--out``: whether it can become the folder that a command makes.

Formal guarantees:
  - ``check_output`` refuses a path that cannot become the folder, and leaves nothing
    behind.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
from collections.abc import Sequence

from accounting.core.validation import InputError
from pipelines.files.folders import usable_folder


def check_output(
    out: str | os.PathLike[str], *, aside: pathlib.Path | None = None
) -> pathlib.Path:
    """Returns the path of a folder that can be made or is empty.

    Args:
      out: The path.
      aside: Free path for a folder on the same file system; by default beside ``out``.

    Raises:
      InputError: it is not empty, or it cannot be made.
    """
    path, final = pathlib.Path(out), real_path(out)
    refuse_used(path)
    with usable_folder(path, "--out"):
        _try_to_replace(
            final, aside or final.with_name(f".dpsgd-{secrets.token_hex(8)}")
        )
    return path


def is_free(path: pathlib.Path) -> bool:
    """Whether there is nothing at a path, or an empty folder."""
    try:
        return not os.path.lexists(path) or not any(path.iterdir())
    except OSError:
        return False


def refuse_used(path: pathlib.Path) -> None:
    """Refuses, by an InputError, a path with anything but an empty folder."""
    if not is_free(path):
        raise InputError(
            f"Expected --out {path} to be a new or an empty folder. Choose another, or "
            "remove it."
        )


def _try_to_replace(final: pathlib.Path, staged: pathlib.Path) -> None:
    """Makes and renames empty folders as at the end of the work, and undoes it.

    Only a trial reveals permissions, mount points and limits of names before the work.
    """
    if final.exists():
        os.rename(final, staged)
        os.rename(staged, final)
        return
    made = [staged, final]
    try:
        make_parents(final, made)
        staged.mkdir()
        os.rename(staged, final)
    finally:
        remove_empty(made)


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
