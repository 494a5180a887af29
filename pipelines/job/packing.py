"""Rows that chose steps, packed into bytes, and unpacked into the records of a file.

    blocks -> packed rows of a range of steps -> contents of the file of a group

A *group* is a range of consecutive steps, which one reducer writes into one file; it
holds one *unit* of it at a time.  Blocks send columns to a range of steps, not rows:
steps, priorities, then each column.

Formal guarantees:
  - The contents of a file depend on (key, plan, input, layout) and the order of the
    blocks alone.
  - ``PackedRows.sizes`` are the bytes of the pieces, known before any is made.

Public: the layout.  Sensitive: everything packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.plan import DpSgdPlan
from pipelines.batches.batch_format import as_items, encode_batch
from pipelines.batches.columns import Column, check_record, row_bytes
from pipelines.batches.manifest import BatchFile, FileChecksum
from pipelines.batches.record_checksums import RecordChecksum
from pipelines.batches.tfrecord import write_record
from pipelines.files.sink import Sink
from pipelines.inputs.parquet_blocks import Block, IsListed, read_block
from pipelines.sampling.samplers import Participations, arrange_steps, sample_block

_STEP = np.dtype("<u4")
_PRIORITY = np.dtype("<u8")
#: Bytes that travel with each packed row.
OVERHEAD_BYTES = _STEP.itemsize + _PRIORITY.itemsize
#: A unit has at most so many bytes of rows, or it is one step.  It is twice a usual
#: group, so that only the groups of a very long plan have several units.
_UNIT_BYTES = 64 << 20


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

    @property
    def steps_per_unit(self) -> int:
        """Consecutive steps of a group whose rows a reducer holds at a time."""
        fitting = _UNIT_BYTES // (group_bytes(self) // self.steps_per_group or 1)
        return max(1, min(fitting, self.steps_per_group))

    @property
    def units_per_group(self) -> int:
        """Units of every group; the last group may have empty ones."""
        return -(-self.steps_per_group // self.steps_per_unit)

    @property
    def num_units(self) -> int:
        """Units of all groups."""
        return self.num_groups * self.units_per_group

    def group_edges(self) -> np.ndarray:
        """The first step of each group, and the end: int64, ``num_groups`` + 1."""
        first = np.arange(self.num_groups) * self.steps_per_group
        return np.append(first, self.plan.num_steps)

    def unit_edges(self) -> np.ndarray:
        """The first step of each unit of all groups, and the end: int64."""
        within = np.arange(self.units_per_group) * self.steps_per_unit
        first = (self.group_edges()[:-1, None] + within).ravel()
        end = self.plan.num_steps
        return np.append(np.minimum(first, end), end)

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
      pieces: From ``PackedRows.piece``.
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


def split_by_step(step: np.ndarray, edges: np.ndarray) -> list[np.ndarray]:
    """Returns, for each range of steps, the indices of its participations.  Sensitive.

    Args:
      step: int64, the step of each participation.
      edges: int64, ascending: the first step of each range, and the end of the last.
    """
    found, num_ranges = np.searchsorted(edges, step, side="right") - 1, len(edges) - 1
    # Small integers are sorted by radix, in linear time.
    kind = np.uint16 if num_ranges <= 1 << 16 else np.int64
    order = np.argsort(found.astype(kind), kind="stable")
    ends = np.cumsum(np.bincount(found, minlength=num_ranges))
    return np.split(order, ends[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """What some rows send to each range of steps.  Sensitive.

    Attributes:
      columns: Name -> items of the rows.
      chosen: The steps that the rows chose.
      parts: For each range of steps, the indices of its participations in ``chosen``.
    """

    columns: Mapping[str, np.ndarray]
    chosen: Participations
    parts: list[np.ndarray]

    @property
    def sizes(self) -> list[int]:
        """Bytes of the piece of each range of steps."""
        row = OVERHEAD_BYTES + sum(items.itemsize for items in self.columns.values())
        return [len(part) * row for part in self.parts]

    def piece(self, number: int) -> bytes:
        """Returns steps, priorities and columns of the rows of a range of steps."""
        part = self.parts[number]
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
    blocks: Sequence[Block],
    is_listed: IsListed,
    boundaries: np.ndarray | None = None,
    *,
    edges: np.ndarray,
) -> PackedRows:
    """Reads blocks and lets their rows choose their steps.

    Args:
      layout: How steps are spread over groups.
      key: Secret, from ``KnownInput.data_set_key``.
      blocks: Which rows, in order.
      is_listed: As of ``read_block``.
      boundaries: Of a shuffle, from ``shuffle.find_boundaries``.
      edges: Of the ranges of steps, as of ``split_by_step``.

    Raises:
      InputError: the input is not what it was.
    """
    tables, chosen, first = [], [], 0
    for block in blocks:
        columns = read_block(block, layout.columns, is_listed)
        tables.append({name: as_items(values) for name, values in columns.items()})
        found = sample_block(layout.plan, key, block.rows, boundaries)
        chosen.append((found.row + first, found.step, found.priority))
        first += block.num_rows
    row, step, priority = map(_joined, zip(*chosen, strict=True))
    return PackedRows(
        # Popped, so that one column at most is in memory twice.
        columns={
            column.name: _joined([table.pop(column.name) for table in tables])
            for column in layout.columns
        },
        chosen=Participations(row=row, step=step, priority=priority),
        parts=split_by_step(step, edges),
    )


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def pack_again(
    pieces: Iterable[bytes], columns: tuple[Column, ...], edges: np.ndarray
) -> PackedRows:
    """Returns packed rows split into smaller ranges of steps.

    Args:
      pieces: From ``PackedRows.piece``, of one range of steps.
      columns: Of the rows.
      edges: Of the smaller ranges, as of ``split_by_step``.
    """
    step, priority, items = unpack(pieces, columns)
    chosen = Participations(row=np.arange(len(step)), step=step, priority=priority)
    return PackedRows(columns=items, chosen=chosen, parts=split_by_step(step, edges))


#: Steps whose rows are held at a time, and the pieces of them in the order of blocks.
Unit = tuple[range, Iterable[bytes]]


def encode_steps(
    layout: Layout, units: Iterable[Unit], write: Callable[[bytes], object]
) -> FileChecksum:
    """Writes the file of a group, a record at a time.  Sensitive.

    Args:
      layout: How steps are spread over groups.
      units: Of the group, in order.
      write: Appends bytes to the file; called for each part of a record.

    Returns:
      The checksum of the file.
    """
    records, size, num_real = list[str](), 0, 0
    for steps, pieces in units:
        columns, num_rows = _arrange(layout, steps, pieces)
        for step, part, record in _records(layout, steps, columns, num_rows):
            sink = Sink(write)
            write_record(sink.write, record)
            found = RecordChecksum(
                step=step, part=part, size=sink.size, sha256=sink.sha256
            )
            records.append(str(found))
            size += sink.size
        num_real += sum(num_rows)
    return FileChecksum(
        size=size,
        num_records=len(records),
        num_real=num_real,
        records=tuple(records),
    )


def _arrange(
    layout: Layout, steps: range, pieces: Iterable[bytes]
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Returns the columns of ``steps``, in order, and the rows of each step."""
    step, priority, columns = unpack(pieces, layout.columns)
    chosen = arrange_steps(step, priority, steps, layout.plan.truncated_batch_size)
    order = np.concatenate(chosen)
    # All rows of the unit are put in order at once; batches are then slices.
    columns = {name: np.take(items, order) for name, items in columns.items()}
    return columns, [len(rows) for rows in chosen]


