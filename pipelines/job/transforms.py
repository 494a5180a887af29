"""Map, reduce, map: blocks to fixed-size weighted batches, as Beam transforms.

Rows reach their steps in one of two ways.  Through files that every worker reaches;
then the engine carries only the numbers of blocks and groups:

    blocks -> sample, pack, spill -> await all blocks [-> sort parts -> await all parts]
    -> groups -> order, truncate, pad, write

or through the engine:

    blocks -> sample, pack -> group by range of steps -> order, truncate, pad, write

Elements are blocks, not rows.  For each range of steps the map step makes one piece of
the rows of some blocks that chose a step in it, even if there are none.  The reduce
step holds a group at a time or, through files, a unit of one: some tens of megabytes.
``fan_in`` says how many blocks share a file, and when parts are sorted.

Formal guarantees:
  - Every step of every requested group is written, even if no example chose it.
  - No element is lost or counted twice: a group is written only from exactly one piece
    of every block, whatever the engine delivered.
  - Only rows of the data set are sampled: a block whose place, name, rows or columns
    are not those of the data set is refused before it is read (``known_input``).
  - The bytes of a file depend on (key, plan, input, layout) alone: not on the engine,
    the way rows travel, the number of workers, or how often and in which order bundles
    run.
  - A file is visible under its final name only when it is complete; its checksum is
    written after it.  A finished file is not written again.
  - No key is part of the pipeline: it names the place where workers read the key.
  - Workers write only into folders that the job has made, through ``storage``.
  - An error in a worker is an InputError of one line, which names no row.

Public: the layout.  Sensitive: every element that holds rows.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from accounting.validation import InputError
from pipelines.files import storage
from pipelines.files.paths import is_remote, join
from pipelines.files.storage import new_file, write_atomically
from pipelines.inputs.known_input import KnownInput, know_input, not_blocks
from pipelines.inputs.parquet_blocks import Block, Dataset
from pipelines.job import progress
from pipelines.job.boundaries import BoundariesFile
from pipelines.job.fan_in import FanIn
from pipelines.job.job_folder import check_dataset, checksum_path, read_checksum
from pipelines.job.packing import (
    Layout,
    PackedRows,
    Unit,
    encode_steps,
    pack_again,
    sample_and_pack,
)
from pipelines.job.spill import (
    SliceReader,
    Spill,
    is_written,
    part_path,
    spill_path,
    write_spill,
)
from pipelines.sampling.keys import read_key_file

#: Slices of a store's files that a worker asks for at a time; a client of S3 keeps ten
#: connections.
_REQUESTS = 8

Element = tuple[int, tuple[int, bytes]]  # group, (ordinal of the block, packed rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Secrets:
    """Where workers find the secrets of a job; never their values.

    Attributes:
      key_file: The sampling key: a file on every worker, one in a store, or a managed
        secret (see ``keys.read_key_file``).
      boundaries: Of a shuffle, the file that ``boundaries.complete`` made.
    """

    key_file: str
    boundaries: BoundariesFile | None = None


def write_group(
    layout: Layout, directory: str, group: int, units: Iterable[Unit]
) -> None:
    """Writes the file of a group and then its checksum, unless they are there.

    Args:
      layout: Of the job.
      directory: Of the job.
      group: Which group.
      units: All of the group, in order.  Sensitive.

    Raises:
      OSError: no room, no access.
    """
    name = layout.file(group).name
    if read_checksum(directory, name, storage.size(join(directory, name))):
        return  # an engine that lost a worker may run a bundle again
    # The job does not read it again: memory is left to the shuffle.
    with new_file(join(directory, name), mode=0o600, cached=False) as write:
        checksum = encode_steps(layout, units, write)
    # Last: a file with a checksum is finished, and is not written again.
    text = json.dumps(dataclasses.asdict(checksum), sort_keys=True)
    write_atomically(checksum_path(directory, name), text.encode(), mode=0o600)


def check_delivery(found: Iterable[int], expected: Sequence[int]) -> None:
    """Refuses anything but each of the expected elements once.

    Args:
      found: Numbers of the elements that were delivered.
      expected: Numbers of the elements that were sent, ascending.

    Raises:
      InputError: the engine lost or repeated elements.
    """
    delivered = sorted(found)
    if delivered != list(expected):
        raise InputError(
            f"Expected the engine to deliver each of {len(expected)} elements once; "
            f"it delivered {len(delivered)}. Run the job again, on a runner that loses "
            "and repeats nothing."
        )


#: How to finish a job that failed.
AGAIN = "run the same command again: it goes on where it stopped."


def storage_error(error: OSError) -> InputError:
    """Returns the error for a full disk or a lost file, with a remedy."""
    reason = error.strerror or type(error).__name__
    where = f" ({error.filename})" if isinstance(error.filename, str) else ""
    return InputError(
        f"Expected files to be written and read: {reason}{where}. Make room or restore "
        f"access, then {AGAIN}"
    )


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turns every error into an InputError of one line.

    The message of an unexpected error may quote rows, and would reach the logs of the
    engine: only its type and place are kept.

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
    """Runs the jobs of a bundle, in several threads if it may.

    What a job emits is known before it runs; a bundle ends after all of its jobs.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def start_bundle(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads)
        self._jobs: list[concurrent.futures.Future[None]] = []

    def _run(self, job: Callable[..., None], *arguments: object) -> None:
        if self._num_threads == 1:
            job(*arguments)  # in turn, so that the engine sees its progress
        else:
            self._jobs.append(self._pool.submit(job, *arguments))

    def finish_bundle(self) -> None:
        try:
            for job in concurrent.futures.as_completed(self._jobs):
                job.result()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def teardown(self) -> None:
        # A bundle that was abandoned does not finish: nothing may go on writing.
        if hasattr(self, "_pool"):
            self._pool.shutdown(cancel_futures=True)


