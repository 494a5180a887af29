"""Map, reduce, map: blocks to fixed-size weighted batches, as Beam transforms.

Rows reach their steps in one of two ways.  Through files that every worker reaches;
then the engine carries only the numbers of blocks and groups:

    blocks -> sample, pack, spill -> await all blocks -> groups -> order, truncate, pad,
    write

or through the engine:

    blocks -> sample, pack -> group by range of steps -> order, truncate, pad, write

Elements are blocks, not rows.  For each range of steps (a group), the map step makes
one piece of the rows of a block that chose a step in it, even if there are none.  The
reduce step holds one group at a time, some tens of megabytes.

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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics

from accounting.validation import InputError
from pipelines.files import storage
from pipelines.files.paths import is_remote, join
from pipelines.files.storage import new_file, write_atomically
from pipelines.inputs.known_input import KnownInput, know_input, not_blocks
from pipelines.inputs.parquet_blocks import Block, Dataset
from pipelines.job import progress
from pipelines.job.boundaries import BoundariesFile
from pipelines.job.job_folder import check_dataset, checksum_path, read_checksum
from pipelines.job.packing import Layout, PackedBlock, encode_steps, sample_and_pack
from pipelines.job.spill import Spill, read_slice, spill_path, write_spill
from pipelines.sampling.keys import read_key_file

#: Slices of a store's files that a worker asks for at a time.
_REQUESTS = 16

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
    layout: Layout, directory: str, group: int, pieces: Iterable[bytes]
) -> None:
    """Writes the file of a group and then its checksum, unless they are there.

    Args:
      layout: Of the job.
      directory: Of the job.
      group: Which group.
      pieces: The piece of each block, in the order of the blocks.  Sensitive.

    Raises:
      OSError: no room, no access.
    """
    name = layout.file(group).name
    if read_checksum(directory, name, storage.size(join(directory, name))):
        return  # an engine that lost a worker may run a bundle again
    # The job does not read it again: memory is left to the shuffle.
    with new_file(join(directory, name), mode=0o600, cached=False) as write:
        checksum = encode_steps(layout, group, pieces, write)
    # Last: a file with a checksum is finished, and is not written again.
    text = json.dumps(dataclasses.asdict(checksum), sort_keys=True)
    write_atomically(checksum_path(directory, name), text.encode(), mode=0o600)


def check_delivery(ordinals: list[int], num_blocks: int) -> None:
    """Refuses anything but one element of every block.

    Args:
      ordinals: Of the blocks whose elements were delivered.
      num_blocks: Blocks of the data set.

    Raises:
      InputError: the engine lost or repeated elements.
    """
    if sorted(ordinals) != list(range(num_blocks)):
        raise InputError(
            f"Expected the engine to deliver one element of each of {num_blocks} "
            f"blocks; it delivered {len(ordinals)}. Run the job again, on a runner "
            "that loses and repeats nothing."
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
    """Reads a block and lets its rows choose their steps."""

    def __init__(self, layout: Layout, secrets: Secrets, known: KnownInput) -> None:
        self._layout = layout
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

    def _pack(self, block: Block) -> PackedBlock:
        is_listed = functools.partial(self._known.is_listed, self._key)
        return sample_and_pack(
            self._layout, self._key, block, is_listed, self._boundaries
        )

    def _count(self) -> None:
        self._blocks_read.inc()


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
        super().__init__(layout, secrets, known)
        self._groups = groups

    def process(self, block: Block) -> Iterator[Element]:
        self._check(block)
        with plain_errors():
            packed = self._pack(block)
            for group in self._groups:
                yield group, (block.ordinal, packed.piece(group))
        self._count()
        progress.advance("blocks")


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(tuple[int, int])
class _SpillBlockFn(_Sampler, _BundleFn):
    """Block -> (0, its ordinal), with its packed rows in a file."""

    def __init__(
        self, layout: Layout, secrets: Secrets, known: KnownInput, spill: Spill
    ) -> None:
        _Sampler.__init__(self, layout, secrets, known)
        _BundleFn.__init__(self, spill.num_threads)
        self._spill = spill

    def _spill_block(self, block: Block) -> None:
        path = spill_path(self._spill.folder, block.ordinal)
        with plain_errors():
            if not storage.exists(path):
                # All groups: a resumed job may want others than this run does.
                packed = self._pack(block)
                pieces = map(packed.piece, range(self._layout.num_groups))
                write_spill(path, packed.sizes, pieces, flush=self._spill.flush)
        progress.advance("blocks")

    def process(self, block: Block) -> Iterator[tuple[int, int]]:
        self._check(block)
        self._run(self._spill_block, block)
        self._count()
        yield 0, block.ordinal


@beam.typehints.with_input_types(tuple[int, Iterable[int]])
@beam.typehints.with_output_types(int)
class _GroupsFn(beam.DoFn):
    """(0, ordinals of all blocks) -> the groups, which can now be written."""

    def __init__(self, groups: tuple[int, ...], num_blocks: int) -> None:
        self._groups = groups
        self._num_blocks = num_blocks

    def process(self, all_blocks: tuple[int, Iterable[int]]) -> Iterator[int]:
        check_delivery(list(all_blocks[1]), self._num_blocks)
        yield from self._groups


class _Writer(_BundleFn):
    """Writes the files of groups."""

    def __init__(
        self, layout: Layout, directory: str, num_blocks: int, num_threads: int = 1
    ) -> None:
        super().__init__(num_threads)
        self._layout = layout
        self._directory = directory
        self._num_blocks = num_blocks
        self._steps_written = Metrics.counter("dpsgd", "steps_written")

    def _write(self, group: int, pieces: Iterable[bytes]) -> None:
        with plain_errors():
            write_group(self._layout, self._directory, group, pieces)
        progress.advance("steps", len(self._layout.steps(group)))

    def _count(self, group: int) -> str:
        self._steps_written.inc(len(self._layout.steps(group)))
        return self._layout.file(group).name


@beam.typehints.with_input_types(tuple[int, Iterable[tuple[int, bytes]]])
@beam.typehints.with_output_types(str)
class _WriteGroupFn(_Writer):
    """(group, elements) -> name of the file that then holds the group's steps."""

    def process(
        self, group_and_elements: tuple[int, Iterable[tuple[int, bytes]]]
    ) -> Iterator[str]:
        group, values = group_and_elements
        # Iterated once: Flink allows no more.  Sorted: the order of arrival must not
        # matter.
        elements = sorted(values)
        check_delivery([ordinal for ordinal, _ in elements], self._num_blocks)
        self._write(group, (data for _, data in elements))
        yield self._count(group)


