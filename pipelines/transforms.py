"""Map, reduce, map: blocks to fixed-size weighted batches, as Beam transforms.

    blocks -> sample and pack -> group by range of steps -> order, truncate, pad, write

Elements are blocks, not rows.  The map step emits, for each range of steps, one element
with all rows of a block that chose a step of that range; the reduce step holds one
range at a time, some tens of megabytes.

Formal guarantees:
  - Every step of every asked-for range is written, also when no example chose it.
  - The bytes of a file depend on (key, plan, input, layout) alone: not on the engine,
    the number of workers, or how often and in which order bundles run.
  - A file is visible under its final name only when it is complete; its checksum is
    written after it.
  - No key is part of the pipeline: workers read it from ``key_file``.

Public: the layout.  Sensitive: every element.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import secrets
from collections.abc import Iterable, Iterator

import apache_beam as beam
import numpy as np
from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems
from apache_beam.metrics import Metrics

from accounting.plan import DpSgdPlan
from pipelines import progress
from pipelines.batch_format import Column, encode_batch, row_dtype, write_record
from pipelines.keys import read_key_file
from pipelines.manifest import PRIVATE_NAME, BatchFile, FileChecksum
from pipelines.parquet_blocks import Block, read_block
from pipelines.sampling import Participations, arrange_steps, sample_block

#: Ordinal of the empty element that makes a range of steps exist.
_MARKER = -1
_STEP = np.dtype("<u4")
_PRIORITY = np.dtype("<u8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How steps are spread over files.  Public; independent of the engine.

    Attributes:
      plan: How batches are sampled.
      columns: Columns of the packed rows.
      physical_batch_size: Rows of every record, real and padding.
      steps_per_group: Consecutive steps that one reducer writes into one file.
    """

    plan: DpSgdPlan
    columns: tuple[Column, ...]
    physical_batch_size: int
    steps_per_group: int

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


def checksum_path(directory: str, name: str) -> str:
    """Where the checksum of the batch file ``name`` is kept until the job ends."""
    return FileSystems.join(directory, PRIVATE_NAME, "files", f"{name}.json")


def pack_element(rows: np.ndarray, chosen: Participations) -> bytes:
    """Returns steps, priorities and rows of some participations as one buffer."""
    return b"".join(
        [
            chosen.step.astype(_STEP).tobytes(),
            chosen.priority.astype(_PRIORITY).tobytes(),
            rows[chosen.row].tobytes(),
        ]
    )


