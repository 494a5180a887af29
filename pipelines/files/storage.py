"""Paths and files of this machine and of object stores, through one interface.

A path with a scheme (``s3://``, ``gs://``) is passed to ``stores``.  Any other path is
local or mounted, and needs no client.

A file of `new_file` and `write_atomically` is visible under its final name complete or
not at all.  On this machine a temporary file is flushed to the disk, unless ``flush``
is False, and renamed; in a store nothing is renamed.

Every function raises an OSError where there is no room, no access, or no answer.  An
error of a store holds only the path and the type of the failure.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import IO, Any

from pipelines.core.files import local_files
from pipelines.core.files.local_files import StrPath as StrPath
from pipelines.core.files.local_files import pretty_json as pretty_json

SCHEME = "://"


def is_remote(path: StrPath) -> bool:
    """Whether ``path`` is in a store."""
    return SCHEME in os.fspath(path)


def absolute(path: StrPath) -> str:
    """Returns the absolute path; that of a store without slashes at its end."""
    text = os.fspath(path)
    return text.rstrip("/") if is_remote(text) else os.path.abspath(text)


def join(folder: StrPath, *names: str) -> str:
    """Returns the path of a file or folder in a folder.

    Args:
      folder: Folder, local or in a store.
      *names: Names of the folders below it, and of the file.
    """
    if is_remote(folder):
        return "/".join([os.fspath(folder).rstrip("/"), *names])
    return os.path.join(folder, *names)


def _stores() -> Any:
    """Returns the module for stores, whose clients take half a second to load."""
    from pipelines.files import stores

    return stores


def _ask(path: StrPath, operation: Callable[[Any], Any]) -> Any:
    """Returns what the file system of a store answers; see ``stores.ask``."""
    return _stores().ask(os.fspath(path), operation)


def _entries(folder: StrPath) -> list[dict[str, Any]]:
    root = absolute(folder)
    with contextlib.suppress(FileNotFoundError):
        return _ask(root, lambda files: files.ls(root, detail=True))
    return []


def _name(entry: dict[str, Any]) -> str:
    return entry["name"].rstrip("/").rpartition("/")[2]


def open_file(path: StrPath) -> IO[bytes]:
    """Returns ``path`` open for reading, with ``seek``."""
    if is_remote(path):
        return _stores().open_object(os.fspath(path))
    return open(path, "rb")


def read_bytes(path: StrPath) -> bytes:
    """Returns the contents of a file."""
    if is_remote(path):
        return _ask(path, lambda files: files.cat_file(path))
    with open(path, "rb") as file:
        return file.read()


def read_range(path: StrPath, start: int, size: int) -> bytes:
    """Returns exactly some bytes of a file; from a store by one request.

    Args:
      path: Path of the file.
      start: First byte.
      size: Number of bytes.

    Raises:
      OSError: as for all functions here, or the file is too short.
    """
    if is_remote(path):
        data = _stores().read_range(os.fspath(path), start, size)
    else:
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(size)
    if len(data) != size:
        reason = f"{size - len(data)} bytes are missing at {start}"
        raise OSError(errno.EIO, reason, os.fspath(path))
    return data


def new_file(
    path: StrPath, *, mode: int = 0o644, flush: bool = True, cached: bool = True
) -> AbstractContextManager[Callable[[bytes], None]]:
    """Yields a function that writes to ``path``, visible when the context ends well.

    Args:
      path: Path in an existing folder; a file of that name is replaced.
      mode: Permissions on this machine; a store has its own access rules.
      flush: Whether the file must survive a loss of power.
      cached: Whether the page cache may keep the file once it is flushed.
    """
    if is_remote(path):
        return _stores().new_object(os.fspath(path))
    return local_files.new_file(os.fspath(path), mode=mode, flush=flush, cached=cached)


def write_atomically(path: StrPath, data: bytes, *, mode: int = 0o644) -> None:
    """Writes a whole file.

    Args:
      path: Path in an existing folder; a file of that name is replaced.
      data: Contents of the file.
      mode: Permissions on this machine; a store has its own access rules.
    """
    if is_remote(path):
        _ask(path, lambda files: files.pipe_file(path, bytes(data)))
    else:
        local_files.write_atomically(path, data, mode=mode)


def create(path: StrPath, data: bytes, *, mode: int = 0o644) -> bool:
    """Writes a whole file unless there is one; returns whether it did.

    Of several that create one file at once, one does, and the others return False.  On
    this machine the file then survives a loss of power.  A store whose answer was lost
    is asked again, and may return False though the file is this one.

    Args:
      path: Path in an existing folder.
      data: Contents of the file.
      mode: Permissions on this machine.

    Raises:
      OSError: as for all functions here, or the file system has no hard links.
    """
    if is_remote(path):
        try:
            _ask(path, lambda files: files.pipe_file(path, bytes(data), mode="create"))
        except FileExistsError:
            return False
        return True
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

    Args:
      source: Path of the file on this machine.
      path: Its path in the store.
    """
    _ask(path, lambda files: files.put_file(source, path))


