"""Sampled rows, packed into bytes, and unpacked into the records of a file.

    blocks -> packed rows of a range of steps -> contents of the file of a group

A *group* is a range of consecutive steps, which one reducer writes into one file; it
holds one *unit* of the group at a time.  A packed piece holds columns: steps,
priorities, then each column of the rows.

The contents of a file depend only on (key, plan, input, layout) and the order of the
blocks.  ``PackedRows.sizes`` are the bytes of the pieces, known before any is made.

Public: the layout.  Sensitive: everything packed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from accounting.core.plan import DpSgdPlan
from pipelines.core.batches.batch_format import encode_batch, write_record
from pipelines.core.batches.manifest import (
    BatchFile,
    Column,
    FileChecksum,
    Manifest,
    RecordChecksum,
    check_record,
    row_bytes,
)
from pipelines.core.choices import Choices, PlanSampler, arrange_steps
from pipelines.inputs.parquet_blocks import Block, IsListed, read_block

_STEP = np.dtype("<u4")
_PRIORITY = np.dtype("<u8")
#: Bytes of a packed row beside its columns.
OVERHEAD_BYTES = _STEP.itemsize + _PRIORITY.itemsize
#: Maximum bytes of rows in a unit, unless it is one step.  It is twice a usual group,
#: so that only the groups of a very long plan have several units.
_UNIT_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How steps are spread over files.  Public; independent of the engine.

    Attributes:
      plan: How batches are sampled.
      columns: Columns of the rows.
      physical_batch_size: Number of rows of every record, real and padding.
      steps_per_group: Number of consecutive steps in a file.

    Raises:
      InputError: records are too long to be read.
    """

    plan: DpSgdPlan
    columns: tuple[Column, ...]
    physical_batch_size: int
    steps_per_group: int

    def __post_init__(self) -> None:
        check_record(self.columns, self.physical_batch_size)

    @property
    def num_groups(self) -> int:
        """Number of groups, and of files."""
        return -(-self.plan.num_steps // self.steps_per_group)

    def steps(self, group: int) -> range:
        """The steps of ``group``."""
        first = group * self.steps_per_group
        return range(first, min(first + self.steps_per_group, self.plan.num_steps))

    @property
    def step_bytes(self) -> int:
        """Maximum bytes of a step's rows; without a cap the expected bytes."""
        largest = self.plan.largest_batch_size or self.plan.expected_batch_size
        return largest * (row_bytes(self.columns) + OVERHEAD_BYTES)

    @property
    def steps_per_unit(self) -> int:
        """Number of consecutive steps in a unit."""
        return max(1, min(_UNIT_BYTES // self.step_bytes, self.steps_per_group))

    @property
    def units_per_group(self) -> int:
        """Number of units in every group; the last group may have empty ones."""
        return -(-self.steps_per_group // self.steps_per_unit)

    @property
    def num_units(self) -> int:
        """Number of units in all groups."""
        return self.num_groups * self.units_per_group

    def unit_edges(self) -> np.ndarray:
        """First step of each unit, and the end: int64, shape (num_units + 1,)."""
        of_group = np.arange(self.num_groups)[:, None] * self.steps_per_group
        first = of_group + np.arange(self.units_per_group) * self.steps_per_unit
        end = self.plan.num_steps
        return np.append(np.minimum(first.ravel(), end), end)

    def file(self, group: int) -> BatchFile:
        """Name and steps of the file of ``group``."""
        steps = self.steps(group)
        return BatchFile(
            name=f"batches-{steps[0]:09d}-{steps[-1]:09d}.tfrecord",
            first_step=steps[0],
            num_steps=len(steps),
        )

    def manifest(
        self, description: Mapping[str, Any], batches_id: str = ""
    ) -> Manifest:
        """Returns the manifest of the batches, which is known before they are made.

        Args:
          description: The data set's own description.
          batches_id: Commitment to the sampling key; empty before there is one.
        """
        return Manifest(
            plan=self.plan,
            columns=self.columns,
            physical_batch_size=self.physical_batch_size,
            batches_id=batches_id,
            dataset=dict(description),
            files=tuple(self.file(group) for group in range(self.num_groups)),
        )


def _unpack(
    pieces: Iterable[bytes], columns: tuple[Column, ...]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Returns (step, priority, name -> items) of the concatenated pieces.  Sensitive.

    Args:
      pieces: From ``PackedRows.piece``.
      columns: Columns of the rows.

    Returns:
      Parallel arrays of shape (rows,): uint32, uint64, and opaque items per column.
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


def _split_by_step(step: np.ndarray, edges: np.ndarray) -> list[np.ndarray]:
    """Returns, for each range of steps, the indices of its participations.  Sensitive.

    Args:
      step: int64, step of each participation.
      edges: int64, ascending: the first step of each range, and the end of the last.
    """
    found, num_ranges = np.searchsorted(edges, step, side="right") - 1, len(edges) - 1
    # NumPy sorts small integers by radix, in linear time.
    kind = np.uint16 if num_ranges <= 1 << 16 else np.int64
    order = np.argsort(found.astype(kind), kind="stable")
    ends = np.cumsum(np.bincount(found, minlength=num_ranges))
    return np.split(order, ends[:-1])


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PackedRows:
    """Rows and their participations by unit of steps.  Sensitive.

    Attributes:
      columns: Name -> items of the rows.
      chosen: Choices of the rows.
      parts: For each unit, the indices of its participations in ``chosen``.
    """

    columns: Mapping[str, np.ndarray]
    chosen: Choices
    parts: list[np.ndarray]

    @property
    def sizes(self) -> list[int]:
        """Bytes of the piece of each unit."""
        row = OVERHEAD_BYTES + sum(items.itemsize for items in self.columns.values())
        return [len(part) * row for part in self.parts]

    def piece(self, number: int) -> bytes:
        """Returns steps, priorities and columns of the rows of a unit."""
        row, step, priority = (each[self.parts[number]] for each in self.chosen)
        return b"".join(
            [
                step.astype(_STEP).tobytes(),
                priority.astype(_PRIORITY).tobytes(),
                *(np.take(items, row).tobytes() for items in self.columns.values()),
            ]
        )


def as_items(values: np.ndarray) -> np.ndarray:
    """Returns ``values`` as a flat array of opaque items, one per row.

    NumPy gathers such items by copying memory, whatever the shape of a row.
    """
    contiguous = np.ascontiguousarray(values)
    size = contiguous.itemsize * int(np.prod(contiguous.shape[1:]))
    return contiguous.reshape(-1).view(f"V{size}")


def sample_and_pack(
    layout: Layout, sampler: PlanSampler, blocks: Sequence[Block], is_listed: IsListed
) -> PackedRows:
    """Reads blocks and samples the steps of their rows.

    Args:
      layout: Layout of the job.
      sampler: Sampler of the plan, with ``KnownInput.data_set_key``.
      blocks: Blocks to read, in order.
      is_listed: As in ``read_block``.

    Raises:
      InputError: the input has changed.
    """
    tables, chosen, first = [], [], 0
    for block in blocks:
        columns = read_block(block, layout.columns, is_listed)
        tables.append({name: as_items(values) for name, values in columns.items()})
        row, step, priority = sampler.choose(block)
        chosen.append((row + first, step, priority))
        first += block.num_rows
    row, step, priority = map(_joined, zip(*chosen, strict=True))
    return PackedRows(
        # Popped, so that at most one column is in memory twice.
        columns={
            column.name: _joined([table.pop(column.name) for table in tables])
            for column in layout.columns
        },
        chosen=(row, step, priority),
        parts=_split_by_step(step, layout.unit_edges()),
    )


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


#: The steps of a unit, and its pieces in the order of blocks.
Unit = tuple[range, Iterable[bytes]]


def encode_steps(
    layout: Layout, units: Iterable[Unit], write: Callable[[bytes], object]
) -> FileChecksum:
    """Writes the file of a group, a record at a time.  Sensitive.

    Args:
      layout: Layout of the job.
      units: Units of the group, in order.
      write: Appends bytes to the file; called several times for a record.

    Returns:
      The checksum of the file.
    """
    records, num_real = list[RecordChecksum](), 0
    for steps, pieces in units:
        columns, num_rows = _arrange(layout, steps, pieces)
        for step, part, record in _records(layout, steps, columns, num_rows):
            records.append(write_record(write, record, step=step, part=part))
        num_real += sum(num_rows)
    return FileChecksum(num_real=num_real, records=tuple(records))


def _arrange(
    layout: Layout, steps: range, pieces: Iterable[bytes]
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Returns the columns of ``steps``, in order, and the number of rows per step."""
    step, priority, columns = _unpack(pieces, layout.columns)
    chosen = arrange_steps(step, priority, steps, layout.plan.truncated_batch_size)
    order = np.concatenate(chosen)
    # All rows of the unit are sorted at once, so that batches are slices.
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
