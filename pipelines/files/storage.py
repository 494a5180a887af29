"""Files of this machine and of every store that Beam knows, through one small door.

A path with a scheme (``s3://``, ``gs://``, ``hdfs://``) is a store's and goes through
Beam's ``FileSystems``; any other is this machine's, or mounted on it, and goes through
the operating system, without Beam.

Formal guarantees:
  - What ``new_file`` and ``write_atomically`` write is visible under its final name
    complete or not at all.  Where the file system has folders that is a rename of a
    temporary file (and, on this machine, a flush to the disk before it, unless the
    caller does without); in an object store an object appears when its writing ends,
    and a write that failed is removed.
  - No error holds anything but the path, the operation and the type of what went wrong:
    messages of a store's client may quote addresses and credentials.
  - After ``make_private_folder`` only its owner, who runs this, may enter a folder of
    this machine, whatever it was before.

References:
  Strong consistency of what was written: Amazon S3 since 2020-12, Google Cloud Storage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

from accounting.validation import InputError

StrPath = str | os.PathLike[str]

_SCHEME = "://"
_WILDCARDS = "*?["
#: What has to be installed beside Beam for a scheme.
_EXTRAS = {"s3": "aws", "gs": "gcp", "hdfs": "hadoop", "azfs": "azure"}


def is_remote(path: StrPath) -> bool:
    """Whether ``path`` is a store's."""
    return _SCHEME in os.fspath(path)


def absolute(path: StrPath) -> str:
    """Returns ``path`` as every process of this machine understands it."""
    text = os.fspath(path)
    return text.rstrip("/") if is_remote(text) else os.path.abspath(text)


def join(folder: StrPath, *names: str) -> str:
    """Returns the path of something in ``folder``."""
    if is_remote(folder):
        return "/".join([os.fspath(folder).rstrip("/"), *names])
    return os.path.join(folder, *names)


def use_options(options: Any) -> None:
    """Lets the stores use Beam's ``options``, such as ``--s3_endpoint_url``."""
    from apache_beam.io.filesystems import FileSystems

    FileSystems.set_options(options)


def _file_systems() -> Any:
    """Beam's door to the stores, with options where nobody has given any."""
    from apache_beam.io.filesystems import FileSystems
    from apache_beam.options.pipeline_options import PipelineOptions
    from apache_beam.options.value_provider import RuntimeValueProvider

    # A worker's options arrive as runtime options and must win.
    if not (FileSystems._pipeline_options or RuntimeValueProvider.runtime_options):
        FileSystems.set_options(PipelineOptions([]))
    return FileSystems


def _file_system(path: str) -> Any:
    try:
        return _file_systems().get_filesystem(path)
    except ValueError:
        scheme = path.split(_SCHEME)[0]
        extra = _EXTRAS.get(scheme)
        remedy = f"pip install 'apache-beam[{extra}]'" if extra else "see Beam's list"
        raise InputError(
            f"Expected {scheme}:// of {path} to be a file system that Beam has here: "
            f"{remedy}."
        ) from None


@contextlib.contextmanager
def _plain_errors(path: str) -> Iterator[None]:
    """Turns what a store's client raises into an OSError that quotes nothing."""
    try:
        yield
    except (InputError, FileNotFoundError):
        raise
    except Exception as error:
        code = getattr(error, "code", "")
        reason = f"the store answered {type(error).__name__} {code}".strip()
        raise OSError(errno.EIO, reason, path) from None


def open_file(path: StrPath) -> IO[bytes]:
    """Returns ``path`` open for reading, with ``seek``.

    Raises:
      OSError: missing, or refused.
    """
    if not is_remote(path):
        return open(path, "rb")
    from apache_beam.io.filesystem import CompressionTypes

    name = os.fspath(path)
    with _plain_errors(name):
        try:
            return _file_system(name).open(
                name, compression_type=CompressionTypes.UNCOMPRESSED
            )
        except Exception:
            if not _file_system(name).exists(name):
                raise FileNotFoundError(errno.ENOENT, "no such object", name) from None
            raise


def read_bytes(path: StrPath) -> bytes:
    """Returns the contents of a file.

    Raises:
      OSError: missing, or refused.
    """
    with open_file(path) as file, _plain_errors(os.fspath(path)):
        return file.read()


class FileBuffer:
    """Memory that holds one file after another, as large as the largest of them.

    New memory for each file would cost more than reading it: the kernel has to find and
    to clear every page.

    Args:
      cached: Whether what was read may stay in this machine's memory.
    """

    def __init__(self, *, cached: bool = True) -> None:
        self._cached = cached
        self._memory = memoryview(b"")

    def read(self, path: StrPath) -> memoryview:
        """Returns the contents of a file, valid until the next call.

        Raises:
          OSError: missing, or refused.
        """
        if is_remote(path):
            return memoryview(read_bytes(path))
        with open(path, "rb", buffering=0) as file:
            size, filled = os.fstat(file.fileno()).st_size, 0
            if size > len(self._memory):
                self._memory = memoryview(b"")  # before there are two
                self._memory = memoryview(bytearray(size))
            while part := file.readinto(self._memory[filled:size]):  # may read less
                filled += part
            if not self._cached:
                _drop_from_cache(file.fileno())
        return self._memory[:filled]