class _Sampler:
    """Reads blocks and lets their rows choose their steps.

    Args:
      layout: Of the job.
      secrets: Where they are.
      known: The data set.
      edges: Of the ranges of steps, as of ``packing.split_by_step``.
    """

    def __init__(
        self, layout: Layout, secrets: Secrets, known: KnownInput, edges: np.ndarray
    ) -> None:
        self._layout = layout
        self._edges = edges
        self._secrets = secrets
        self._known = known
        self._blocks_read = Metrics.counter("dpsgd", "blocks_read")

    def setup(self) -> None:
        file, plan = self._secrets.boundaries, self._layout.plan
        with plain_errors():
            sampling_key = read_key_file(self._secrets.key_file)
            self._key = self._known.data_set_key(sampling_key)
            self._boundaries = None if file is None else file.load(plan, self._key)

    def _check(self, block: Block) -> None:
        with plain_errors():
            self._known.check_block(self._key, block)

    def _pack(self, blocks: Sequence[Block]) -> PackedRows:
        is_listed = functools.partial(self._known.is_listed, self._key)
        return sample_and_pack(
            self._layout, self._key, blocks, is_listed, self._boundaries,
            edges=self._edges,
        )  # fmt: skip


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(Element)
class _SampleBlockFn(_Sampler, beam.DoFn):
    """Block -> (group, (ordinal of the block, packed rows)) for every group."""

    def __init__(
        self,
        layout: Layout,
        secrets: Secrets,
        known: KnownInput,
        groups: tuple[int, ...],
    ) -> None:
        super().__init__(layout, secrets, known, layout.group_edges())
        self._groups = groups

    def process(self, block: Block) -> Iterator[Element]:
        self._check(block)
        with plain_errors():
            packed = self._pack([block])
            for group in self._groups:
                yield group, (block.ordinal, packed.piece(group))
        self._blocks_read.inc()
        progress.advance("blocks")


@beam.typehints.with_input_types(tuple[Block, ...])
@beam.typehints.with_output_types(tuple[int, int])
class _SpillBlocksFn(_Sampler, _BundleFn):
    """Blocks of a file -> (0, ordinal) of each, with their packed rows in the file."""

    def __init__(
        self,
        layout: Layout,
        secrets: Secrets,
        known: KnownInput,
        spill: Spill,
        num_blocks: int,
    ) -> None:
        edges = _part_edges(layout, spill)
        _Sampler.__init__(self, layout, secrets, known, edges)
        _BundleFn.__init__(self, spill.num_threads)
        self._spill = spill
        self._num_blocks = num_blocks

    def _spill_blocks(self, blocks: Sequence[Block]) -> None:
        path = spill_path(self._spill.folder, blocks[0].ordinal)
        with plain_errors():
            if not is_written(path):
                # All steps: a resumed job may want others than this run does.
                _write_packed(path, self._pack(blocks), self._spill)
        progress.advance("blocks", len(blocks))

    def process(self, blocks: Iterable[Block]) -> Iterator[tuple[int, int]]:
        # Sorted: the order of arrival must not matter.
        run = sorted(blocks, key=lambda block: block.ordinal)
        for block in run:
            self._check(block)
        size = self._spill.fan_in.blocks_per_file
        first = run[0].ordinal // size * size
        expected = range(first, min(first + size, self._num_blocks))
        check_delivery((block.ordinal for block in run), expected)
        self._run(self._spill_blocks, run)
        self._blocks_read.inc(len(run))
        yield from ((0, block.ordinal) for block in run)


