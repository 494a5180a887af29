"""One writer at a time: the locks of the core, and claims in stores.

Formal guarantees, beside those of ``pipelines.core.files.locks``:
  - A store has no locks: of the processes that ``claim`` a folder there, the last one
    keeps it, and the check of each other one raises.

Public: everything here.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from pipelines.core.files.locks import LOCK_NAME as LOCK_NAME
from pipelines.core.files.locks import in_use as in_use
from pipelines.core.files.locks import lock_file as lock_file
from pipelines.core.files.locks import locked as locked
from pipelines.core.files.locks import locked_beside as locked_beside
from pipelines.files import storage
from pipelines.files.paths import StrPath, is_remote, join


def claim(folder: StrPath, out: StrPath) -> Callable[[], None]:
    """Makes this process the owner of a folder in a store; does nothing for others.

    Args:
      folder: The folder; in a store it holds ``LOCK_NAME`` until the owner removes it.
      out: What the claim protects, for messages.

    Returns:
      A function that raises an InputError if another process has claimed the folder.
      One may still do so between this check and what follows.
    """
    if not is_remote(folder):
        return lambda: None
    path, name = join(folder, LOCK_NAME), os.urandom(16)
    storage.write_atomically(path, name, mode=0o600)

    def check() -> None:
        if not storage.exists(path) or storage.read_bytes(path) != name:
            raise in_use(out)

    return check
