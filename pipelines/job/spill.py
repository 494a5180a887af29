"""Rows between map and reduce, in files that are indexed by units of steps.

The map step writes the pieces of some blocks for each unit into one file, and the
reduce step reads its slices.  Memory then depends on the size of a block and of a
slice, never on that of the data.

    block-<ordinal>       ordinal of its first block; holds an index, then the slices
    index                 num_slices + 1 offsets (int64)

A reader makes one request for each file and unit, and a store answers it in tens of
milliseconds: few large requests are fastest, so that blocks share files.  Every block
is in one file; how many share a file depends only on the layout and on the row groups,
never on the engine.  Once the index of a file has been read, a slice is one request.

A file under its final name is complete; a resumed job reads it, not the blocks.
`read_slice` and `SliceReader` return exactly the bytes that were written.

Sensitive: rows; the folder is private and is removed when the job ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from pipelines.core.batches.manifest import row_bytes
from pipelines.files.storage import StrPath, is_remote, join, new_file, read_range, size
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job.packing import OVERHEAD_BYTES, Layout

#: Usual and maximum bytes of a file, unless one block has more.  A worker holds about
#: three times as many.
_USUAL_FILE_BYTES, _MOST_FILE_BYTES = 128 << 20, 512 << 20
#: Bytes of a request to a store, where the maximum permits.
_LEAST_READ = 64 << 10
#: Minimum number of files of the map step, if there are as many blocks, to keep workers
#: busy.
_LEAST_FILES = 64


_OFFSET = np.dtype("<i8")
BLOCK_PREFIX = "block-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spill:
    """Where rows wait between map and reduce.

    Attributes:
      folder: Existing folder, on this machine or where every worker reaches it.
      num_threads: Number of threads of map and reduce in each worker; with more than
        one, the names of files are emitted before the files are there.
      flush: Whether files must survive a loss of power.
      blocks_per_file: Number of consecutive blocks in a file: one, as on a disk of this
        machine, or more.
    """

    folder: str
    num_threads: int = 1
    flush: bool = True
    blocks_per_file: int = 1


def spill_path(folder: StrPath, ordinal: int) -> str:
    """Returns the path of a file of the map step.

    Args:
      folder: Folder of the spill.
      ordinal: Ordinal of its first block.
    """
    return join(folder, f"{BLOCK_PREFIX}{ordinal:09d}")


def write_spill(
    path: StrPath, sizes: Sequence[int], pieces: Iterable[bytes], *, flush: bool = True
) -> None:
    """Writes a file, one slice in memory at a time.

    Args:
      path: Final name of the file.
      sizes: Bytes of each slice.
      pieces: The slices, in order.
      flush: Whether the file must survive a loss of power.

    Raises:
      ValueError: a piece of another size.
      OSError: the disk is full, access is denied, or there is no folder.
    """
    starts = np.cumsum([(len(sizes) + 1) * _OFFSET.itemsize, *sizes], dtype=_OFFSET)
    with new_file(path, mode=0o600, flush=flush) as write:
        write(starts.tobytes())
        for size, piece in zip(sizes, pieces, strict=True):
            if len(piece) != size:
                raise ValueError(f"a piece has {len(piece)} bytes instead of {size}")
            write(piece)


def is_written(path: StrPath) -> bool:
    """Whether there is a file that ends where its index says."""
    found = size(path)
    if not found:
        return False
    (index_bytes,) = np.frombuffer(read_range(path, 0, _OFFSET.itemsize), _OFFSET)
    last = read_range(path, int(index_bytes) - _OFFSET.itemsize, _OFFSET.itemsize)
    return np.frombuffer(last, _OFFSET).item() == found


class SliceReader:
    """Reads slices; from a store each index once.

    It is thread-safe.

    Args:
      num_slices: Number of slices in every file.
    """

    def __init__(self, num_slices: int) -> None:
        self._index_bytes = (num_slices + 1) * _OFFSET.itemsize
        self._indices: dict[str, bytes] = {}

    def read(self, path: str, number: int) -> bytes:
        """Returns a slice of a file in the folder.

        Args:
          path: Path of a file that ``write_spill`` wrote.
          number: Number of the slice.

        Raises:
          OSError: the file is missing or too short.
        """
        at, size = number * _OFFSET.itemsize, 2 * _OFFSET.itemsize
        if is_remote(path):
            if path not in self._indices:
                self._indices[path] = read_range(path, 0, self._index_bytes)
            edges = self._indices[path][at : at + size]
        else:
            edges = read_range(path, at, size)
        start, end = np.frombuffer(edges, _OFFSET).tolist()
        return read_range(path, start, end - start)


def blocks_per_file(layout: Layout, dataset: Dataset) -> int:
    """Returns how many blocks share a file that every worker reaches.

    Args:
      layout: Layout of the job.
      dataset: Input of the job.
    """
    row = row_bytes(layout.columns) + OVERHEAD_BYTES
    largest_block = max(block.num_rows for block in dataset.blocks)
    block_bytes = max(1.0, largest_block * float(layout.plan.expected_uses) * row)
    fitting = file_bytes(layout) // block_bytes
    return max(1, int(min(fitting, len(dataset.blocks) // _LEAST_FILES)))


def file_bytes(layout: Layout) -> int:
    """Returns the maximum bytes of a file that several blocks share."""
    wanted = layout.num_units * _LEAST_READ
    return max(_USUAL_FILE_BYTES, min(_MOST_FILE_BYTES, wanted))
