"""Object stores, by fsspec: what ``storage`` asks of them.

``s3://`` is s3fs, ``gs://`` is gcsfs.  Address, region and credentials come from the
environment of each process.

An object appears complete or not at all, when its writing ends.  An error is an OSError
of the path and of the type or code of the failure, since messages of a client may quote
addresses and credentials.  The client repeats a request that fails, for some seconds,
unless the store refuses what it is asked.

References:
  Strong consistency after writes: Amazon S3 since 2020-12, Google Cloud Storage.
  Conditional writes: Amazon S3 since 2024-08 (If-None-Match), Google Cloud Storage.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

import fsspec

from accounting.core.validation import InputError

#: The client of each scheme.
_CLIENTS = {"s3": "s3fs", "gs": "gcsfs"}
#: Attempts at a request, which take some seconds if none is answered.
_ATTEMPTS = 5
#: Bytes of a part of an upload, and of what a reader of a file reads ahead.
_PART_BYTES, _AHEAD_BYTES = 8 << 20, 1 << 20

for _name in _CLIENTS.values():
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # which quote addresses


def file_system(path: str) -> Any:
    """Returns fsspec's file system for a path, the same for all threads of a process.

    Args:
      path: Path in a store.

    Raises:
      InputError: there is no client for its scheme.
    """
    scheme = path.split("://")[0]
    if scheme not in _CLIENTS:
        known = " or ".join(f"{name}://" for name in _CLIENTS)
        raise InputError(f"Expected {scheme}:// of {path} to be {known}.")
    try:
        return _opened(scheme, os.getpid())
    except ImportError:
        raise InputError(
            f"Expected a client for {scheme}:// of {path}: pip install "
            f"{_CLIENTS[scheme]}."
        ) from None


@functools.cache
def _opened(scheme: str, process: int) -> Any:
    del process  # a client does not survive a fork
    retries = {"total_max_attempts": _ATTEMPTS, "mode": "standard"}
    config = {"connect_timeout": 3, "read_timeout": 30, "retries": retries}
    files = fsspec.filesystem(
        scheme,
        use_listings_cache=False,  # other processes write, too
        skip_instance_cache=True,  # which has one for each thread
        **({"config_kwargs": config} if scheme == "s3" else {}),
    )
    files.retries = 1 if scheme == "s3" else files.retries  # on top of those
    return files


def ask(path: str, operation: Callable[[Any], Any]) -> Any:
    """Returns what a file system answers.

    Args:
      path: Path of the object or folder.
      operation: Asks the file system that it is given.

    Raises:
      InputError: as for `file_system`.
      OSError: the store refuses, or fails for too long.
    """
    files = file_system(path)
    with _plain_errors(path):
        return operation(files)


@contextlib.contextmanager
def _plain_errors(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _plain(error, path) from None


def _plain(error: Exception, path: str) -> OSError:
    """Returns an OSError that quotes only the path, and a type or code."""
    answer = getattr(error.__cause__ or error, "response", None)  # of S3
    known = answer.get("Error", {}) if isinstance(answer, dict) else {}
    code = str(getattr(error, "code", None) or known.get("Code") or "")
    code = code if code.isalnum() and len(code) < 40 else ""
    if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
        return FileNotFoundError(errno.ENOENT, "no such object", path)
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, "it exists", path)
    reason = f"the store answered {code or type(error).__name__}"
    return OSError(errno.EIO, reason, path)


class _Reader(fsspec.spec.AbstractBufferedFile):
    """An object as a file, whose reads are ranges."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return read_range(self.path, start, end - start)


def open_object(path: str) -> IO[bytes]:
    """Returns an object open for reading, with ``seek``."""
    size = ask(path, lambda files: files.info(path))["size"]
    files = file_system(path)
    return cast(IO[bytes], _Reader(files, path, block_size=_AHEAD_BYTES, size=size))


def read_range(path: str, start: int, size: int) -> bytes:
    """Returns the bytes of a range by one request; fewer if the object is shorter.

    Args:
      path: Path of the object.
      start: First byte.
      size: Number of bytes.
    """
    if size <= 0:
        return b""
    return ask(path, lambda files: files.cat_file(path, start=start, end=start + size))


@contextlib.contextmanager
def new_object(path: str) -> Iterator[Callable[[bytes], None]]:
    """Yields a function that writes to an object, which appears at the end."""
    with _plain_errors(path):
        file = file_system(path).open(
            path, "wb", block_size=_PART_BYTES, autocommit=False
        )

    def write(data: bytes) -> None:
        with _plain_errors(path):
            file.write(data)

    try:
        yield write
        with _plain_errors(path):
            file.close()
            file.commit()
    except BaseException:
        for undo in (file.close, file.discard):
            with contextlib.suppress(Exception):
                undo()
        raise
