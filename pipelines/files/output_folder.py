"""A folder that appears under its name complete, or not at all.

Formal guarantees:
  - ``check_output`` refuses a path that cannot become the folder, and leaves nothing
    behind.
  - ``staged_folder`` gives the folder its name when all its files are on the disk; an
    error or a signal leaves none of it.
  - Only this user may enter it, unless ``mode`` says otherwise.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

from accounting.validation import InputError
from pipelines.files.folders import usable_folder
from pipelines.files.stopping import on_signals


def check_output(out: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a folder that can be made or is empty.

    Raises:
      InputError: it is not empty, or it cannot be made.
    """
    path = pathlib.Path(out)
    try:
        is_free = not os.path.lexists(path) or not any(path.iterdir())
    except OSError:
        is_free = False
    if not is_free:
        raise InputError(
            f"Expected --out {path} to be a new or an empty folder. Choose another, or "
            "remove it."
        )
    with usable_folder(path, "--out"):
        _try_to_replace(_real(path))
    return path


def _try_to_replace(final: pathlib.Path) -> None:
    """Makes and renames empty folders as at the end of the work, and undoes it.

    Only a trial reveals permissions, mount points and limits of names before the work.
    """
    staged = _staged(final)
    if final.exists():
        os.rename(final, staged)
        os.rename(staged, final)
        return
    made = [staged, final]
    try:
        for parent in reversed(final.parents):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        staged.mkdir()
        os.rename(staged, final)
    finally:
        for folder in sorted(made, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):  # not made
                folder.rmdir()


def _real(path: pathlib.Path) -> pathlib.Path:
    """Returns the target of links; some path for a loop, which the system refuses."""
    return pathlib.Path(os.path.realpath(path))


def _staged(final: pathlib.Path) -> pathlib.Path:
    """Returns a free name beside ``final``, short even if its own is long."""
    return final.with_name(f".dpsgd-{secrets.token_hex(8)}")


def _flush_to_disk(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staged_folder(
    out: str | os.PathLike[str], *, mode: int = 0o700
) -> Iterator[pathlib.Path]:
    """Yields a temporary folder that becomes ``out``, or is removed after an error.

    Args:
      out: New or empty folder.
      mode: Permissions of the folder, before the umask.

    Raises:
      InputError: ``out`` is in use, or cannot be written.
    """
    path = check_output(out)
    final = _real(path)
    staged = _staged(final)
    try:
        staged.mkdir(mode, parents=True)
        yield staged
        for file in staged.rglob("*"):
            _flush_to_disk(file)
        os.rename(staged, final)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(
            f"Expected to be able to write --out {path}: {reason}. Make room or "
            "restore access, then give the same command again."
        ) from None
    finally:
        with on_signals(lambda _: None):  # a second signal must not interrupt this
            shutil.rmtree(staged, ignore_errors=True)