@beam.typehints.with_input_types(int)
@beam.typehints.with_output_types(str)
class _WriteSpilledFn(_Writer):
    """Group -> name of the file that then holds the group's steps."""

    def __init__(
        self, layout: Layout, directory: str, num_blocks: int, spill: Spill
    ) -> None:
        super().__init__(layout, directory, num_blocks, spill.num_threads)
        self._folder = spill.folder

    def _pieces(self, group: int) -> Iterator[bytes]:
        def read(ordinal: int) -> bytes:
            return read_slice(spill_path(self._folder, ordinal), group)

        if not is_remote(self._folder):
            yield from map(read, range(self._num_blocks))
            return
        # A store takes a while to answer, and answers many requests at once.
        with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
            yield from pool.map(read, range(self._num_blocks))

    def process(self, group: int) -> Iterator[str]:
        self._run(lambda: self._write(group, self._pieces(group)))
        yield self._count(group)


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
        # A bounded read is one subtask on Flink: spread the blocks first.
        blocks = blocks | "SpreadBlocks" >> beam.Reshuffle()  # Block
        if self._spill is None:
            return self._through_engine(blocks, known)
        return self._through_files(blocks, known, self._spill)

    def _through_files(
        self, blocks: beam.PCollection, known: KnownInput, spill: Spill
    ) -> beam.PCollection:
        layout, directory = self._layout, self._directory
        num_blocks = len(self._dataset.blocks)
        sample = _SpillBlockFn(layout, self._secrets, known, spill)
        write = _WriteSpilledFn(layout, directory, num_blocks, spill)
        return (
            blocks
            | "SampleAndPack" >> beam.ParDo(sample)  # (0, ordinal)
            | "AwaitBlocks" >> beam.GroupByKey()  # (0, [ordinal])
            | "StepGroups" >> beam.ParDo(_GroupsFn(self._groups, num_blocks))  # group
            | "SpreadGroups" >> beam.Reshuffle()  # group
            | "OrderTruncatePadWrite" >> beam.ParDo(write)  # file name
        )

    def _through_engine(
        self, blocks: beam.PCollection, known: KnownInput
    ) -> beam.PCollection:
        num_blocks = len(self._dataset.blocks)
        sample = _SampleBlockFn(self._layout, self._secrets, known, self._groups)
        write = _WriteGroupFn(self._layout, self._directory, num_blocks)
        return (
            blocks
            | "SampleAndPack" >> beam.ParDo(sample)  # Element
            | "GroupBySteps" >> beam.GroupByKey()  # (group, [(ordinal, packed rows)])
            | "OrderTruncatePadWrite" >> beam.ParDo(write)  # file name
        )
