"""The shuffle of the local runner, through files: one per block, indexed by group.

Beam's local runner holds a GroupByKey in memory, at about six times its size.  Here the
map step writes what a block sends to each group into one file, Beam groups the names of
the blocks, and the reduce step reads its slices.  Memory then depends on the size of a
block and of a group, never on that of the data.

    block-<ordinal>      num_groups + 1 offsets (int64), then the groups' bytes

Formal guarantees:
  - A file under its final name is complete; a resumed job reads it, not the block.
  - ``read_slice`` returns exactly the bytes that were written for a group.

Sensitive: everything; the folder is private and is removed when the job ends.
"""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Iterable

import numpy as np

_OFFSET = np.dtype("<i8")


def spill_path(folder: str, ordinal: int) -> pathlib.Path:
    """Where the block with this ordinal is spilled."""
    return pathlib.Path(folder) / f"block-{ordinal:09d}"


def write_spill(
    path: pathlib.Path, pieces: Iterable[tuple[int, bytes]], num_groups: int
) -> None:
    """Writes the bytes of some of ``range(num_groups)``, one group in memory at a time.

    Args:
      path: Final name of the file.
      pieces: (group, bytes), by ascending group.
      num_groups: Groups that the index has room for.
    """
    sizes = np.zeros(num_groups + 1, _OFFSET)
    sizes[0] = sizes.nbytes
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(sizes.nbytes))
            for group, data in pieces:
                sizes[group + 1] = len(data)
                file.write(data)
            file.seek(0)
            file.write(np.cumsum(sizes).tobytes())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_slice(path: pathlib.Path, group: int) -> bytes:
    """Returns what ``write_spill`` was given for ``group``."""
    with open(path, "rb", buffering=0) as file:
        edges = os.pread(file.fileno(), 2 * _OFFSET.itemsize, group * _OFFSET.itemsize)
        start, end = np.frombuffer(edges, _OFFSET)
        data = os.pread(file.fileno(), end - start, start)
    if len(data) != end - start:
        raise OSError(f"{path.name} ends before group {group}")
    return data
