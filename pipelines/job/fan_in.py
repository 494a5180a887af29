"""How many blocks share a file of the shuffle, and in how many passes rows are sorted.

A reader makes one request for each file and unit, and a store answers it in tens of
milliseconds: few large requests are fastest.  D bytes of rows in U units, in files of M
bytes, take one pass of D / M files and D U / M requests of M / U bytes.

If M / U is below ``LEAST_READ``, and requests are many, there are two passes.  The
first sorts rows by P parts of consecutive units.  A task of the second takes the rows
of one part from files with M bytes of them, and writes one file that is sorted by unit.
Its requests have M / P bytes, those of the reduce step M P / U: both are M / sqrt(U)
for P = sqrt(U).  There are 2 D sqrt(U) / M of them; rows are written and read twice.

Formal guarantees:
  - The numbers depend only on the layout and on the row groups, never on the engine.
  - Every block is in one file, and every unit in one part.

Public: everything here; sizes are expectations over the sampling.
"""

from __future__ import annotations

import dataclasses
import math

from pipelines.core.batches.columns import row_bytes
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