def _part_edges(layout: Layout, spill: Spill) -> np.ndarray:
    """The first step of each slice of a file of the map step, and the end."""
    edges = layout.unit_edges()
    return np.append(edges[:-1][:: spill.fan_in.units_per_part], edges[-1])


def _write_packed(path: str, packed: PackedRows, spill: Spill) -> None:
    pieces = map(packed.piece, range(len(packed.parts)))
    write_spill(path, packed.sizes, pieces, flush=spill.flush)


@beam.typehints.with_input_types(tuple[int, Iterable[int]])
@beam.typehints.with_output_types(int)
class _AwaitFn(beam.DoFn):
    """(0, all that was to be done) -> what can then be done."""

    def __init__(self, done: Sequence[int], then: Sequence[int]) -> None:
        self._done = done
        self._then = then

    def process(self, all_numbers: tuple[int, Iterable[int]]) -> Iterator[int]:
        check_delivery(all_numbers[1], self._done)
        yield from self._then


class _SliceReading(_BundleFn):
    """Reads the same slice of several files."""

    def __init__(self, spill: Spill, num_slices: int) -> None:
        super().__init__(spill.num_threads)
        self._spill = spill
        self._num_slices = num_slices

    def start_bundle(self) -> None:
        super().start_bundle()
        if not hasattr(self, "_slices"):  # it outlives the bundle
            self._slices = SliceReader(self._spill.folder, self._num_slices)

    def _read(self, paths: Iterable[str], number: int) -> Iterator[bytes]:
        def read(path: str) -> bytes:
            return self._slices.read(path, number)

        if not is_remote(self._spill.folder):
            yield from map(read, paths)
            return
        # A store takes a while to answer, and answers many requests at once.
        with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
            yield from pool.map(read, paths)


@beam.typehints.with_input_types(int)
@beam.typehints.with_output_types(tuple[int, int])
class _SortPartFn(_SliceReading):
    """Task of the second pass -> (0, task), with rows of a part in a file by unit."""

    def __init__(self, layout: Layout, num_blocks: int, spill: Spill) -> None:
        super().__init__(spill, spill.fan_in.num_parts(layout))
        self._columns = layout.columns
        edges = layout.unit_edges()
        units = self._num_slices * spill.fan_in.units_per_part
        # The last part may have fewer units; its files have as many slices as others.
        self._edges = np.append(edges, [edges[-1]] * (units + 1 - len(edges)))
        self._num_blocks = num_blocks

    def _sort(self, task: int) -> None:
        fan_in, folder = self._spill.fan_in, self._spill.folder
        part, merge = divmod(task, fan_in.num_merges(self._num_blocks))
        path = part_path(folder, part, merge)
        with plain_errors():
            if is_written(path):
                return
            blocks = fan_in.blocks_per_file * fan_in.files_per_merge
            ordinals = range(self._num_blocks)[merge * blocks : (merge + 1) * blocks]
            files = ordinals[:: fan_in.blocks_per_file]
            pieces = self._read((spill_path(folder, file) for file in files), part)
            first = part * fan_in.units_per_part
            edges = self._edges[first : first + fan_in.units_per_part + 1]
            _write_packed(path, pack_again(pieces, self._columns, edges), self._spill)

    def process(self, task: int) -> Iterator[tuple[int, int]]:
        self._run(self._sort, task)
        yield 0, task


class _Writer:
    """Writes the files of groups."""

    def __init__(self, layout: Layout, directory: str, num_blocks: int) -> None:
        self._layout = layout
        self._directory = directory
        self._num_blocks = num_blocks
        self._steps_written = Metrics.counter("dpsgd", "steps_written")

    def _write(self, group: int, units: Iterable[Unit]) -> None:
        with plain_errors():
            write_group(self._layout, self._directory, group, units)
        progress.advance("steps", len(self._layout.steps(group)))

    def _count(self, group: int) -> str:
        self._steps_written.inc(len(self._layout.steps(group)))
        return self._layout.file(group).name