def read_secret(version: str) -> bytes:
    """Returns a version of a secret of Google's Secret Manager.  Sensitive.

    Raises:
      OSError: no such secret, no access, or no client.
    """
    from apache_beam.utils.secret import GcpSecret

    with _plain_errors(version):
        return GcpSecret(version).get_secret_bytes()


@contextlib.contextmanager
def slices(path: StrPath) -> Iterator[Callable[[int, int], bytes]]:
    """Yields what reads (start, size) of a file, without reading more than that.

    In ``gs://`` Beam reads 16 MiB at least.

    Raises:
      OSError: missing, refused, or too short.
    """
    name = os.fspath(path)

    def read(start: int, size: int) -> bytes:
        with _plain_errors(name):
            raw.seek(start)
            parts, left = [], size
            while left and (part := raw.read(left)):  # it may return less
                parts.append(part)
                left -= len(part)
        if left:
            raise OSError(errno.EIO, f"{left} bytes are missing at {start}", name)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    with open_file(path) as file:
        raw: Any = getattr(file, "raw", file)  # Beam's and Python's buffers read ahead
        yield read


@contextlib.contextmanager
def new_file(
    path: StrPath, *, mode: int = 0o644, flush: bool = True, cached: bool = True
) -> Iterator[Callable[[bytes], None]]:
    """Yields what writes to ``path``, visible when the context ends without an error.

    Args:
      path: In a folder that is there; a file of that name is replaced.
      mode: Permissions on this machine; a store has its own rules of access.
      flush: Whether a loss of power must not undo it.
      cached: Whether it may fill this machine's memory once it is flushed.

    Raises:
      OSError: no room, no access, no folder.
    """
    if is_remote(path):
        with _new_remote(os.fspath(path)) as write:
            yield write
        return
    temporary = _hidden(os.fspath(path))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # A buffered file writes all or raises.
            yield cast(Callable[[bytes], None], file.write)
            if flush:
                file.flush()
                os.fsync(file.fileno())
                if not cached:
                    _drop_from_cache(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _drop_from_cache(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice alone
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _hidden(path: str) -> str:
    """A name beside ``path`` that nobody else uses."""
    folder, name = path.rsplit("/", 1) if "/" in path else (".", path)
    return f"{folder}/.{name}.{secrets.token_hex(8)}"


def write_atomically(path: StrPath, data: bytes, *, mode: int = 0o644) -> None:
    """Writes ``data`` to ``path``, as ``new_file`` does.

    Raises:
      OSError: no room, no access, no folder.
    """
    with new_file(path, mode=mode) as write:
        write(data)


@contextlib.contextmanager
def _new_remote(path: str) -> Iterator[Callable[[bytes], None]]:
    with _plain_errors(path):
        files = _file_system(path)
        target = _hidden(path) if files.has_dirs() else path
    with _create_remote(files, target) as write:
        yield write
    if target == path:
        return
    with _plain_errors(path):
        if files.exists(path):  # a rename on Hadoop replaces nothing
            files.delete([path])
        files.rename([target], [path])


@contextlib.contextmanager
def _create_remote(files: Any, path: str) -> Iterator[Callable[[bytes], None]]:
    from apache_beam.io.filesystem import CompressionTypes

    def write(data: bytes) -> None:
        with _plain_errors(path):
            file.write(data)

    with _plain_errors(path):
        file = files.create(path, compression_type=CompressionTypes.UNCOMPRESSED)
    try:
        yield write
    except BaseException:
        # Closing, now or by the garbage collector, may publish what was written so far.
        for undo in (file.close, lambda: files.delete([path])):
            with contextlib.suppress(Exception):
                undo()
        raise
    with _plain_errors(path):
        file.close()


def exists(path: StrPath) -> bool:
    """Whether there is a file at ``path``; of folders only this machine's."""
    if not is_remote(path):
        return os.path.lexists(path)
    with _plain_errors(os.fspath(path)):
        return _file_system(os.fspath(path)).exists(os.fspath(path))


def is_folder(path: StrPath) -> bool:
    """Whether ``path`` is a folder; in an object store, whether it is no object."""
    name = os.fspath(path)
    if not is_remote(name):
        return os.path.isdir(name)
    with _plain_errors(name):
        files = _file_system(name)
        if name.endswith("/") or not files.exists(name):
            return not files.has_dirs() or files.exists(absolute(name))
    return files.has_dirs() and _children(name) is not None


def walk(
    folder: StrPath, enter: Callable[[tuple[str, ...]], bool]
) -> Iterator[tuple[str, ...]]:
    """Yields the path of every file below a folder, in parts.

    Args:
      folder: Here, where links are followed, or in a store.
      enter: Whether to look into a folder, by its path in parts.  An object store has
        no folders and is listed as a whole.

    Raises:
      OSError: a folder cannot be listed, or is a link to one that it is in.
    """
    if not is_remote(folder):
        return _walk_here(os.fspath(folder) or ".", (), enter, ())
    root = absolute(folder)
    if _file_system(root).has_dirs():
        return _walk_store(root, _children(root) or [], (), enter)
    paths = (tuple(path.split("/")) for path in _listing(root))
    return (names for names in paths if names[-1])  # some tools make objects "folder/"


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


def _walk_store(
    folder: str,
    children: list[Any],
    above: tuple[str, ...],
    enter: Callable[[tuple[str, ...]], bool],
) -> Iterator[tuple[str, ...]]:
    for metadata in children:
        path = metadata.path
        names = (*above, path.removeprefix(f"{folder}/"))
        # A folder has 0 bytes, and so has an empty file.
        below = None if metadata.size_in_bytes else _children(path)
        if below is None:
            yield names
        elif enter(names):
            yield from _walk_store(path, below, names, enter)


def _children(folder: str) -> list[Any] | None:
    """What is directly in a folder of a store with folders; None if it is a file."""
    if any(character in folder for character in _WILDCARDS):
        raise OSError(errno.EINVAL, "its name holds a wildcard", folder)
    try:
        with _plain_errors(folder):
            return _file_system(folder).match([f"{folder}/*"])[0].metadata_list
    except OSError:
        open_file(folder).close()  # a folder, which could not be listed, cannot be read
        return None


def _listing(folder: str) -> dict[str, int]:
    """Path below a store's folder -> size, at any depth where there are no folders."""
    with _plain_errors(folder):
        files = _file_system(folder)
        if files.has_dirs() and not files.exists(folder):
            return {}
        found = files.match([f"{folder}/**"])[0].metadata_list
    return {
        metadata.path.removeprefix(f"{folder}/"): metadata.size_in_bytes
        for metadata in found
    }


def names(folder: StrPath) -> set[str]:
    """Returns the names directly in a folder; none where there is no folder."""
    if is_remote(folder):
        return {path.split("/")[0] for path in _listing(absolute(folder))}
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def sizes(folder: StrPath) -> dict[str, int]:
    """Returns name -> bytes of the files directly in a folder, as ``names`` does.

    Hadoop lists folders too, with 0 bytes.
    """
    if is_remote(folder):
        listing = _listing(absolute(folder))
        return {path: size for path, size in listing.items() if "/" not in path}
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            # A temporary file of a worker may be gone by now.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
    return found


def size(path: StrPath) -> int | None:
    """Returns the bytes of a file, or None where there is none."""
    try:
        if not is_remote(path):
            return os.stat(path).st_size
        with _plain_errors(os.fspath(path)):
            files = _file_system(os.fspath(path))
            return files.size(os.fspath(path)) if exists(path) else None
    except FileNotFoundError:
        return None


def make_folder(path: StrPath) -> bool:
    """Makes a folder that its owner alone may enter, where a file system has folders.

    A folder that is there already stays as it is.

    Returns:
      Whether it was made.
    """
    if not is_remote(path):
        parent = os.path.dirname(os.path.abspath(path))
        os.makedirs(parent, exist_ok=True)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return False
        return True
    name = os.fspath(path)
    with _plain_errors(name):
        files = _file_system(name)
        new = files.has_dirs() and not files.exists(name)
        if new:
            files.mkdirs(name)
        return new


def make_private_folder(path: StrPath, *, follow: bool = True, remedy: str) -> None:
    """Makes a folder that this user alone may enter, or closes one that is there.

    Args:
      path: The folder; in a store, its own rules of access guard it.
      follow: Whether it may be a link to a folder.
      remedy: What to do where this cannot be.

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
    """Says in one line why the system cannot use a folder that the user named.

    Args:
      path: The folder.
      option: How it was named.

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


def delete(path: StrPath) -> None:
    """Removes a file; nothing happens where there is none."""
    if not is_remote(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    elif exists(path):
        with _plain_errors(os.fspath(path)):
            _file_system(os.fspath(path)).delete([os.fspath(path)])


def delete_folder(path: StrPath) -> None:
    """Removes a folder with all that is in it; nothing happens where there is none."""
    if not is_remote(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    name = absolute(path)
    with _plain_errors(name):
        files = _file_system(name)
        if not files.has_dirs():
            objects = [f"{name}/{path}" for path in _listing(name)]
            if objects:
                files.delete(objects)
        elif files.exists(name):
            files.delete([name])


def check_folder(path: StrPath, option: str) -> None:
    """Refuses what cannot be a folder: here, or in a store, where a listing errs.

    Args:
      path: New, or there.
      option: How the user named it.

    Raises:
      InputError: below a file, too long a name or no access; in a store, wildcards, or
        no name beside the bucket's.
    """
    if not is_remote(path):
        with usable_folder(path, option), contextlib.suppress(FileNotFoundError):
            os.stat(path)
        return
    text = absolute(path)
    place = text.split(_SCHEME, 1)[1]
    if "/" not in place or any(character in text for character in _WILDCARDS):
        raise InputError(
            f"Expected {option} {text} to name a folder in a bucket, without any of "
            f"{' '.join(_WILDCARDS)}."
        )
    _file_system(text)  # is its client here?
