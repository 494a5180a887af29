"""Object stores, by fsspec: what ``storage`` asks of them.

``s3://`` is s3fs, ``gs://`` is gcsfs.  Address, region and credentials come from the
environment of each process.

Formal guarantees:
  - An object appears complete or not at all, when its writing ends.
  - An error is an OSError of the path and of the type or code of the failure: messages
    of a client may quote addresses and credentials.

Other guarantees:
  - A store that never answered this process is given up after some seconds, and one
    that did after about a minute, unless it refuses what it is asked.

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
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

import fsspec

from accounting.core.validation import InputError
from pipelines.files.paths import SCHEME

#: The client of each scheme.
_CLIENTS = {"s3": "s3fs", "gs": "gcsfs"}
#: Attempts of s3fs at a part of an upload, within about a minute; all else is asked
#: again here.
_PART_ATTEMPTS = 8
#: Seconds after which nothing is asked again: of a store that never answered, and of
#: one that did; and before the first time, which then double.
FIRST_SECONDS, PATIENT_SECONDS, _WAIT_SECONDS = 1.0, 60.0, 0.5
#: Bytes of a part of an upload, and of what a reader of a file reads ahead.
_PART_BYTES, _AHEAD_BYTES = 8 << 20, 1 << 20
#: HTTP status of a store that is to be asked again: a request timed out, another writer
#: is at the same object, too many requests.
_LATER = (408, 409, 429)

for _name in _CLIENTS.values():
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # which quote addresses

#: Buckets that have answered this process.
_answered: set[str] = set()


def file_system(path: str, attempts: int = 1) -> Any:
    """Returns fsspec's file system for a path, the same for all threads of a process.

    Args:
      path: Path in a store.
      attempts: Attempts of its client, if that is s3fs.

    Raises:
      InputError: there is no client for its scheme.
    """
    scheme = path.split(SCHEME)[0]
    if scheme not in _CLIENTS:
        known = " or ".join(f"{name}://" for name in _CLIENTS)
        raise InputError(f"Expected {scheme}:// of {path} to be {known}.")
    try:
        return _opened(scheme, attempts, os.getpid())
    except ImportError:
        raise InputError(
            f"Expected a client for {scheme}:// of {path}: pip install "
            f"{_CLIENTS[scheme]}."
        ) from None


@functools.cache
def _opened(scheme: str, attempts: int, process: int) -> Any:
    del process  # a client does not survive a fork
    retries = {"total_max_attempts": attempts}
    config = {"connect_timeout": 3, "read_timeout": 30, "retries": retries}
    files = fsspec.filesystem(
        scheme,
        use_listings_cache=False,  # other processes write, too
        skip_instance_cache=True,  # which has one for each thread
        **({"config_kwargs": config} if scheme == "s3" else {}),
    )
    files.retries = 1  # on top of those
    return files


def ask(path: str, operation: Callable[[Any], Any]) -> Any:
    """Returns what a file system answers, after some retries.

    Args:
      path: Path of the object or folder.
      operation: Asks the file system that it is given.

    Raises:
      InputError: as `file_system`.
      OSError: the store refuses, or fails for too long.
    """
    files, bucket = file_system(path), path.split("/")[2]
    seconds = PATIENT_SECONDS if bucket in _answered else FIRST_SECONDS
    end, wait = time.monotonic() + seconds, _WAIT_SECONDS
    while True:
        try:
            found = operation(files)
            break
        except Exception as error:
            if not _may_pass(error) or time.monotonic() >= end:
                raise _plain(error, path) from None
        time.sleep(wait)
        wait *= 2
    _answered.add(bucket)
    return found


@contextlib.contextmanager
def _plain_errors(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _plain(error, path) from None


def _plain(error: Exception, path: str) -> OSError:
    """Returns an OSError that quotes only the path, and a type or code."""
    code = _code(error)
    if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
        return FileNotFoundError(errno.ENOENT, "no such object", path)
    if isinstance(error, FileExistsError):
        return FileExistsError(errno.EEXIST, "it exists", path)
    reason = f"the store answered {code or type(error).__name__}"
    return OSError(errno.EIO if _may_pass(error) else errno.EACCES, reason, path)


def _response(error: Exception) -> dict[str, Any]:
    """Returns the answer of S3 that an error was made of; else empty."""
    found = getattr(error.__cause__ or error, "response", None)
    return found if isinstance(found, dict) else {}


def _code(error: Exception) -> str:
    """Returns the code of an answer, such as 403 or AccessDenied; else empty."""
    code = getattr(error, "code", None) or _response(error).get("Error", {}).get("Code")
    text = str(code or "")
    return text if text.isalnum() and len(text) < 40 else ""


def _may_pass(error: Exception) -> bool:
    """Whether a retry may succeed: the store did not refuse the request."""
    refused = (
        FileNotFoundError, FileExistsError, PermissionError, ValueError, TypeError,
    )  # fmt: skip
    # Each client has its own types: NoCredentialsError, DefaultCredentialsError.
    if isinstance(error, refused) or "Credential" in type(error).__name__:
        return False
    if type(error) is OSError and error.errno is None:  # of gcsfs, status 403
        return False
    metadata = _response(error).get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", getattr(error, "code", None))  # of Google
    return not isinstance(status, int) or status >= 500 or status in _LATER


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
        file = file_system(path, _PART_ATTEMPTS).open(
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