def flush_to_disk(path: StrPath) -> None:
    """Makes a file or a folder of this machine survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exists(path: StrPath) -> bool:
    """Whether there is a file at ``path``, or a local folder."""
    return size(path) is not None if is_remote(path) else os.path.lexists(path)


def is_folder(path: StrPath) -> bool:
    """Whether ``path`` is a folder; in a store, whether it is not an object."""
    if is_remote(path):
        return os.fspath(path).endswith("/") or not exists(path)
    return os.path.isdir(path)


def walk(
    folder: StrPath, enter: Callable[[str], bool] = lambda _: True
) -> Iterator[str]:
    """Yields the path below a folder of every file below it.

    Args:
      folder: Local folder, where links are followed, or one in a store.
      enter: Path of a folder below it -> whether to enter it.  A store has no folders
        and is listed as a whole.

    Raises:
      OSError: as for all functions here, or links lead into a circle.
    """
    if is_remote(folder):
        root = absolute(folder)
        start = len(root.split(SCHEME)[1]) + 1
        found = _ask(root, lambda files: files.find(root))
        # As some tools mark a folder.
        yield from (path[start:] for path in found if not path.endswith("/"))
        return
    root = os.path.join(os.fspath(folder) or ".", "")

    def refuse(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        above = os.path.join(place, "")[len(root) :]
        yield from (above + name for name in files)
        folders[:] = [name for name in folders if enter(above + name)]
        for path in (os.path.join(place, name) for name in folders):
            real = os.path.join(os.path.realpath(path), "")
            if os.path.join(os.path.realpath(place), "").startswith(real):
                reason = "it is a link to a folder that it is in"
                raise OSError(errno.ELOOP, reason, path)


def names(folder: StrPath) -> set[str]:
    """Returns the names directly in a folder; empty if there is no folder."""
    if is_remote(folder):
        return set(map(_name, _entries(folder)))
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir(folder))
    return set()


def sizes(folder: StrPath) -> dict[str, int]:
    """Returns name -> bytes of the files directly in a folder; empty without one."""
    if is_remote(folder):
        found = [one for one in _entries(folder) if one["type"] == "file"]
        return {_name(one): one["size"] for one in found}
    files = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            # A worker may have removed a temporary file since.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    files[entry.name] = entry.stat().st_size
    return files


def size(path: StrPath) -> int | None:
    """Returns the bytes of a file, or None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            entry = _ask(path, lambda files: files.info(path))
            return entry["size"] if entry["type"] == "file" else None
        return os.stat(path).st_size
    return None


def make_folder(path: StrPath) -> None:
    """Makes a folder that only its owner may enter, if there is none.

    A store has no folders.
    """
    if not is_remote(path):
        local_files.make_folder(path)


def delete(path: StrPath) -> None:
    """Removes a file, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        if is_remote(path):
            _ask(path, lambda files: files.rm_file(path))
        else:
            os.unlink(path)


def delete_folder(path: StrPath) -> None:
    """Removes a folder with its contents, if there is one."""
    if not is_remote(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    root = absolute(path)
    with contextlib.suppress(FileNotFoundError):
        _ask(root, lambda files: files.rm(root, recursive=True))


def read_json(path: StrPath, *, remedy: str = "") -> Any:
    """Returns the JSON value in a file.

    Args:
      path: Path of the file.
      remedy: What the user can do if it is missing.

    Raises:
      InputError: missing, no access, or not JSON.
    """
    return local_files.read_json(path, remedy=remedy, read=read_bytes)
