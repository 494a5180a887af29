"""A folder that appears under its name complete, or not at all.

Formal guarantees:
  - ``check_output`` refuses what cannot become the folder, and leaves nothing behind.
  - ``staged_folder`` gives the folder its name when all its files are on the disk; an
    error or a stop by a signal leaves none of it.
  - On this machine nobody but this user may enter it, unless ``mode`` says otherwise.
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
    """Returns the path of a folder that can be made, or that is empty.

    Raises:
      InputError: there is something already, or the system does not let it be made.
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
    """Does with empty folders what ends the work, and undoes it.

    Nothing else tells beforehand of rights, mount points and limits of names alike.

    Raises:
      OSError: it cannot be done.
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
            with contextlib.suppress(OSError):  # those that were not made
                folder.rmdir()


def _real(path: pathlib.Path) -> pathlib.Path:
    """Where links lead to; of a loop, which the system will refuse, some path."""
    return pathlib.Path(os.path.realpath(path))


def _staged(final: pathlib.Path) -> pathlib.Path:
    """A name beside ``final`` that nobody else uses, whatever the length of its own."""
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
    """Gives a temporary folder that becomes ``out``, or goes, when the context ends.

    Args:
      out: A new or empty folder.
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
        with on_signals(lambda _: None):  # a second signal finds it done
            shutil.rmtree(staged, ignore_errors=True)
