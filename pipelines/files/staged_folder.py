"""A folder that appears under its name complete, or not at all, by one process.

    OUT.unfinished.lock     locked by the process that works there
    OUT.unfinished/data/    becomes OUT

Formal guarantees:
  - One process at a time works for ``out``.  Of several at once one does the work, and
    each other one is refused.
  - ``out`` gets its name when all its files are on the disk, and replaces nothing.
  - Nothing but folders above is left after an error or a signal.  What a killed process
    left is removed by the next command, and nothing else: an OUT.unfinished of other
    origin is refused.
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
from pipelines.core.files.locks import locked_beside
from pipelines.files.folders import (
    make_private_folder,
    refuse_used,
    usable_folder,
)
from pipelines.files.stopping import on_signals
from pipelines.files.storage import flush_to_disk


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
            refuse_used(pathlib.Path(out))
            work.parent.mkdir(parents=True, exist_ok=True)
            # Ours has a lock beside it, from before it is made until it is removed.
            if os.path.lexists(work) and not os.path.lexists(f"{work}.lock"):
                raise InputError(
                    f"Expected {work} to be what an unfinished job left; it is "
                    "something else. Move it away, or name another --out."
                )
            held.enter_context(locked_beside(work))
            refuse_used(pathlib.Path(out))  # another process may have been faster
            shutil.rmtree(work, ignore_errors=True)
            make_private_folder(work, remedy="Name another --out.")
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
            raise InputError(
                f"Expected to be able to write --out {out}: "
                f"{error.strerror or type(error).__name__}. Make room or restore "
                "access, then give the same command again."
            ) from None


def _remove(folder: pathlib.Path) -> None:
    with on_signals(lambda _: None):  # a second one must not interrupt this
        shutil.rmtree(folder, ignore_errors=True)
