"""Outputs that a user names: files and folders that appear complete, or not at all.

A new folder OUT is made by one process, beside it:

    OUT.unfinished.lock     locked by the process that works there
    OUT.unfinished/data/    becomes OUT

One process at a time works for ``out``, and others are refused.  ``out`` gets its name
when all its files are on the disk, and replaces nothing.  Only this user may enter
OUT.unfinished, and ``out`` unless ``mode`` says otherwise.

After an error or a signal nothing is left but parent folders.  The next command
removes what a killed process left, and nothing else: an OUT.unfinished of other origin
is refused.

Sensitive: everything in OUT.unfinished.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from accounting.core.validation import InputError, check_local
from pipelines.core.files import local_files
from pipelines.core.files.locks import locked_beside
from pipelines.files import storage
from pipelines.files.processes import on_signals
from pipelines.files.storage import SCHEME, StrPath, absolute, flush_to_disk, is_remote

_WILDCARDS = "*?["


def make_private_folder(path: StrPath, *, follow: bool = True) -> None:
    """Makes a private folder, as the core does; a store has its own access rules.

    Args:
      path: The folder.
      follow: Whether it may be a link to a folder.

    Raises:
      InputError, OSError: as for `local_files.make_private_folder`.
    """
    if not is_remote(path):
        local_files.make_private_folder(path, follow=follow)


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
        reason, remedy = error.strerror or type(error).__name__, "Choose another."
        if is_remote(path):
            remedy = "Check its bucket, rights, credentials and endpoint."
        raise InputError(
            f"Expected {option} {path} to be a folder that can be used: {reason}. "
            f"{remedy}"
        ) from None


def check_folder(path: StrPath, option: str) -> None:
    """Refuses a path that cannot be a folder.

    Args:
      path: New or existing folder.
      option: Command-line option that named it.

    Raises:
      InputError: the path is below a file, its name is too long, or access is denied;
        in a store, the path has wildcards, or no name after the bucket's, or the store
        does not answer.
    """
    text = absolute(path)
    place = text.rpartition(SCHEME)[2]
    if is_remote(path) and ("/" not in place or set(_WILDCARDS) & set(text)):
        raise InputError(
            f"Expected {option} {text} to name a folder in a bucket, without any of "
            f"{' '.join(_WILDCARDS)}."
        )
    with usable_folder(path, option), contextlib.suppress(FileNotFoundError):
        storage.size(path)


def _refuse_used(path: pathlib.Path) -> None:
    """Refuses, by an InputError, a path with anything but an empty folder.

    A mount point is refused, too: it cannot be replaced at the end of the work.
    """
    is_free = False
    with contextlib.suppress(OSError):
        is_free = not os.path.lexists(path) or not any(path.iterdir())
    if not is_free or os.path.ismount(os.path.realpath(path)):
        raise InputError(
            f"Expected --out {path} to be a new or an empty folder, and no mount "
            "point. Choose another, or remove it."
        )


def check_new(
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    remedy: str = "Choose another, or remove it.",
) -> None:
    """Refuses a path that `output_file` would refuse, before any work.

    Args:
      out: As for `output_file`.
      overwrite: As for `output_file`.
      remedy: What to do, for the message.

    Raises:
      InputError: the path exists, or its folder does not.
    """
    check_local("--out", out)
    path = pathlib.Path(out)
    is_taken = path.is_dir() or (os.path.lexists(path) and not overwrite)
    if is_taken or not path.parent.is_dir():
        raise InputError(
            f"Expected --out {out} to be a new file in a folder that exists. {remedy}"
        )


@contextlib.contextmanager
def output_file(
    out: str | os.PathLike[str], *, overwrite: bool = False
) -> Iterator[Callable[[bytes], None]]:
    """Yields a function that writes to ``out``, visible when the context ends well.

    Args:
      out: New file in an existing folder of this machine.
      overwrite: Whether it may replace another file.

    Raises:
      InputError: ``out`` exists.
      OSError: the disk is full, access is denied, or there is no folder.
    """
    check_new(out, overwrite=overwrite)
    with local_files.new_file(os.fspath(out)) as write:
        yield write
        check_new(out, overwrite=overwrite)  # another process may have been faster


class Sink(io.RawIOBase):
    """A file that passes all bytes to a function, in order.

    Args:
      write: Takes all of the bytes that it is given.
    """

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        super().__init__()
        self._write, self._size = write, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        """Writes all of ``data``."""
        self._write(data)
        self._size += len(data)
        return len(data)


@contextlib.contextmanager
def staged_folder(
    out: str | os.PathLike[str], *, mode: int = 0o700
) -> Iterator[pathlib.Path]:
    """Yields a folder that becomes ``out``.

    Args:
      out: New or empty folder of this machine.
      mode: Permissions of the folder, before the umask.

    Raises:
      InputError: ``out`` is in use, cannot be made or cannot be written, or another
        process works for it.
    """
    check_local("--out", out)
    target = pathlib.Path(os.path.realpath(out))
    work = target.with_name(f"{target.name}.unfinished")
    with contextlib.ExitStack() as held:
        with usable_folder(out, "--out"):
            _refuse_used(pathlib.Path(out))
            work.parent.mkdir(parents=True, exist_ok=True)
            # Ours has a lock beside it, from before it is made until it is removed.
            if os.path.lexists(work) and not os.path.lexists(f"{work}.lock"):
                raise InputError(
                    f"Expected {work} to be what an unfinished job left; it is "
                    "something else. Move it away, or name another --out."
                )
            held.enter_context(locked_beside(work))
            _refuse_used(pathlib.Path(out))  # another process may have been faster
            shutil.rmtree(work, ignore_errors=True)
            make_private_folder(work)
        held.callback(_remove, work)
        try:
            data = work / "data"
            data.mkdir(mode)
            yield data
            for path in (*data.rglob("*"), data):
                flush_to_disk(path)
            os.rename(data, target)
            flush_to_disk(target.parent)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise InputError(
                f"Expected to be able to write --out {out}: {reason}."
            ) from None


def _remove(folder: pathlib.Path) -> None:
    with on_signals(lambda _: None):  # a second one must not interrupt this
        shutil.rmtree(folder, ignore_errors=True)
