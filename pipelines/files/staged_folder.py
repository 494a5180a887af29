"""A folder that appears under its name complete, or not at all, by one process.

    OUT.unfinished/lock     locked by the process that works there
    OUT.unfinished/data/    becomes OUT

Formal guarantees:
  - One process at a time works for ``out``.  Of several at once one does the work, and
    each other one is refused.
  - ``out`` gets its name when all its files are on the disk, and replaces nothing.
  - Nothing is left after an error or a signal.  What a killed process left is removed
    by the next command, and nothing else: an OUT.unfinished of other origin is refused.
  - Only this user may enter OUT.unfinished, and ``out`` unless ``mode`` says otherwise.

Sensitive: everything in OUT.unfinished.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from accounting.core.validation import InputError, check_local
from pipelines.core.files.locks import LOCK_NAME, in_use, locked
from pipelines.files.folders import (
    make_parents,
    make_private_folder,
    refuse_used,
    remove_empty,
    usable_folder,
)
from pipelines.files.stopping import on_signals
from pipelines.files.storage import flush_to_disk

DATA_NAME = "data"
#: What tells that a folder is ours; the second of a job that is resumed.
_OURS = {LOCK_NAME}
#: Processes that may remove the folder between its making and its locking.
_MOST_RIVALS = 100


@contextlib.contextmanager
def staged_folder(
    out: str | os.PathLike[str], *, mode: int = 0o700
) -> Iterator[pathlib.Path]:
    """Yields a folder that becomes ``out``; the one above it is for other files.

    Args:
      out: New or empty folder.
      mode: Permissions of the folder, before the umask.

    Raises:
      InputError: ``out`` is in use, cannot be made or cannot be written, or another
        process works for it.
    """
    with work_folder(out) as work, writable(out):
        clear(work)
        refuse_used(pathlib.Path(out))
        try:
            (work / DATA_NAME).mkdir(mode)
            yield work / DATA_NAME
            publish(work)
        finally:
            # A second signal must not interrupt this.
            with on_signals(lambda _: None), contextlib.suppress(OSError):
                clear(work)


@contextlib.contextmanager
def work_folder(out: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields OUT.unfinished, made and locked; it is removed if nothing stays in it.

    Args:
      out: Folder of this machine; new or empty, unless OUT.unfinished is there.

    Raises:
      InputError: ``out`` is in use or cannot be made, or another process works for it.
    """
    check_local("--out", out)
    work, made = work_path(out), list[pathlib.Path]()
    with contextlib.ExitStack() as held:
        held.callback(remove_empty, made)
        with usable_folder(out, "--out"):
            if not work.exists():
                refuse_used(pathlib.Path(out))
        for _ in range(_MOST_RIVALS):
            # Who had the folder removes it, at any moment until it is locked.
            with (
                usable_folder(out, "--out"),
                contextlib.suppress(FileNotFoundError),
            ):
                make_parents(work, made)
                _check_origin(work)
                made.append(work)
                make_private_folder(work, remedy="Name another --out.")
                held.enter_context(locked(work, out))
                break
        else:
            raise in_use(out)
        yield work


def work_path(out: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of OUT.unfinished."""
    return pathlib.Path(f"{os.path.realpath(out)}.unfinished")


def _check_origin(work: pathlib.Path) -> None:
    """Refuses a folder that no command can have left."""
    names = set(os.listdir(work)) if work.is_dir() else {work.name}
    if os.path.lexists(work) and names and not names & _OURS:
        raise InputError(
            f"Expected {work} to be what an unfinished job left; it is something else. "
            "Move it away, or name another --out."
        )


def clear(work: pathlib.Path, but: tuple[str, ...] = ()) -> None:
    """Removes everything from OUT.unfinished except the lock.

    Args:
      work: The folder.
      but: Names of further files that stay.
    """
    for name in sorted(set(os.listdir(work)) - {LOCK_NAME, *but}):
        path = work / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def publish(work: pathlib.Path) -> None:
    """Gives the data its name, once all is on the disk."""
    data = work / DATA_NAME
    for path in data.rglob(".*"):  # a killed process was writing it
        path.unlink()
    for path in (*data.rglob("*"), data):
        flush_to_disk(path)
    os.rename(data, str(work).removesuffix(".unfinished"))
    flush_to_disk(work.parent)


@contextlib.contextmanager
def writable(out: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an OSError into an InputError with a remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(
            f"Expected to be able to write --out {out}: {reason}. Make room or "
            "restore access, then give the same command again."
        ) from None
