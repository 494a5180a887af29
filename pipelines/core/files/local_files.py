"""Files of this machine: written as a whole, and private where they must be.

`new_file` and `write_atomically` write a temporary file, flush it to the disk unless
``flush`` is False, and rename it: under its final name, a file is complete or absent.
After `make_private_folder` only this user may enter the folder, whatever its mode was
before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Callable, Iterator
from typing import Any, cast

from accounting.core.validation import InputError

StrPath = str | os.PathLike[str]


#: Bytes of a file that are read at once.
_BLOCK_BYTES = 1 << 22


def digest_of(path: StrPath) -> str:
    """Returns the SHA-256 of a file, as hex digits."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            total.update(block)
    return total.hexdigest()


def hidden_path(path: str) -> str:
    """Returns a free, hidden path beside ``path``."""
    folder, name = path.rsplit("/", 1) if "/" in path else (".", path)
    return f"{folder}/.{name}.{secrets.token_hex(8)}"


@contextlib.contextmanager
def names_full_disk(path: StrPath) -> Iterator[None]:
    """Names a file in the error of a full disk, which the system leaves without one."""
    try:
        yield
    except OSError as error:
        full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if error.errno in full and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def new_file(
    path: str, *, mode: int = 0o644, flush: bool = True, cached: bool = True
) -> Iterator[Callable[[bytes], None]]:
    """Yields a function that writes to ``path``, visible when the context ends well.

    Args:
      path: Path in an existing folder; a file of that name is replaced.
      mode: Permissions, before the umask.
      flush: Whether the file must survive a loss of power.
      cached: Whether the page cache may keep the file once it is flushed.

    Raises:
      OSError: the disk is full, access is denied, or the folder does not exist.
    """
    temporary = hidden_path(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with names_full_disk(path), os.fdopen(descriptor, "wb") as file:
            # A buffered file writes all or raises.
            yield cast(Callable[[bytes], None], file.write)
            if flush:
                file.flush()
                os.fsync(file.fileno())
                if not cached:
                    drop_from_cache(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def drop_from_cache(descriptor: int) -> None:
    """Advises the system to drop an open file from the page cache."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # it is only advice
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_atomically(path: StrPath, data: bytes, *, mode: int = 0o644) -> None:
    """Writes a whole file.

    Args:
      path: Path in an existing folder; a file of that name is replaced.
      data: Contents of the file.
      mode: Permissions, before the umask.

    Raises:
      OSError: as for `new_file`.
    """
    with new_file(os.fspath(path), mode=mode) as write:
        write(data)


def make_folder(path: StrPath) -> bool:
    """Makes a folder that only its owner may enter; returns whether there was none."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    return True


def make_private_folder(path: StrPath, *, follow: bool = True) -> None:
    """Makes a folder that only this user may enter, or closes an existing one.

    Args:
      path: The folder.
      follow: Whether it may be a link to a folder.

    Raises:
      InputError: the path belongs to another user, is no folder, or is on a file system
        without modes.
      OSError: the disk is full, or access is denied.
    """
    new = make_folder(path)
    found = os.stat(path, follow_symlinks=follow)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise InputError(
            f"Expected {path} to be a folder of this user, since it is to hold what "
            "nobody else may read."
        )
    if not new:
        os.chmod(path, 0o700)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"Expected the mode {mode:04o} of {path} to become 0700, so that nobody "
            "else can read what it holds; its file system keeps no modes."
        )


def pretty_json(value: Any) -> bytes:
    """Returns ``value`` as indented JSON with sorted keys."""
    return (
        json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    ).encode()


def _read_here(path: StrPath) -> bytes:
    return pathlib.Path(path).read_bytes()


def find(path: StrPath, read: Callable[[StrPath], bytes] = _read_here) -> bytes | None:
    """Returns the contents of a file; None if there is none.

    Args:
      path: Path of the file.
      read: Reads a file, or raises an OSError.

    Raises:
      InputError: the file exists and cannot be read.
    """
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"Expected {path} to be readable: {error.strerror or type(error).__name__}."
            " Restore access to it, then give the same command again."
        ) from None


def read_known(
    path: StrPath, *, remedy: str = "", read: Callable[[StrPath], bytes] = _read_here
) -> bytes:
    """Returns the contents of a file that should be there.

    Args:
      path: Path of the file.
      remedy: What the user can do if it is missing.
      read: Reads a file, or raises an OSError.

    Raises:
      InputError: the file is missing or cannot be read.
    """
    found = find(path, read)
    if found is None:
        raise InputError(f"Expected {path} to exist. {remedy}".strip())
    return found


def read_json(path: StrPath, **more: Any) -> Any:
    """Returns the JSON value in a file.

    Args:
      path: Path of the file.
      **more: As for `read_known`.

    Raises:
      InputError: the file is missing, cannot be read, or is not JSON.
    """
    data = read_known(path, **more)
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(
            f"Expected {path} to be a JSON file: {type(error).__name__}."
        ) from None
