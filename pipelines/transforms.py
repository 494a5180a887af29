"""Map, reduce, map: blocks to fixed-size weighted batches, as Beam transforms.

    blocks -> sample and pack -> group by range of steps -> order, truncate, pad, write

Elements are blocks, not rows.  The map step emits, for each range of steps, one element
with all rows of a block that chose a step of that range, be it none; the reduce step
holds one range at a time, some tens of megabytes.

Formal guarantees:
  - Every step of every asked-for range is written, also when no example chose it.
  - No element is lost or counted twice: a range is written only from exactly one
    element of every block, whatever the engine delivered.
  - The bytes of a file depend on (key, plan, input, layout) alone: not on the engine,
    the number of workers, or how often and in which order bundles run.
  - A file is visible under its final name only when it is complete; its checksum is
    written after it.
  - No key is part of the pipeline: workers read it from where the pipeline says.
  - No worker writes but into folders that the job has made, through ``storage``.
  - What fails in a worker is an InputError of one line, which names no row.

Public: the layout.  Sensitive: every element.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from accounting.plan import DpSgdPlan
from accounting.validation import InputError
from pipelines import progress
from pipelines.batch_format import (
    Column,
    as_items,
    encode_batch,
    row_bytes,
    write_record,
)
from pipelines.keys import read_key_file
from pipelines.manifest import PRIVATE_NAME, BatchFile, FileChecksum
from pipelines.parquet_blocks import Block, read_block
from pipelines.sampling import Participations, arrange_steps, sample_block
from pipelines.spill import read_slice, spill_path, write_spill
from pipelines.storage import join, read_bytes, write_atomically

_STEP = np.dtype("<u4")
_PRIORITY = np.dtype("<u8")
#: Bytes that travel with each packed row.
OVERHEAD_BYTES = _STEP.itemsize + _PRIORITY.itemsize

Element = tuple[int, tuple[int, bytes]]  # group, (ordinal of the block, packed rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How steps are spread over files.  Public; independent of the engine.

    Attributes:
      plan: How batches are sampled.
      columns: Columns of the rows.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Secrets:
    """Where workers find what nobody else must know; never the values.

    Attributes:
      key_file: The sampling key: a file on every worker, or one in a store, or a
        managed secret (see ``keys.read_key_file``).
      boundaries_file: Of a shuffle, the array from ``sampling.find_boundaries``.
    """

    key_file: str
    boundaries_file: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spill:
    """How the local runner shuffles: a folder, and the threads of map and reduce."""

    folder: str
    num_threads: int


def checksum_path(directory: str, name: str) -> str:
    """Where the checksum of the batch file ``name`` is kept until the job ends."""
    return join(directory, PRIVATE_NAME, "files", f"{name}.json")


def pack_element(
    columns: Mapping[str, np.ndarray], chosen: Participations, part: np.ndarray
) -> bytes:
    """Returns steps, priorities and columns of some participations as one buffer."""
    row = chosen.row[part]
    return b"".join(
        [
            chosen.step[part].astype(_STEP).tobytes(),
            chosen.priority[part].astype(_PRIORITY).tobytes(),
            *(np.take(items, row).tobytes() for items in columns.values()),
        ]
    )


def unpack_elements(
    elements: Iterable[bytes], columns: tuple[Column, ...]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Returns (step, priority, name -> items) of the concatenated ``elements``."""
    dtypes: list[np.dtype[Any]] = [_STEP, _PRIORITY]
    dtypes += [np.dtype(f"V{column.numpy_dtype.itemsize}") for column in columns]
    size = sum(dtype.itemsize for dtype in dtypes)
    pieces: list[list[np.ndarray]] = [[np.empty(0, dtype)] for dtype in dtypes]
    for data in elements:
        count, offset = len(data) // size, 0
        for dtype, column in zip(dtypes, pieces, strict=True):
            column.append(np.frombuffer(data, dtype, count, offset))
            offset += count * dtype.itemsize
    step, priority, *values = (np.concatenate(column) for column in pieces)
    names = [column.name for column in columns]
    return step, priority, dict(zip(names, values, strict=True))


def split_by_group(chosen: Participations, layout: Layout) -> list[np.ndarray]:
    """Returns, for each group, the indices of its participations."""
    group = chosen.step // layout.steps_per_group
    # Small integers are sorted by radix, in linear time.
    kind = np.uint16 if layout.num_groups <= 1 << 16 else np.int64
    order = np.argsort(group.astype(kind), kind="stable")
    edges = np.cumsum(np.bincount(group, minlength=layout.num_groups))
    return np.split(order, edges[:-1])


def sample_and_pack(
    layout: Layout,
    key: bytes,
    block: Block,
    groups: Iterable[int],
    boundaries: np.ndarray | None = None,
) -> Iterator[tuple[int, bytes]]:
    """Yields (group, packed rows that chose it) for each of ``groups``.  Sensitive."""
    columns = read_block(block, layout.columns)
    items = {name: as_items(values) for name, values in columns.items()}
    chosen = sample_block(layout.plan, key, block.rows, boundaries)
    parts = split_by_group(chosen, layout)
    for group in groups:
        yield group, pack_element(items, chosen, parts[group])


