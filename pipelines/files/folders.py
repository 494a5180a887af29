"""Folders that a user names: usable and private, or refused.

Formal guarantees:
  - After ``make_private_folder`` only this user may enter a folder of this machine,
    whatever its mode was before.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from accounting.core.validation import InputError
from pipelines.files.paths import SCHEME, WILDCARDS, StrPath, absolute, is_remote
from pipelines.files.storage import check_client, make_folder


def make_private_folder(path: StrPath, *, follow: bool = True, remedy: str) -> None:
    """Makes a folder that only this user may enter, or closes an existing one.

    Args:
      path: The folder; a store protects it by its own access rules.
      follow: Whether it may be a link to a folder.
      remedy: What the user can do if it cannot be made private.

    Raises:
      InputError: it belongs to another user, is no folder, or is on a file system
        without modes.
      OSError: no room, or no access.
    """
    new = make_folder(path)
    if is_remote(path):
        return
    found = os.stat(path, follow_symlinks=follow)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise InputError(
            f"Expected {path} to be a folder of this user, since it is to hold what "
            f"nobody else may read. {remedy}"
        )
    if not new:
        os.chmod(path, 0o700)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"Expected the mode {mode:04o} of {path} to become 0700, so that nobody "
            f"else can read what it holds; its file system keeps no modes. {remedy}"
        )


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
