"""Folders that a user names: usable, private, free to be made, or refused."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

from accounting.core.validation import InputError
from pipelines.core.files import local_files
from pipelines.files import storage
from pipelines.files.paths import SCHEME, WILDCARDS, StrPath, absolute, is_remote


def make_private_folder(path: StrPath, *, follow: bool = True, remedy: str) -> None:
    """Makes a private folder, as the core does; a store has its own access rules.

    Args:
      path: The folder.
      follow: Whether it may be a link to a folder.
      remedy: What the user can do if it cannot be made private.

    Raises:
      InputError, OSError: as `local_files.make_private_folder`.
    """
    if not is_remote(path):
        local_files.make_private_folder(path, follow=follow, remedy=remedy)


@contextlib.contextmanager
def usable_folder(path: StrPath, option: str) -> Iterator[None]:
    """Turns an OSError about a folder into an InputError with a remedy.

    Args:
      path: The folder.
      option: Command-line option that named it.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        remedy = "Choose another."
        if is_remote(path):
            remedy = "Check its bucket, rights, credentials and endpoint."
        raise InputError(
            f"Expected {option} {path} to be a folder that can be used: {reason}. "
            f"{remedy}"
        ) from None


def check_folder(path: StrPath, option: str) -> None:
    """Refuses a path that cannot be a folder.

    Args:
      path: New or existing folder.
      option: Command-line option that named it.

    Raises:
      InputError: it is below a file, its name is too long, or there is no access; in a
        store, it has wildcards, or no name after the bucket's, or does not answer.
    """
    text = absolute(path)
    place = text.rpartition(SCHEME)[2]
    if is_remote(path) and ("/" not in place or set(WILDCARDS) & set(text)):
        raise InputError(
            f"Expected {option} {text} to name a folder in a bucket, without any of "
            f"{' '.join(WILDCARDS)}."
        )
    with usable_folder(path, option), contextlib.suppress(FileNotFoundError):
        storage.size(path)


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
    if not is_free(path) or os.path.ismount(os.path.realpath(path)):
        raise InputError(
            f"Expected --out {path} to be a new or an empty folder, and no mount "
            "point. Choose another, or remove it."
        )
