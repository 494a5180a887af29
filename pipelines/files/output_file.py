"""A new file that appears under its name complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator

from accounting.core.validation import InputError, check_local
from pipelines.core.files.local_files import new_file


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
      InputError: ``out`` exists.
      OSError: no room, no access, or no folder.
    """
    check_new(out, overwrite=overwrite)
    with new_file(os.fspath(out)) as write:
        yield write
        check_new(out, overwrite=overwrite)  # another process may have been faster