@beam.typehints.with_input_types(tuple[int, Iterable[tuple[int, bytes]]])
@beam.typehints.with_output_types(str)
class _WriteGroupFn(_Writer, beam.DoFn):
    """(group, elements) -> name of the file that then holds the group's steps."""

    def process(
        self, group_and_elements: tuple[int, Iterable[tuple[int, bytes]]]
    ) -> Iterator[str]:
        group, values = group_and_elements
        # Iterated once: Flink allows no more.  Sorted: the order of arrival must not
        # matter.
        elements = sorted(values)
        ordinals = (ordinal for ordinal, _ in elements)
        check_delivery(ordinals, range(self._num_blocks))
        pieces = (data for _, data in elements)
        self._write(group, [(self._layout.steps(group), pieces)])
        yield self._count(group)


@beam.typehints.with_input_types(int)
@beam.typehints.with_output_types(str)
class _WriteSpilledFn(_Writer, _SliceReading):
    """Group -> name of the file that then holds the group's steps."""

    def __init__(
        self, layout: Layout, directory: str, num_blocks: int, spill: Spill
    ) -> None:
        _Writer.__init__(self, layout, directory, num_blocks)
        fan_in = spill.fan_in
        two_passes = fan_in.files_per_merge > 0
        slices = fan_in.units_per_part if two_passes else layout.num_units
        _SliceReading.__init__(self, spill, slices)

    def _pieces(self, unit: int) -> Iterator[bytes]:
        fan_in, folder = self._spill.fan_in, self._spill.folder
        if fan_in.files_per_merge:
            part, number = divmod(unit, fan_in.units_per_part)
            merges = range(fan_in.num_merges(self._num_blocks))
            return self._read((part_path(folder, part, i) for i in merges), number)
        files = range(0, self._num_blocks, fan_in.blocks_per_file)
        return self._read((spill_path(folder, file) for file in files), unit)

    def _units(self, group: int) -> Iterator[Unit]:
        size, edges = self._layout.units_per_group, self._layout.unit_edges()
        for unit in range(group * size, (group + 1) * size):
            if steps := range(edges[unit], edges[unit + 1]):
                yield steps, self._pieces(unit)

    def process(self, group: int) -> Iterator[str]:
        self._run(lambda: self._write(group, self._units(group)))
        yield self._count(group)


@beam.typehints.with_input_types(tuple[int, int])
@beam.typehints.with_output_types(int)
class _Await(beam.PTransform):
    """(0, number) of all that was to be done -> what can then be done."""

    def __init__(self, done: Sequence[int], then: Sequence[int]) -> None:
        super().__init__()
        self._then = _AwaitFn(done, then)

    def expand(self, numbers: beam.PCollection) -> beam.PCollection:
        return (
            numbers
            | "All" >> beam.GroupByKey()  # (0, [number])
            | "Then" >> beam.ParDo(self._then)
            | "Spread" >> beam.Reshuffle()
        )


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(tuple[Block, ...])
class _SpreadBlocks(beam.PTransform):
    """Block -> the blocks that share a file.

    They are spread over the workers: a bounded read is one subtask on Flink.
    """

    def __init__(self, blocks_per_file: int) -> None:
        super().__init__()
        self._blocks_per_file = blocks_per_file

    def expand(self, blocks: beam.PCollection) -> beam.PCollection:
        return (
            blocks
            | "Number" >> beam.Map(_with_file, self._blocks_per_file)
            | "File" >> beam.GroupByKey()  # (file, [Block])
            | "Blocks" >> beam.Map(_of_file)
            | "Spread" >> beam.Reshuffle()
        )


def _with_file(block: Block, blocks_per_file: int) -> tuple[int, Block]:
    if not isinstance(block, Block):
        raise not_blocks(type(block).__name__)
    return block.ordinal // blocks_per_file, block


def _of_file(file: tuple[int, Iterable[Block]]) -> tuple[Block, ...]:
    return tuple(file[1])


