"""Folders that a user names: usable, and closed to others, or refused.

Formal guarantees:
  - After ``make_private_folder`` only the user who runs this may enter the folder, if
    it is on this machine, whatever its mode was before.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from accounting.validation import InputError
from pipelines.files.paths import SCHEME, WILDCARDS, StrPath, absolute, is_remote, join
from pipelines.files.storage import check_client, make_folder


def make_private_folder(path: StrPath, *, follow: bool = True, remedy: str) -> None:
    """Makes a folder that this user alone may enter, or closes one that is there.

    Args:
      path: The folder; in a store, its own rules of access guard it.
      follow: Whether it may be a link to a folder.
      remedy: What to do if it cannot be made private.

    Raises:
      InputError: another user's, no folder, or on a file system without modes.
      OSError: no room, no access.
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
    """Turns an OSError about a folder into one line with a remedy.

    Args:
      path: The folder.
      option: The option that named it.

    Raises:
      InputError: below a file, too long a name, no access, ...
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        # A mount point, or a folder beside which nothing can be made, takes one within.
        within = not is_remote(path) and os.path.isdir(path)
        remedy = f"one within it, {option} {join(path, 'new')}" if within else "another"
        raise InputError(
            f"Expected {option} {path} to be a folder that can be used: {reason}. "
            f"Choose {remedy}."
        ) from None


def check_folder(path: StrPath, option: str) -> None:
    """Refuses a path that cannot be a folder.

    Args:
      path: A new or an existing folder.
      option: The option that named it.

    Raises:
      InputError: below a file, too long a name or no access; in a store, wildcards, or
        no name beside the bucket's.
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
