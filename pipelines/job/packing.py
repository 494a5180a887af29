"""Rows that chose steps, packed into bytes, and unpacked into the records of a file.

    block -> (group, packed rows) -> contents of the file of a group

A *group* is a range of consecutive steps, which one reducer writes into one file.  A
block sends columns to a group, not rows: steps, priorities, then each column.

Formal guarantees:
  - The contents of a file depend on (key, plan, input, layout) and the order of the
    blocks alone.
  - ``PackedBlock.sizes`` are the bytes of the pieces, known before any is made.

Public: the layout.  Sensitive: everything packed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.plan import DpSgdPlan
from pipelines.batches.batch_format import as_items, encode_batch
from pipelines.batches.columns import Column, check_record, row_bytes
from pipelines.batches.manifest import BatchFile, FileChecksum
from pipelines.batches.tfrecord import write_record
from pipelines.inputs.parquet_blocks import Block, IsListed, read_block
from pipelines.sampling.samplers import Participations, arrange_steps, sample_block

_STEP = np.dtype("<u4")
_PRIORITY = np.dtype("<u8")
#: Bytes that travel with each packed row.
OVERHEAD_BYTES = _STEP.itemsize + _PRIORITY.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How steps are spread over files.  Public; independent of the engine.

    Attributes:
      plan: How batches are sampled.
      columns: Columns of the rows.
      physical_batch_size: Rows of every record, real and padding.
      steps_per_group: Consecutive steps that one reducer writes into one file.

    Raises:
      InputError: records too long to be read.
    """

    plan: DpSgdPlan
    columns: tuple[Column, ...]
    physical_batch_size: int
    steps_per_group: int

    def __post_init__(self) -> None:
        check_record(self.columns, self.physical_batch_size)

    @property
    def num_groups(self) -> int:
        """Ranges of steps, and files."""
        return -(-self.plan.num_steps // self.steps_per_group)

    def steps(self, group: int) -> range:
        """The steps of ``group``."""
        first = group * self.steps_per_group
        return range(first, min(first + self.steps_per_group, self.plan.num_steps))

    def file(self, group: int) -> BatchFile:
        """Name and steps of the file of ``group``."""
        steps = self.steps(group)
        return BatchFile(
            name=f"batches-{steps[0]:09d}-{steps[-1]:09d}.tfrecord",
            first_step=steps[0],
            num_steps=len(steps),
        )


def unpack(
    pieces: Iterable[bytes], columns: tuple[Column, ...]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Returns (step, priority, name -> items) of the concatenated pieces.  Sensitive.

    Args:
      pieces: From ``PackedBlock.piece``.
      columns: Of the rows.

    Returns:
      Parallel arrays: uint32, uint64, and opaque items, one per row of a column.
    """
    dtypes: list[np.dtype[Any]] = [_STEP, _PRIORITY]
    dtypes += [np.dtype(f"V{column.numpy_dtype.itemsize}") for column in columns]
    size = sum(dtype.itemsize for dtype in dtypes)
    parts: list[list[np.ndarray]] = [[np.empty(0, dtype)] for dtype in dtypes]
    for data in pieces:
        count, offset = len(data) // size, 0
        for dtype, column in zip(dtypes, parts, strict=True):
            column.append(np.frombuffer(data, dtype, count, offset))
            offset += count * dtype.itemsize
    step, priority, *values = (np.concatenate(column) for column in parts)
    names = [column.name for column in columns]
    return step, priority, dict(zip(names, values, strict=True))


def split_by_group(chosen: Participations, layout: Layout) -> list[np.ndarray]:
    """Returns, for each group, the indices of its participations.  Sensitive.

    Args:
      chosen: Participations of a block.
      layout: How steps are spread over groups.
    """
    group = chosen.step // layout.steps_per_group
    # Small integers are sorted by radix, in linear time.
    kind = np.uint16 if layout.num_groups <= 1 << 16 else np.int64
    order = np.argsort(group.astype(kind), kind="stable")
    edges = np.cumsum(np.bincount(group, minlength=layout.num_groups))
    return np.split(order, edges[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBlock:
    """What a block sends to each group.  Sensitive.

    Attributes:
      columns: Name -> items of all rows of the block.
      chosen: The steps that its rows chose.
      parts: For each group, the indices of its participations in ``chosen``.
    """

    columns: Mapping[str, np.ndarray]
    chosen: Participations
    parts: list[np.ndarray]

    @property
    def sizes(self) -> list[int]:
        """Bytes of the piece of each group."""
        row = OVERHEAD_BYTES + sum(items.itemsize for items in self.columns.values())
        return [len(part) * row for part in self.parts]

    def piece(self, group: int) -> bytes:
        """Returns steps, priorities and columns of the rows that chose ``group``."""
        part = self.parts[group]
        row = self.chosen.row[part]
        return b"".join(
            [
                self.chosen.step[part].astype(_STEP).tobytes(),
                self.chosen.priority[part].astype(_PRIORITY).tobytes(),
                *(np.take(items, row).tobytes() for items in self.columns.values()),
            ]
        )


def sample_and_pack(
    layout: Layout,
    key: bytes,
    block: Block,
    is_listed: IsListed,
    boundaries: np.ndarray | None = None,
) -> PackedBlock:
    """Reads a block and lets its rows choose their steps.

    Args:
      layout: How steps are spread over groups.
      key: Secret, from ``KnownInput.data_set_key``.
      block: Which rows.
      is_listed: As of ``read_block``.
      boundaries: Of a shuffle, from ``shuffle.find_boundaries``.

    Raises:
      InputError: the input is not what it was.
    """
    columns = read_block(block, layout.columns, is_listed)
    chosen = sample_block(layout.plan, key, block.rows, boundaries)
    return PackedBlock(
        columns={name: as_items(values) for name, values in columns.items()},
        chosen=chosen,
        parts=split_by_group(chosen, layout),
    )


def encode_steps(
    layout: Layout,
    group: int,
    pieces: Iterable[bytes],
    write: Callable[[bytes], object],
) -> FileChecksum:
    """Writes the file of a group, a record at a time.  Sensitive.

    Args:
      layout: How steps are spread over groups.
      group: Which group.
      pieces: The piece of each block, in the order of the blocks.
      write: Appends bytes to the file; called for each part of a record.

    Returns:
      The checksum of the file.
    """
    step, priority, columns = unpack(pieces, layout.columns)
    steps = layout.steps(group)
    chosen = arrange_steps(step, priority, steps, layout.plan.truncated_batch_size)
    order = np.concatenate(chosen)
    # All rows of the group are put in order at once; batches are then slices.
    columns = {name: np.take(items, order) for name, items in columns.items()}
    size, sha256, num_records = 0, hashlib.sha256(), 0

    def write_part(part: bytes) -> None:
        nonlocal size
        write(part)
        sha256.update(part)
        size += len(part)

    for record in _records(layout, steps, columns, [len(rows) for rows in chosen]):
        write_record(write_part, record)
        num_records += 1
    return FileChecksum(
        size=size,
        sha256=sha256.hexdigest(),
        num_records=num_records,
        num_real=len(order),
    )


def _records(
    layout: Layout,
    steps: range,
    columns: Mapping[str, np.ndarray],
    num_rows: Sequence[int],
) -> Iterator[bytes]:
    """Yields the records of ``steps``, whose rows are sorted by step."""
    size, largest = layout.physical_batch_size, layout.plan.largest_batch_size
    start = 0
    for step, count in zip(steps, num_rows, strict=True):
        end = start + count
        for part in range(-(-(largest or max(1, count)) // size)):
            piece = slice(start + part * size, min(start + (part + 1) * size, end))
            yield encode_batch(
                {name: items[piece] for name, items in columns.items()},
                step=step,
                part=part,
                physical_batch_size=size,
            )
        start = end


def group_bytes(layout: Layout) -> int:
    """Returns the bytes of a group's rows: the most, or without a cap the expected."""
    largest = layout.plan.largest_batch_size or layout.plan.expected_batch_size
    row = row_bytes(layout.columns) + OVERHEAD_BYTES
    return layout.steps_per_group * largest * row
