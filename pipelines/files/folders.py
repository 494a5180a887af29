"""Folders that a user names: usable and private, or refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from accounting.core.validation import InputError
from pipelines.core.files import local_files
from pipelines.files.paths import SCHEME, WILDCARDS, StrPath, absolute, is_remote
from pipelines.files.storage import check_client, make_folder


def make_private_folder(path: StrPath, *, follow: bool = True, remedy: str) -> None:
    """Makes a private folder, as the core does; a store has its own access rules.

    Args:
      path: The folder.
      follow: Whether it may be a link to a folder.
      remedy: What the user can do if it cannot be made private.

    Raises:
      InputError, OSError: as `local_files.make_private_folder`.
    """
    if is_remote(path):
        make_folder(path)
    else:
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
        raise InputError(
            f"Expected {option} {path} to be a folder that can be used: {reason}. "
            "Choose another."
        ) from None


def check_folder(path: StrPath, option: str) -> None:
    """Refuses a path that cannot be a folder.

    Args:
      path: New or existing folder.
      option: Command-line option that named it.

    Raises:
      InputError: it is below a file, its name is too long, or there is no access; in a
        store, it has wildcards, or no name after the bucket's.
    """
    if not is_remote(path):
        with usable_folder(path, option), contextlib.suppress(FileNotFoundError):
            os.stat(path)
        return
    text = absolute(path)
    place = text.split(SCHEME, 1)[1]
    if "/" not in place or any(character in text for character in WILDCARDS):
        raise InputError(
            f"Expected {option} {text} to name a folder in a bucket, without any of "
            f"{' '.join(WILDCARDS)}."
        )
    check_client(text)
