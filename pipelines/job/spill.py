"""A shuffle through files, each indexed by ranges of steps.

The map step writes the pieces of some blocks for each range of steps into one file, and
the reduce step reads its slices.  Memory then depends on the size of a block and of a
slice, never on that of the data.  An engine that shuffles rows itself holds more:
Beam's local runner all that it groups, at about six times its size; Flink the values of
a key; and Beam's Java modules, between a Python worker and Flink or Spark, the output
of a whole bundle, which is a worker's share of the data.

    block-<ordinal>       ordinal of its first block; holds an index, then the slices
    part-<part>-<merge>   a file of the second pass (``FanIn``), in the same format

    index                 num_slices + 1 offsets (int64)

Formal guarantees:
  - A file under its final name is complete; a resumed job reads it, not the blocks.
  - ``read_slice`` and ``SliceReader`` return exactly the bytes that were written.
  - In a store a slice is one request, once the index of its file has been read.
  - The numbers of ``choose_fan_in`` depend only on the layout and on the row groups,
    never on the engine.  Every block is in one file, and every unit in one part.

Sensitive: rows; the folder is private and is removed when the job ends.

How many blocks share a file, and in how many passes rows are sorted.  A reader makes
one request for each file and unit, and a store answers it in tens of milliseconds: few
large requests are fastest.  D bytes of rows in U units, in files of M bytes, take one
pass of D / M files and D U / M requests of M / U bytes.

If M / U is below ``LEAST_READ``, and requests are many, there are two passes.  The
first sorts rows by P parts of consecutive units.  A task of the second takes the rows
of one part from files with M bytes of them, and writes one file that is sorted by unit.
Its requests have M / P bytes, those of the reduce step M P / U: both are M / sqrt(U)
for P = sqrt(U).  There are 2 D sqrt(U) / M of them; rows are written and read twice.

"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from pipelines.core.batches.columns import row_bytes
from pipelines.files.storage import StrPath, is_remote, join, new_file, read_range, size
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.job.packing import OVERHEAD_BYTES, Layout

#: Maximum bytes of a file, unless one block has more.  A worker holds about three times
#: as many.
FILE_BYTES = 128 << 20
#: Minimum bytes of a request, unless there are at most ``_MOST_READS``.
LEAST_READ = 256 << 10
_MOST_READS = 1 << 16
#: Minimum number of files of the map step, if there are as many blocks, to keep workers
#: busy.
_LEAST_FILES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class FanIn:
    """How blocks share files.

    Attributes:
      blocks_per_file: Number of consecutive blocks in a file of the map step.
      units_per_part: Number of consecutive units in a part; 1 if there is one pass.
      files_per_merge: Number of consecutive files of the map step in a file of the
        second pass, which holds their rows of one part; 0 if there is one pass.
    """

    blocks_per_file: int = 1
    units_per_part: int = 1
    files_per_merge: int = 0

    def num_files(self, num_blocks: int) -> int:
        """Returns the number of files of the map step."""
        return -(-num_blocks // self.blocks_per_file)

    def num_parts(self, layout: Layout) -> int:
        """Returns the number of parts, the slices of a file of the map step."""
        return -(-layout.num_units // self.units_per_part)

    def num_merges(self, num_blocks: int) -> int:
        """Returns the number of files of the second pass for each part."""
        return -(-self.num_files(num_blocks) // (self.files_per_merge or 1))


#: Each block in its own file, as on a disk of this machine.
ONE_BY_ONE = FanIn()


_OFFSET = np.dtype("<i8")
BLOCK_PREFIX = "block-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spill:
    """A shuffle through files.

    Attributes:
      folder: Existing folder, on this machine or where every worker reaches it.
      num_threads: Number of threads of map and reduce in each worker; with more than
        one, the names of files are emitted before the files are there.
      flush: Whether files must survive a loss of power.
      fan_in: How many blocks share a file, and whether there is a second pass.
    """

    folder: str
    num_threads: int = 1
    flush: bool = True
    fan_in: FanIn = ONE_BY_ONE


def spill_path(folder: StrPath, ordinal: int) -> str:
    """Returns the path of a file of the map step.

    Args:
      folder: Folder of the spill.
      ordinal: Ordinal of its first block.
    """
    return join(folder, f"{BLOCK_PREFIX}{ordinal:09d}")


def part_path(folder: StrPath, part: int, merge: int) -> str:
    """Returns the path of a file of the second pass.

    Args:
      folder: Folder of the spill.
      part: Number of the part.
      merge: Number of the file among those of the part.
    """
    return join(folder, f"part-{part:09d}-{merge:09d}")


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
      OSError: no room, no access, or no folder.
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


def read_slice(path: StrPath, number: int) -> bytes:
    """Returns a slice of a file.

    Args:
      path: Path of a file that ``write_spill`` wrote.
      number: Number of the slice.

    Raises:
      OSError: the file is missing or too short.
    """
    edges = read_range(path, number * _OFFSET.itemsize, 2 * _OFFSET.itemsize)
    start, end = np.frombuffer(edges, _OFFSET).tolist()
    return read_range(path, start, end - start)


class SliceReader:
    """Reads slices; from a store each index once.

    It is thread-safe.

    Args:
      folder: Folder of the files.
      num_slices: Number of slices in every file.
    """

    def __init__(self, folder: StrPath, num_slices: int) -> None:
        self._is_remote = is_remote(folder)
        self._index_bytes = (num_slices + 1) * _OFFSET.itemsize
        self._edges: dict[str, np.ndarray] = {}

    def read(self, path: str, number: int) -> bytes:
        """Returns a slice of a file in the folder: see ``read_slice``."""
        if not self._is_remote:
            return read_slice(path, number)
        if path not in self._edges:
            index = read_range(path, 0, self._index_bytes)
            self._edges[path] = np.frombuffer(index, _OFFSET)
        start, end = self._edges[path][number : number + 2].tolist()
        return read_range(path, start, end - start)


def choose_fan_in(layout: Layout, dataset: Dataset) -> FanIn:
    """Returns the fan-in of a shuffle through files that every worker reaches.

    Args:
      layout: Layout of the job.
      dataset: Input of the job.
    """
    block_bytes = _block_bytes(layout, dataset)
    fitting = min(FILE_BYTES // block_bytes, len(dataset.blocks) // _LEAST_FILES)
    blocks_per_file = max(1, int(fitting))
    file_bytes = blocks_per_file * block_bytes
    one_pass = FanIn(blocks_per_file=blocks_per_file)
    num_reads = one_pass.num_files(len(dataset.blocks)) * layout.num_units
    if num_reads <= _MOST_READS or file_bytes >= layout.num_units * LEAST_READ:
        return one_pass
    wanted = math.ceil(math.sqrt(file_bytes * layout.num_units / FILE_BYTES))
    units_per_part = -(-layout.num_units // wanted)
    fan_in = FanIn(blocks_per_file=blocks_per_file, units_per_part=units_per_part)
    slice_bytes = file_bytes / fan_in.num_parts(layout)
    merged = max(1, int(FILE_BYTES // slice_bytes))
    return dataclasses.replace(fan_in, files_per_merge=merged)


def _block_bytes(layout: Layout, dataset: Dataset) -> float:
    """Returns the expected bytes that the largest block sends, at least one."""
    participations = float(layout.plan.expected_uses)
    row = row_bytes(layout.columns) + OVERHEAD_BYTES
    largest_block = max(block.num_rows for block in dataset.blocks)
    return max(1.0, largest_block * participations * row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The load of a shuffle on a store.

    Attributes:
      shuffle_files: Number of files in all passes.
      shuffle_reads: Number of requests for slices; each worker also reads an index of a
        few kilobytes for every file that it reads.
      bytes_per_read: Expected bytes of a slice.
      stored_bytes: Expected bytes in the store until the job ends.
    """

    shuffle_files: int
    shuffle_reads: int
    bytes_per_read: int
    stored_bytes: int


def traffic(layout: Layout, num_blocks: int, fan_in: FanIn) -> Traffic:
    """Returns the load of a shuffle on a store.

    Args:
      layout: Layout of the job.
      num_blocks: Number of blocks in its input.
      fan_in: From ``choose_fan_in``.
    """
    sampled = layout.plan.num_steps * layout.plan.expected_batch_size
    rows = sampled * (row_bytes(layout.columns) + OVERHEAD_BYTES)
    files, parts = fan_in.num_files(num_blocks), fan_in.num_parts(layout)
    reads, passes = files * parts, 1
    if fan_in.files_per_merge:
        merges = fan_in.num_merges(num_blocks)
        files, passes = files + parts * merges, 2
        reads += layout.num_units * merges
    return Traffic(
        shuffle_files=files,
        shuffle_reads=reads,
        bytes_per_read=passes * rows // reads,
        stored_bytes=passes * rows,
    )
