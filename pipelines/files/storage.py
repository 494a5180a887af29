"""Files of this machine and of every store that Beam knows, through one interface.

A path with a scheme (``s3://``, ``gs://``, ``hdfs://``) is passed to ``stores``.  Any
other path is local or mounted, and needs no Beam.

Formal guarantees:
  - A file of ``new_file`` and ``write_atomically`` is visible under its final name
    complete or not at all.  Where the file system has folders, a temporary file is
    renamed; on this machine it is flushed to the disk first, unless ``flush`` is False.
    In an object store an object appears when its writing ends.  In S3 an object whose
    writing failed never appears; in other stores it is removed.
  - An error holds only the path, the operation and the type of the failure: messages of
    a store's client may quote addresses and credentials.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Any

from pipelines.core.files import local_files
from pipelines.core.files.local_files import drop_from_cache as drop_from_cache
from pipelines.files.paths import StrPath, is_remote

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


@functools.cache
def _stores() -> Any:
    """Returns the module for stores, which loads Beam: at the first path of a store."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # Beam warns of each cloud without a client
    try:
        from pipelines.files import stores
    finally:
        logging.disable(before)
    return stores


def use_options(options: PipelineOptions) -> None:
    """Lets the stores use Beam's ``options``, such as ``--s3_endpoint_url``."""
    _stores().use_options(options)


def check_client(path: str) -> None:
    """Refuses the path of a store whose client is not installed, by an InputError."""
    _stores().file_system(path)


def read_secret(version: str) -> bytes:
    """Returns a version of a secret of Google's Secret Manager.  Sensitive.

    Raises:
      OSError: no such secret, no access, or no client.
    """
    return _stores().read_secret(version)


def open_file(path: StrPath) -> IO[bytes]:
    """Returns ``path`` open for reading, with ``seek``.

    Raises:
      OSError: missing, or no access.
    """
    return _stores().open_file(os.fspath(path)) if is_remote(path) else open(path, "rb")


def _plain_errors(path: StrPath) -> AbstractContextManager[None]:
    """Makes errors of a store quote only the path, as those of the system do."""
    return (
        _stores().plain_errors(os.fspath(path))
        if is_remote(path)
        else contextlib.nullcontext()
    )


def read_bytes(path: StrPath, *, patient: bool = False) -> bytes:
    """Returns the contents of a file; raises as ``open_file`` does.

    Args:
      path: Path of the file.
      patient: Whether a store that fails is asked again for about a minute.
    """
    if is_remote(path):
        return _stores().read_bytes(os.fspath(path), patient=patient)
    with open_file(path) as file:
        return file.read()


@contextlib.contextmanager
def slices(path: StrPath) -> Iterator[Callable[[int, int], bytes]]:
    """Yields a function of (start, size) that reads exactly those bytes of a file.

    From ``gs://`` Beam fetches at least 16 MiB.

    Raises:
      OSError: missing, no access, or too short.
    """

    def read(start: int, size: int) -> bytes:
        with _plain_errors(path):
            raw.seek(start)
            parts, left = [], size
            while left and (part := raw.read(left)):  # it may return less
                parts.append(part)
                left -= len(part)
        if left:
            reason = f"{left} bytes are missing at {start}"
            raise OSError(errno.EIO, reason, os.fspath(path))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    with open_file(path) as file:
        raw: Any = getattr(file, "raw", file)  # Beam's and Python's buffers read ahead
        yield read


def range_reader(folder: StrPath) -> Callable[[str, int, int], bytes]:
    """Returns a thread-safe function of (path, start, size) for files of a folder.

    For a store it keeps the connections, and retries for about a minute, unless the
    store refused access.  It raises an OSError, as ``slices`` does.
    """
    return _stores().range_reader(os.fspath(folder)) if is_remote(folder) else _range


def _range(path: str, start: int, size: int) -> bytes:
    with slices(path) as read:
        return read(start, size)


def new_file(
    path: StrPath, *, mode: int = 0o644, flush: bool = True, cached: bool = True
) -> AbstractContextManager[Callable[[bytes], None]]:
    """Yields a function that writes to ``path``, visible when the context ends well.

    Args:
      path: Path in an existing folder; a file of that name is replaced.
      mode: Permissions on this machine; a store has its own access rules.
      flush: Whether the file must survive a loss of power.
      cached: Whether the page cache may keep the file once it is flushed.

    Raises:
      OSError: no room, no access, or no folder.
    """
    if is_remote(path):
        return _stores().new_file(os.fspath(path))
    return local_files.new_file(os.fspath(path), mode=mode, flush=flush, cached=cached)


def flush_to_disk(path: StrPath) -> None:
    """Makes a file or a folder of this machine survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def boot_id() -> str:
    """Returns the id of this boot; files that are not flushed belong to one."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return uuid.uuid4().hex