class TakesBlocks(beam.PTransform):
    """A transform of blocks; of other elements it says what to write instead."""

    def type_check_inputs(self, pvalueish: Any) -> None:
        """Refuses everything but one PCollection of blocks.

        Raises:
          InputError: what to write instead.
        """
        kind: Any = type(pvalueish)
        if isinstance(pvalueish, beam.PCollection):
            kind = pvalueish.element_type
        if kind is not Block:
            # Unknown is refused too: rows of ReadFromParquet are of no known type.
            name = getattr(kind, "__name__", str(kind))
            raise not_blocks(name, type(self).__name__)


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(str)
class WriteBatches(TakesBlocks):
    """Samples blocks and writes the batches of some groups.

    Input: a PCollection of ``Block``, all of ``dataset.blocks``.  Output: the names of
    the files written.

    Args:
      layout: How steps are spread over files.
      directory: Where the files go, made by ``open_job``; any store that Beam knows.
      secrets: Where the workers find the sampling key and what derives from it.
      dataset: The input, whose blocks are the elements.
      groups: The groups to write; all by default.
      spill: Folder of a shuffle through files; by default rows go through the engine.

    Raises:
      InputError: ``layout`` was made for another data set.

    Example:
      >>> _ = (pipeline | beam.Create(dataset.blocks)
      ...      | WriteBatches(layout, "batches",
      ...                     Secrets(key_file="sampling.key"),
      ...                     dataset=dataset))  # doctest: +SKIP
    """

    def __init__(
        self,
        layout: Layout,
        directory: str,
        secrets: Secrets,
        *,
        dataset: Dataset,
        groups: Iterable[int] | None = None,
        spill: Spill | None = None,
    ) -> None:
        super().__init__()
        check_dataset(layout, dataset)
        everything = range(layout.num_groups)
        self._groups = tuple(everything if groups is None else groups)
        self._layout = layout
        self._directory = directory
        self._secrets = secrets
        self._dataset = dataset
        self._spill = spill

    def expand(self, blocks: beam.PCollection) -> beam.PCollection:
        """Wires map, reduce, map.

        Raises:
          InputError: the key file is refused.
        """
        known = know_input(read_key_file(self._secrets.key_file), self._dataset)
        if self._spill is None:
            return self._through_engine(blocks, known)
        return self._through_files(blocks, known, self._spill)

    def _through_files(
        self, blocks: beam.PCollection, known: KnownInput, spill: Spill
    ) -> beam.PCollection:
        layout, directory = self._layout, self._directory
        num_blocks = len(self._dataset.blocks)
        sample = _SpillBlocksFn(layout, self._secrets, known, spill, num_blocks)
        write = _WriteSpilledFn(layout, directory, num_blocks, spill)
        done: Sequence[int] = range(num_blocks)
        found = (
            blocks
            | "SpreadBlocks" >> _SpreadBlocks(spill.fan_in.blocks_per_file)
            | "SampleAndPack" >> beam.ParDo(sample)  # (0, ordinal)
        )
        if spill.fan_in.files_per_merge:
            tasks = self._sorting_tasks(spill.fan_in)
            sort = _SortPartFn(layout, num_blocks, spill)
            found = (
                found
                | "AwaitBlocks" >> _Await(done, tasks)  # task
                | "SortParts" >> beam.ParDo(sort)  # (0, task)
            )
            done = tasks
        return (
            found
            | "AwaitFiles" >> _Await(done, self._groups)  # group
            | "OrderTruncatePadWrite" >> beam.ParDo(write)  # file name
        )

    def _sorting_tasks(self, fan_in: FanIn) -> list[int]:
        """Returns the tasks of the second pass, for the groups that are wanted."""
        layout, merges = self._layout, fan_in.num_merges(len(self._dataset.blocks))
        first = np.asarray(self._groups, np.int64) * layout.units_per_group
        units = first[:, None] + np.arange(layout.units_per_group)
        parts = np.unique(units // fan_in.units_per_part)
        return (parts[:, None] * merges + np.arange(merges)).ravel().tolist()

    def _through_engine(
        self, blocks: beam.PCollection, known: KnownInput
    ) -> beam.PCollection:
        num_blocks = len(self._dataset.blocks)
        sample = _SampleBlockFn(self._layout, self._secrets, known, self._groups)
        write = _WriteGroupFn(self._layout, self._directory, num_blocks)
        return (
            blocks
            | "SpreadBlocks" >> beam.Reshuffle()  # Block
            | "SampleAndPack" >> beam.ParDo(sample)  # Element
            | "GroupBySteps" >> beam.GroupByKey()  # (group, [(ordinal, packed rows)])
            | "OrderTruncatePadWrite" >> beam.ParDo(write)  # file name
        )
