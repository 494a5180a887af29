"""A file that appears under its name complete, or not at all, by one process.

    .NAME.unfinished    beside it; locked by the process that writes it; becomes NAME

Formal guarantees:
  - One process at a time writes a file; another one is refused.
  - The file gets its name when it is on the disk.  Nothing is left after an error or a
    signal, and what a killed process left is taken over by the next.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import cast

from accounting.core.validation import InputError, check_local
from pipelines.core.files.local_files import names_full_disk
from pipelines.core.files.locks import lock_file


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
      InputError: it exists, or its folder does not.
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
      InputError: ``out`` exists, or another process writes it.
      OSError: no room, no access, or no folder.
    """
    check_local("--out", out)
    path = pathlib.Path(out)
    unfinished = path.with_name(f".{path.name}.unfinished")
    descriptor = lock_file(unfinished, path, mode=0o644)
    # Closing the file releases the lock.
    with names_full_disk(path), os.fdopen(descriptor, "wb") as file:
        try:
            if os.path.lexists(path) and not overwrite:
                raise InputError(f"Expected --out {path} to be new. Choose another.")
            file.truncate()
            # A buffered file writes all or raises.
            yield cast(Callable[[bytes], None], file.write)
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