def write_atomically(path: StrPath, data: bytes, *, mode: int = 0o644) -> None:
    """Writes a whole file; other arguments, and errors, as for ``new_file``.

    Args:
      data: Contents of the file.
    """
    with new_file(path, mode=mode) as write:
        write(data)


def create(path: StrPath, data: bytes, *, mode: int = 0o644) -> bool:
    """Writes a whole file unless there is one; returns whether it did.

    Of several that create one file at once, one does, and the others return False; in a
    store other than S3 several may, of which the last one's file stays.  On this
    machine the file then survives a loss of power.  A store that fails is asked again
    for about a minute: where its first answer was lost, it may return False though the
    file is this one.

    Args:
      path: Path in an existing folder.
      data: Contents of the file.
      mode: Permissions on this machine.

    Raises:
      OSError: as ``new_file``, or a file system without hard links.
    """
    if is_remote(path):
        return _stores().create(os.fspath(path), data)
    whole = local_files.hidden_path(os.fspath(path))
    write_atomically(whole, data, mode=mode)
    try:
        os.link(whole, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(whole)
    flush_to_disk(os.path.dirname(os.path.abspath(path)))
    return True


def copy_to_store(source: StrPath, path: str) -> None:
    """Copies a file of this machine to the ``path`` of a store.

    A store that fails is asked again for about a minute, unless it refused access.

    Args:
      source: Path of the file on this machine.
      path: Its path in the store; in a store with folders, in an existing one.

    Raises:
      OSError: ``source`` cannot be read, or the store failed or refused access.
    """
    _stores().copy_to_store(os.fspath(source), path)


def exists(path: StrPath) -> bool:
    """Whether there is a file at ``path``, or a local folder."""
    return (
        _stores().exists(os.fspath(path)) if is_remote(path) else os.path.lexists(path)
    )


def is_folder(path: StrPath) -> bool:
    """Whether ``path`` is a folder; in an object store, whether it is not an object."""
    return (
        _stores().is_folder(os.fspath(path)) if is_remote(path) else os.path.isdir(path)
    )


def walk(
    folder: StrPath, enter: Callable[[tuple[str, ...]], bool]
) -> Iterator[tuple[str, ...]]:
    """Yields the path of every file below a folder, in parts.

    Args:
      folder: Local folder, where links are followed, or one in a store.
      enter: Path of a folder, in parts -> whether to enter it.  An object store has no
        folders and is listed as a whole.

    Raises:
      OSError: a folder cannot be listed, or is a link to one that it is in.
    """
    if is_remote(folder):
        return _stores().walk(os.fspath(folder), enter)
    return _walk_here(os.fspath(folder) or ".", (), enter, ())


_Id = tuple[int, int]


def _walk_here(
    folder: str,
    above: tuple[str, ...],
    enter: Callable[[tuple[str, ...]], bool],
    outside: tuple[_Id, ...],
) -> Iterator[tuple[str, ...]]:
    status = os.stat(folder)
    known = (status.st_dev, status.st_ino)
    if known in outside:
        reason = "it is a link to a folder that it is in"
        raise OSError(errno.ELOOP, reason, folder)
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries)
    for name, is_dir in found:
        names = (*above, name)
        if not is_dir:
            yield names
        elif enter(names):
            yield from _walk_here(f"{folder}/{name}", names, enter, (*outside, known))


def names(folder: StrPath) -> set[str]:
    """Returns the names directly in a folder; empty if there is no folder."""
    if is_remote(folder):
        return _stores().names(os.fspath(folder))
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def sizes(folder: StrPath) -> dict[str, int]:
    """Returns name -> bytes of the files directly in a folder; empty if there is none.

    Hadoop lists folders too, with 0 bytes.
    """
    if is_remote(folder):
        return _stores().sizes(os.fspath(folder))
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            # A worker may have removed a temporary file since.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
    return found


def size(path: StrPath) -> int | None:
    """Returns the bytes of a file, or None if there is none."""
    try:
        return (
            _stores().size(os.fspath(path))
            if is_remote(path)
            else os.stat(path).st_size
        )
    except FileNotFoundError:
        return None


def make_folder(path: StrPath) -> bool:
    """Makes a folder that only its owner may enter, if there is none.

    Returns:
      Whether it was made; False in an object store, which has no folders.
    """
    if is_remote(path):
        return _stores().make_folder(os.fspath(path))
    return local_files.make_folder(path)


def delete(path: StrPath) -> None:
    """Removes a file, if there is one."""
    if is_remote(path):
        _stores().delete(os.fspath(path))
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def delete_folder(path: StrPath) -> None:
    """Removes a folder with its contents, if there is one.

    In S3 also the unfinished uploads of killed writers, if the bucket's rules allow it.
    """
    if is_remote(path):
        _stores().delete_folder(os.fspath(path))
    else:
        shutil.rmtree(path, ignore_errors=True)