def encode_steps(
    layout: Layout, group: int, elements: Iterable[bytes]
) -> tuple[bytes, FileChecksum]:
    """Returns the contents of the file of ``group`` and their checksum.  Sensitive."""
    step, priority, columns = unpack_elements(elements, layout.columns)
    size, largest = layout.physical_batch_size, layout.plan.largest_batch_size
    steps = layout.steps(group)
    chosen = arrange_steps(step, priority, steps, layout.plan.truncated_batch_size)
    order = np.concatenate(chosen)
    # All rows of the group are put in order at once; batches are then slices.
    columns = {name: np.take(items, order) for name, items in columns.items()}
    file, start, num_records = io.BytesIO(), 0, 0
    for number, rows in zip(steps, chosen, strict=True):
        end, parts = start + len(rows), -(-(largest or max(1, len(rows))) // size)
        for part in range(parts):
            piece = slice(start + part * size, min(start + (part + 1) * size, end))
            record = encode_batch(
                {name: items[piece] for name, items in columns.items()},
                step=number,
                part=part,
                physical_batch_size=size,
            )
            write_record(file, record)
        start, num_records = end, num_records + parts
    data = file.getvalue()
    return data, FileChecksum(
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        num_records=num_records,
        num_real=len(order),
    )


def read_array(path: str) -> np.ndarray:
    """Returns the array in a ``.npy`` file."""
    return np.load(io.BytesIO(read_bytes(path)), allow_pickle=False)


def write_group(
    layout: Layout, directory: str, group: int, elements: Iterable[bytes]
) -> None:
    """Writes the file of ``group``, then its checksum."""
    data, checksum = encode_steps(layout, group, elements)
    name = layout.file(group).name
    write_atomically(join(directory, name), data)
    # Last: a file with a checksum is finished, and is not written again.
    text = json.dumps(dataclasses.asdict(checksum), sort_keys=True)
    write_atomically(checksum_path(directory, name), text.encode())


def check_delivery(ordinals: list[int], num_blocks: int, group: int) -> None:
    """Refuses a group that is not made of one element of every block.

    Raises:
      InputError: the engine lost or repeated elements.
    """
    if sorted(ordinals) != list(range(num_blocks)):
        raise InputError(
            f"Expected the engine to deliver one element of each of {num_blocks} "
            f"blocks for step group {group}; it delivered {len(ordinals)}. Run the job "
            "again, on a runner that loses and repeats nothing."
        )


#: How every failed job is finished.
AGAIN = "run the same command again: it goes on where it stopped."


def storage_error(error: OSError) -> InputError:
    """Returns what a full disk or a lost file means to the user."""
    reason = error.strerror or type(error).__name__
    where = f" ({error.filename})" if isinstance(error.filename, str) else ""
    return InputError(
        f"Expected files to be written and read: {reason}{where}. Make room or restore "
        f"access, then {AGAIN}"
    )


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turns every error into an InputError of one line.

    The message of an unforeseen error may quote rows, and would reach the logs of every
    engine: only its type and place are told.

    Raises:
      InputError: what went wrong, and how to go on.
    """
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise storage_error(error) from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        raise InputError(
            f"Expected no {type(error).__name__} in {frame.name} ({place}). If it is "
            f"not a fault of this machine, report it; then {AGAIN}"
        ) from None


class _BundleFn(beam.DoFn):
    """Runs the jobs of a bundle on the cores of this machine.

    What a job emits is known before it runs; a bundle ends when all its jobs have.
    """

    _num_threads = 1

    def start_bundle(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads)
        self._jobs: list[concurrent.futures.Future[None]] = []

    def finish_bundle(self) -> None:
        try:
            for job in concurrent.futures.as_completed(self._jobs):
                job.result()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def teardown(self) -> None:
        # A bundle that was given up does not end: nothing may go on writing.
        if hasattr(self, "_pool"):
            self._pool.shutdown(cancel_futures=True)


class _Mapper:
    """What both map steps know."""

    def __init__(self, layout: Layout, secrets: Secrets, groups: tuple[int, ...]):
        self._layout = layout
        self._secrets = secrets
        self._groups = groups
        self._blocks_read = Metrics.counter("dpsgd", "blocks_read")

    def setup(self) -> None:
        path = self._secrets.boundaries_file
        with plain_errors():
            self._key = read_key_file(self._secrets.key_file)
            self._boundaries = None if path is None else read_array(path)

    def _pieces(
        self, block: Block, groups: Iterable[int]
    ) -> Iterator[tuple[int, bytes]]:
        return sample_and_pack(self._layout, self._key, block, groups, self._boundaries)


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(Element)
class _SampleBlockFn(_Mapper, beam.DoFn):
    """Block -> (group, (ordinal of the block, packed rows)) for every group."""

    def process(self, block: Block) -> Iterator[Element]:
        with plain_errors():
            for group, data in self._pieces(block, self._groups):
                yield group, (block.ordinal, data)
        self._blocks_read.inc()
        progress.advance("blocks")


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(Element)
class _SpillBlockFn(_Mapper, _BundleFn):
    """The same, with the packed rows in a file and b"" in their place."""

    def __init__(
        self, layout: Layout, secrets: Secrets, groups: tuple[int, ...], spill: Spill
    ) -> None:
        super().__init__(layout, secrets, groups)
        self._folder = spill.folder
        self._num_threads = spill.num_threads

    def _spill_block(self, block: Block) -> None:
        path = spill_path(self._folder, block.ordinal)
        with plain_errors():
            if not path.exists():
                # All groups: a resumed job may want others than this run does.
                count = self._layout.num_groups
                write_spill(path, self._pieces(block, range(count)), count)
        progress.advance("blocks")

    def process(self, block: Block) -> Iterator[Element]:
        self._jobs.append(self._pool.submit(self._spill_block, block))
        self._blocks_read.inc()
        for group in self._groups:
            yield group, (block.ordinal, b"")


@beam.typehints.with_input_types(tuple[int, Iterable[tuple[int, bytes]]])
@beam.typehints.with_output_types(str)
class _WriteGroupFn(_BundleFn):
    """(group, elements) -> name of the file that then holds the group's steps."""

    def __init__(
        self, layout: Layout, directory: str, num_blocks: int, spill: Spill | None
    ) -> None:
        self._layout = layout
        self._directory = directory
        self._num_blocks = num_blocks
        self._folder = spill.folder if spill else None
        self._num_threads = spill.num_threads if spill else 1
        self._steps_written = Metrics.counter("dpsgd", "steps_written")

    def _write(self, group: int, elements: list[tuple[int, bytes]]) -> None:
        # Into the order of the blocks, so that arrival decides nothing.
        elements.sort()
        folder = self._folder
        pieces = (
            data if folder is None else read_slice(spill_path(folder, ordinal), group)
            for ordinal, data in elements
        )
        with plain_errors():
            write_group(self._layout, self._directory, group, pieces)
        progress.advance("steps", len(self._layout.steps(group)))

    def process(
        self, group_and_elements: tuple[int, Iterable[tuple[int, bytes]]]
    ) -> Iterator[str]:
        group, values = group_and_elements
        elements = list(values)  # once: Flink does not iterate twice
        check_delivery([ordinal for ordinal, _ in elements], self._num_blocks, group)
        if self._folder is None:
            self._write(group, elements)  # in turn: one group in memory
        else:
            self._jobs.append(self._pool.submit(self._write, group, elements))
        self._steps_written.inc(len(self._layout.steps(group)))
        yield self._layout.file(group).name


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(str)
class WriteBatches(beam.PTransform):
    """Samples blocks and writes the batches of some ranges of steps.

    Input: a PCollection of ``Block``, all of ``dataset.blocks``.  Output: the names of
    the files written.

    Args:
      layout: How steps are spread over files.
      directory: Where the files go, made by ``open_job``; any store that Beam knows.
      secrets: Where the workers find the sampling key and what derives from it.
      num_blocks: Elements of the input.
      groups: The ranges of steps to write; all by default.
      spill: For the local runner, where the shuffle goes through files; by default
        rows travel through the engine.

    Example:
      >>> _ = (pipeline | beam.Create(dataset.blocks)
      ...      | WriteBatches(layout, "batches",
      ...                     Secrets(key_file="sampling.key"),
      ...                     num_blocks=len(dataset.blocks)))  # doctest: +SKIP
    """

    def __init__(
        self,
        layout: Layout,
        directory: str,
        secrets: Secrets,
        *,
        num_blocks: int,
        groups: Iterable[int] | None = None,
        spill: Spill | None = None,
    ) -> None:
        super().__init__()
        everything = range(layout.num_groups)
        chosen = tuple(everything if groups is None else groups)
        self._sample: beam.DoFn = (
            _SampleBlockFn(layout, secrets, chosen)
            if spill is None
            else _SpillBlockFn(layout, secrets, chosen, spill)
        )
        self._write = _WriteGroupFn(layout, directory, num_blocks, spill)

    def expand(self, blocks: beam.PCollection) -> beam.PCollection:
        """Wires map, reduce, map."""
        return (
            blocks
            # A bounded read is one subtask on Flink: spread the blocks first.
            | "SpreadBlocks" >> beam.Reshuffle()  # Block
            | "SampleAndPack" >> beam.ParDo(self._sample)  # Element
            | "GroupBySteps" >> beam.GroupByKey()  # (group, [(ordinal, packed rows)])
            | "OrderTruncatePadWrite" >> beam.ParDo(self._write)  # file name
        )


def group_bytes(layout: Layout) -> int:
    """Bytes of the rows of the largest group that a reducer may be handed."""
    largest = layout.plan.largest_batch_size or layout.plan.expected_batch_size
    row = row_bytes(layout.columns) + OVERHEAD_BYTES
    return layout.steps_per_group * largest * row
