"""Map and reduce: blocks to files of fixed-size weighted batches, in Beam.

Rows reach their steps through files that every worker reaches, so that the engine
carries only the numbers of blocks and groups:

    blocks -> sample, pack, spill -> await all blocks -> groups -> order, truncate, pad,
    write

Elements are blocks, not rows.  For each range of steps the map step makes one piece, of
the rows that chose a step in it, even if there are none.  The reduce step holds a unit
of a group at a time: some tens of megabytes.

What the transforms promise:
  - Every step of every requested group is written, even if no example chose it.
  - No element is lost or counted twice: a group is written only from exactly one piece
    of every block, whatever the engine delivered.
  - Only rows of the data set are sampled: the blocks are made here, and a file that is
    not the listed one is refused before it is read (``KnownInput``).
  - The bytes of a file depend only on (key, plan, input, layout): not on the engine,
    the number of workers, or how often and in which order bundles run.
  - A file is visible under its final name only when it is complete; its checksum is
    written after it.  A finished file is not written again.
  - A bundle ends after all of its work, or with an error; an abandoned bundle writes
    nothing more.
  - No key is part of the pipeline: it names the place where workers read the key.
  - Workers write only into folders that the job has made, through ``storage``.

Public: the layout.  Sensitive: files, which hold rows.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.choices import PlanSampler
from pipelines.files import storage
from pipelines.files.key_sources import read_key_file
from pipelines.files.storage import join, new_file, write_atomically
from pipelines.inputs.parquet_blocks import Block, Dataset, KnownInput, know_input
from pipelines.job import runtime
from pipelines.job.job_folder import checksum_path, read_checksum
from pipelines.job.packing import Layout, Unit, encode_steps, sample_and_pack
from pipelines.job.runtime import plain_errors
from pipelines.job.spill import SliceReader, Spill, is_written, spill_path, write_spill

#: Number of slices that a worker requests from a store at once; s3fs keeps ten
#: connections.
_REQUESTS = 8


class BundleFn(beam.DoFn):
    """Runs the jobs of a bundle on threads; the bundle ends after all of its jobs.

    The output of a job is known before it runs.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def start_bundle(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads)
        self._jobs: list[concurrent.futures.Future[None]] = []

    def _run(self, job: Callable[..., None], *arguments: object) -> None:
        if self._num_threads == 1:
            job(*arguments)  # at once, so that the engine sees progress
        else:
            self._jobs.append(self._pool.submit(job, *arguments))

    def finish_bundle(self) -> None:
        try:
            for job in concurrent.futures.as_completed(self._jobs):
                job.result()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def teardown(self) -> None:
        # An abandoned bundle is not finished, and must write nothing more.
        if hasattr(self, "_pool"):
            self._pool.shutdown(cancel_futures=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Secrets:
    """Where workers find the secrets of a job; never their values.

    Attributes:
      key_file: Place of the sampling key: a file on every worker, one in a store, or a
        managed secret (see ``key_sources.read_key_file``).
      starts: File of the ranks that start the steps of a shuffle, if it is one.
    """

    key_file: str
    starts: str | None = None

    def sampler(self, plan: DpSgdPlan, known: KnownInput) -> PlanSampler:
        """Returns the sampler of a job, as a worker needs it.  Sensitive.

        Args:
          plan: Plan of the job.
          known: Digests of the data set.
        """
        starts = np.empty((0, 2, 0), np.uint64)
        if self.starts is not None:
            found = np.frombuffer(storage.read_bytes(self.starts), "<u8")
            starts = found.reshape(plan.num_shuffles, 2, plan.steps_per_epoch - 1)
        key = known.data_set_key(read_key_file(self.key_file))
        return PlanSampler(plan=plan, key=key, starts=starts)


@beam.typehints.with_input_types(tuple[Block, ...])
@beam.typehints.with_output_types(tuple[int, int])
class SpillBlocksFn(BundleFn):
    """Blocks that share a file -> (0, ordinal) of each; writes the file.

    Every block has a piece for every unit, even if no example chose it.

    Args:
      layout: Layout of the job.
      secrets: Secrets of the job.
      known: Digests of the data set.
      spill: The files of rows.
    """

    def __init__(
        self, layout: Layout, secrets: Secrets, known: KnownInput, spill: Spill
    ) -> None:
        super().__init__(spill.num_threads)
        self._layout, self._secrets, self._known = layout, secrets, known
        self._spill = spill
        self._blocks_read = Metrics.counter("dpsgd", "blocks_read")

    def setup(self) -> None:
        with plain_errors():
            self._sampler = self._secrets.sampler(self._layout.plan, self._known)

    def _spill_blocks(self, blocks: Sequence[Block]) -> None:
        path = spill_path(self._spill.folder, blocks[0].ordinal)
        with plain_errors():
            if not is_written(path):
                # All steps: a resumed job may need others.
                is_listed = functools.partial(self._known.is_listed, self._sampler.key)
                packed = sample_and_pack(self._layout, self._sampler, blocks, is_listed)
                pieces = map(packed.piece, range(len(packed.parts)))
                write_spill(path, packed.sizes, pieces, flush=self._spill.flush)
        runtime.advance(runtime.BLOCKS, len(blocks))

    def process(self, blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
        self._run(self._spill_blocks, blocks)
        self._blocks_read.inc(len(blocks))
        yield from ((0, block.ordinal) for block in blocks)


@beam.typehints.with_input_types(tuple[int, Iterable[int]])
@beam.typehints.with_output_types(int)
class _AwaitFn(beam.DoFn):
    """(0, ordinals of all blocks) -> numbers of the groups that follow."""

    def __init__(self, num_blocks: int, groups: Sequence[int]) -> None:
        self._num_blocks, self._groups = num_blocks, groups

    def process(self, all_blocks: tuple[int, Iterable[int]]) -> Iterator[int]:
        delivered = sorted(all_blocks[1])
        if delivered != list(range(self._num_blocks)):
            raise InputError(
                f"Expected the engine to deliver each of {self._num_blocks} elements "
                f"once; it delivered {len(delivered)}. Use one that loses none."
            )
        yield from self._groups


@beam.typehints.with_input_types(int)
@beam.typehints.with_output_types(str)
class WriteSpilledFn(BundleFn):
    """Group -> name of the file of the group.

    Args:
      layout: Layout of the job.
      directory: Directory of the job.
      num_blocks: Number of blocks of the data set.
      spill: The files of rows.
    """

    def __init__(
        self, layout: Layout, directory: str, num_blocks: int, spill: Spill
    ) -> None:
        super().__init__(spill.num_threads)
        self._layout, self._directory = layout, directory
        self._num_blocks, self._spill = num_blocks, spill
        self._steps_written = Metrics.counter("dpsgd", "steps_written")

    def start_bundle(self) -> None:
        super().start_bundle()
        if not hasattr(self, "_slices"):  # kept for later bundles
            self._slices = SliceReader(self._layout.num_units)

    def _pieces(self, unit: int) -> Iterator[bytes]:
        def read(block: int) -> bytes:
            return self._slices.read(spill_path(self._spill.folder, block), unit)

        first_blocks = range(0, self._num_blocks, self._spill.blocks_per_file)
        if not storage.is_remote(self._spill.folder):
            yield from map(read, first_blocks)
            return
        # A store answers slowly, but many requests at once.
        with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
            yield from pool.map(read, first_blocks)

    def _units(self, group: int) -> Iterator[Unit]:
        size, edges = self._layout.units_per_group, self._layout.unit_edges()
        for unit in range(group * size, (group + 1) * size):
            if steps := range(edges[unit], edges[unit + 1]):
                yield steps, self._pieces(unit)

    def _write(self, group: int) -> None:
        name, folder = self._layout.file(group).name, self._directory
        path = join(folder, name)
        with plain_errors():
            # An engine that lost a worker may run a bundle again.
            if not read_checksum(folder, name, storage.size(path)):
                # Not cached: the job reads the files of rows, but not this one.
                with new_file(path, mode=0o600, cached=False) as write:
                    checksum = encode_steps(self._layout, self._units(group), write)
                # Last: a file with a checksum is finished.
                text = json.dumps(checksum.to_json(), sort_keys=True)
                write_atomically(checksum_path(folder, name), text.encode(), mode=0o600)
        runtime.advance(runtime.STEPS, len(self._layout.steps(group)))

    def process(self, group: int) -> Iterator[str]:
        self._run(self._write, group)
        self._steps_written.inc(len(self._layout.steps(group)))
        yield self._layout.file(group).name


def write_groups(
    begin: beam.Pipeline | beam.pvalue.PBegin,
    layout: Layout,
    directory: str,
    secrets: Secrets,
    *,
    dataset: Dataset,
    spill: Spill,
    groups: Sequence[int],
) -> beam.PCollection:
    """Samples the blocks of a data set and writes the batches of some groups.

    Args:
      begin: The pipeline.
      layout: Layout of the job.
      directory: Folder for the files, from ``open_job``; local or in a store.
      secrets: Where workers find the sampling key and the boundaries.
      dataset: The input.
      spill: The files of rows, in a folder that every worker reaches.
      groups: Groups to write.

    Returns:
      The names of the files written.

    Raises:
      InputError: the key file is refused.
    """
    known = know_input(read_key_file(secrets.key_file), dataset)
    blocks, size = dataset.blocks, spill.blocks_per_file
    files = [blocks[at : at + size] for at in range(0, len(blocks), size)]
    sample = SpillBlocksFn(layout, secrets, known, spill)
    write = WriteSpilledFn(layout, directory, len(blocks), spill)
    return (
        begin
        | "Files" >> beam.Create(files)  # blocks of a file
        | "SampleAndPack" >> beam.ParDo(sample)  # (0, ordinal)
        | "AllBlocks" >> beam.GroupByKey()  # (0, [ordinal])
        | "Groups" >> beam.ParDo(_AwaitFn(len(blocks), groups))  # group
        | "Spread" >> beam.Reshuffle()
        | "OrderTruncatePadWrite" >> beam.ParDo(write)  # file name
    )