def _records(
    layout: Layout,
    steps: range,
    columns: Mapping[str, np.ndarray],
    num_rows: Sequence[int],
) -> Iterator[tuple[int, int, bytes]]:
    """Yields (step, part, record) of ``steps``, whose rows are sorted by step."""
    size, largest = layout.physical_batch_size, layout.plan.largest_batch_size
    start = 0
    for step, count in zip(steps, num_rows, strict=True):
        end = start + count
        for part in range(-(-(largest or max(1, count)) // size)):
            piece = slice(start + part * size, min(start + (part + 1) * size, end))
            record = encode_batch(
                {name: items[piece] for name, items in columns.items()},
                step=step,
                part=part,
                physical_batch_size=size,
            )
            yield step, part, record
        start = end


def group_bytes(layout: Layout) -> int:
    """Returns the bytes of a group's rows: the most, or without a cap the expected."""
    largest = layout.plan.largest_batch_size or layout.plan.expected_batch_size
    row = row_bytes(layout.columns) + OVERHEAD_BYTES
    return layout.steps_per_group * largest * row


def unit_bytes(layout: Layout) -> int:
    """Returns the bytes of a unit's rows, as ``group_bytes`` does of a group's."""
    return group_bytes(layout) // layout.steps_per_group * layout.steps_per_unit