def unpack_elements(
    elements: Iterable[bytes], dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (step, priority, rows) of the concatenated ``elements``."""
    steps, priorities = [np.empty(0, _STEP)], [np.empty(0, _PRIORITY)]
    rows = [np.empty(0, dtype)]
    size = _STEP.itemsize + _PRIORITY.itemsize + dtype.itemsize
    for data in elements:
        count = len(data) // size
        after_steps = count * _STEP.itemsize
        after_priorities = after_steps + count * _PRIORITY.itemsize
        steps.append(np.frombuffer(data, _STEP, count))
        priorities.append(np.frombuffer(data, _PRIORITY, count, after_steps))
        rows.append(np.frombuffer(data, dtype, count, after_priorities))
    return np.concatenate(steps), np.concatenate(priorities), np.concatenate(rows)


def split_by_group(
    chosen: Participations, steps_per_group: int, groups: range
) -> Iterator[tuple[int, Participations]]:
    """Yields (group, its participations) for those of ``groups`` that have any."""
    group = chosen.step // steps_per_group
    wanted = np.flatnonzero((group >= groups.start) & (group < groups.stop))
    group = group[wanted] - groups.start
    # Small integers are sorted by radix, in linear time.
    kind = np.uint16 if len(groups) <= 1 << 16 else np.int64
    order = wanted[np.argsort(group.astype(kind), kind="stable")]
    edges = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=len(groups)))])
    for index in np.flatnonzero(np.diff(edges)):
        part = order[edges[index] : edges[index + 1]]
        yield (
            groups[index],
            Participations(chosen.row[part], chosen.step[part], chosen.priority[part]),
        )


def encode_steps(
    layout: Layout, group: int, elements: Iterable[bytes]
) -> tuple[bytes, FileChecksum]:
    """Returns the contents of the file of ``group`` and their checksum.  Sensitive."""
    step, priority, rows = unpack_elements(elements, row_dtype(layout.columns))
    size, cap = layout.physical_batch_size, layout.plan.truncated_batch_size
    file, num_records, num_real = io.BytesIO(), 0, 0
    steps = layout.steps(group)
    for number, chosen in zip(
        steps, arrange_steps(step, priority, steps, cap), strict=True
    ):
        parts = -(-(cap or max(1, len(chosen))) // size)
        for part in range(parts):
            real = rows[chosen[part * size : (part + 1) * size]]
            record = encode_batch(
                real, step=number, part=part, physical_batch_size=size
            )
            write_record(file, record)
        num_records, num_real = num_records + parts, num_real + len(chosen)
    data = file.getvalue()
    return data, FileChecksum(
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        num_records=num_records,
        num_real=num_real,
    )


def write_file(path: str, data: bytes) -> None:
    """Writes ``data`` under a temporary name beside ``path``, then renames it."""
    folder, name = FileSystems.split(path)
    temporary = FileSystems.join(folder, f".{name}.{secrets.token_hex(8)}")
    try:
        with FileSystems.create(
            temporary, compression_type=CompressionTypes.UNCOMPRESSED
        ) as file:
            file.write(data)
        FileSystems.rename([temporary], [path])
    except BaseException:
        if FileSystems.exists(temporary):
            FileSystems.delete([temporary])
        raise


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(tuple[int, tuple[int, bytes]])
class _SampleBlockFn(beam.DoFn):
    """Block -> (group, (ordinal of the block, packed participations))."""

    def __init__(self, layout: Layout, key_file: str, groups: range) -> None:
        self._layout = layout
        self._key_file = key_file
        self._groups = groups
        self._blocks_read = Metrics.counter("dpsgd", "blocks_read")

    def setup(self) -> None:
        self._key = read_key_file(self._key_file)

    def process(self, block: Block) -> Iterator[tuple[int, tuple[int, bytes]]]:
        layout = self._layout
        rows = read_block(block, layout.columns)
        chosen = sample_block(layout.plan, self._key, block.label, len(rows))
        for group, part in split_by_group(chosen, layout.steps_per_group, self._groups):
            yield group, (block.ordinal, pack_element(rows, part))
        self._blocks_read.inc()
        progress.advance("blocks")


@beam.typehints.with_input_types(tuple[int, Iterable[tuple[int, bytes]]])
@beam.typehints.with_output_types(str)
class _WriteGroupFn(beam.DoFn):
    """(group, elements) -> name of the file that now holds the group's steps."""

    def __init__(self, layout: Layout, directory: str) -> None:
        self._layout = layout
        self._directory = directory
        self._steps_written = Metrics.counter("dpsgd", "steps_written")

    def process(
        self, group_and_elements: tuple[int, Iterable[tuple[int, bytes]]]
    ) -> Iterator[str]:
        group, elements = group_and_elements
        # Iterated once (Flink cannot twice), then put into the order of the blocks.
        pieces = [piece for _, piece in sorted(elements)]
        data, checksum = encode_steps(self._layout, group, pieces)
        name = self._layout.file(group).name
        write_file(FileSystems.join(self._directory, name), data)
        # Last: a file with a checksum is finished, and is not written again.
        text = json.dumps(dataclasses.asdict(checksum), sort_keys=True)
        write_file(checksum_path(self._directory, name), text.encode())
        self._steps_written.inc(self._layout.file(group).num_steps)
        progress.advance("steps", self._layout.file(group).num_steps)
        yield name


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(str)
class WriteBatches(beam.PTransform):
    """Samples blocks and writes the batches of some ranges of steps.

    Input: a PCollection of ``Block``.  Output: the names of the files written.

    Args:
      layout: How steps are spread over files.
      directory: Where the files go; any file system that Beam knows.
      key_file: Path of the sampling key, readable by the workers.
      groups: The ranges of steps to write, of ``range(layout.num_groups)``.

    Example:
      >>> _ = (pipeline | beam.Create(dataset.blocks)
      ...      | WriteBatches(layout, "batches", "sampling.key"))  # doctest: +SKIP
    """

    def __init__(
        self,
        layout: Layout,
        directory: str,
        key_file: str,
        groups: range | None = None,
    ) -> None:
        super().__init__()
        self._layout = layout
        self._directory = directory
        self._key_file = key_file
        self._groups = range(layout.num_groups) if groups is None else groups

    def expand(self, blocks: beam.PCollection) -> beam.PCollection:
        """Wires map, reduce, map."""
        # A bounded read is one subtask on Flink: spread the blocks first.
        packed = (
            blocks
            | "SpreadBlocks" >> beam.Reshuffle()
            | "SampleAndPack"
            >> beam.ParDo(_SampleBlockFn(self._layout, self._key_file, self._groups))
        )  # (group, (ordinal, packed participations))
        markers = blocks.pipeline | "EveryGroup" >> beam.Create(
            [(group, (_MARKER, b"")) for group in self._groups]
        ).with_output_types(tuple[int, tuple[int, bytes]])
        return (
            (packed, markers)
            | "WithEveryGroup" >> beam.Flatten()
            | "GroupBySteps" >> beam.GroupByKey()  # (group, [(ordinal, packed)])
            | "OrderTruncatePadWrite"
            >> beam.ParDo(_WriteGroupFn(self._layout, self._directory))
        )  # file name
