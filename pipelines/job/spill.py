"""A shuffle through files: one per block, indexed by group.

The map step writes what a block sends to each group into one file, and the reduce step
reads its slices.  Memory then depends on the size of a block and of a group, never on
that of the data.  An engine that shuffles rows itself holds more: Beam's local runner
all that it groups, at about six times its size; Flink the values of a key; and Beam's
Java modules, between a Python worker and Flink or Spark, the output of a whole bundle,
which is a worker's share of the data.

    block-<ordinal>      num_groups + 1 offsets (int64), then the groups' bytes

Formal guarantees:
  - A file under its final name is complete; a resumed job reads it, not the block.
  - ``read_slice`` returns exactly the bytes that were written for a group.

Sensitive: everything; the folder is private and is removed when the job ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from pipelines.files.paths import StrPath, join
from pipelines.files.storage import new_file, slices

_OFFSET = np.dtype("<i8")
BLOCK_PREFIX = "block-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spill:
    """Where a shuffle goes through files.

    Attributes:
      folder: Made by the job, on this machine or where every worker reaches it.
      num_threads: Of map and reduce in each worker; with more than one, the names of
        files are emitted before the files are there.
      flush: Whether files must survive a loss of power.
    """

    folder: str
    num_threads: int = 1
    flush: bool = True


def spill_path(folder: StrPath, ordinal: int) -> str:
    """Returns the path of a block's file.

    Args:
      folder: Of the spill.
      ordinal: Of the block.
    """
    return join(folder, f"{BLOCK_PREFIX}{ordinal:09d}")


def write_spill(
    path: StrPath, sizes: Sequence[int], pieces: Iterable[bytes], *, flush: bool = True
) -> None:
    """Writes what a block sends to the groups, one group in memory at a time.

    Args:
      path: Final name of the file.
      sizes: Bytes of the piece of each group.
      pieces: The pieces of all groups, in order.
      flush: Whether a loss of power must not undo it.

    Raises:
      ValueError: a piece of another size.
      OSError: no room, no access, no folder.
    """
    starts = np.cumsum([(len(sizes) + 1) * _OFFSET.itemsize, *sizes], dtype=_OFFSET)
    with new_file(path, mode=0o600, flush=flush) as write:
        write(starts.tobytes())
        for size, piece in zip(sizes, pieces, strict=True):
            if len(piece) != size:
                raise ValueError(f"a piece has {len(piece)} bytes instead of {size}")
            write(piece)


def read_slice(path: StrPath, group: int) -> bytes:
    """Returns the piece of a group.

    Args:
      path: A file of ``write_spill``.
      group: Which group.

    Raises:
      OSError: the file is missing or too short.
    """
    with slices(path) as read:
        edges = read(group * _OFFSET.itemsize, 2 * _OFFSET.itemsize)
        start, end = np.frombuffer(edges, _OFFSET).tolist()
        return read(start, end - start)
