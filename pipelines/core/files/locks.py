"""One writer at a time: locks that end with the process that has them.

If several processes lock one file at once, on this host or on hosts whose file system
shares its locks, one gets the lock and each other one an InputError.  A process that
has ended, in whatever way, has no lock: the next process takes it over.  A lock file
that its owner removed or renamed locks nothing.

Public: everything here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

from accounting.core.validation import InputError
from pipelines.core.files.local_files import StrPath

LOCK_NAME = "lock"


def in_use(out: StrPath) -> InputError:
    """Returns the error for an ``out`` that another process writes."""
    return InputError(
        f"Expected no other job to write {out}. Wait for it, or choose another --out."
    )


def _lock_file(path: StrPath, out: StrPath) -> int:
    """Locks a file, made if missing; returns its descriptor, which has the lock."""
    while True:
        # Open for writing: NFS gives no other lock.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _lock(descriptor, out)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner removed it in the meantime


def _lock(descriptor: int, out: StrPath) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise in_use(out) from None
    except OSError as error:
        raise InputError(
            f"Expected {out} to be on a file system with locks, so that no other job "
            f"writes it: {error.strerror}. Choose another --out."
        ) from None


def _is_at(descriptor: int, path: StrPath) -> bool:
    """Whether an open file is still the one at ``path``."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def locked(folder: StrPath, out: StrPath) -> AbstractContextManager[None]:
    """Locks a folder until the context or the process ends.

    Args:
      folder: Existing folder of this machine; it holds ``LOCK_NAME`` until then.
      out: What the lock protects, for messages.

    Raises:
      InputError, OSError: as for `lock_file`.
    """
    return _held(os.path.join(folder, LOCK_NAME), out)


def locked_beside(path: StrPath) -> AbstractContextManager[None]:
    """Locks a file that is to be replaced, by ``path.lock`` until the context ends.

    Raises:
      InputError, OSError: as for `lock_file`, before anything else.
    """
    return _held(f"{path}.lock", path)


@contextlib.contextmanager
def _held(path: StrPath, out: StrPath) -> Iterator[None]:
    descriptor = _lock_file(path, out)
    try:
        yield
    finally:
        if _is_at(descriptor, path):
            os.unlink(path)
        os.close(descriptor)
