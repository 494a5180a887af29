"""Map, reduce, map: blocks to fixed-size weighted batches, as Beam transforms.

Rows reach their steps through files that every worker reaches, so that the engine
carries only the numbers of blocks and groups:

    blocks -> sample, pack, spill -> await all blocks -> groups -> order, truncate, pad,
    write

Elements are blocks, not rows.  For each range of steps the map step makes one piece, of
the rows that chose a step in it, even if there are none.  The reduce step holds a unit
of a group at a time: some tens of megabytes.

Formal guarantees:
  - Every step of every requested group is written, even if no example chose it.
  - No element is lost or counted twice: a group is written only from exactly one piece
    of every block, whatever the engine delivered.
  - Only rows of the data set are sampled: the transform makes the blocks itself, and a
    file that is not the listed one is refused before it is read (``KnownInput``).
  - The bytes of a file depend only on (key, plan, input, layout): not on the engine,
    the number of workers, or how often and in which order bundles run.
  - A file is visible under its final name only when it is complete; its checksum is
    written after it.  A finished file is not written again.
  - No key is part of the pipeline: it names the place where workers read the key.
  - Workers write only into folders that the job has made, through ``storage``.
  - An error in a worker is an InputError of one line, which names no row.

Public: the layout.  Sensitive: every element that holds rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import apache_beam as beam

from accounting.core.validation import InputError
from pipelines.files.key_sources import read_key_file
from pipelines.inputs.parquet_blocks import Dataset, know_input
from pipelines.job.do_fns import (
    Secrets,
    SpillBlocksFn,
    WriteSpilledFn,
    check_delivery,
)
from pipelines.job.job_folder import check_dataset
from pipelines.job.packing import Layout
from pipelines.job.spill import Spill


@beam.typehints.with_input_types(tuple[int, Iterable[int]])
@beam.typehints.with_output_types(int)
class _AwaitFn(beam.DoFn):
    """(0, numbers of all elements) -> numbers of the elements that follow."""

    def __init__(self, done: Sequence[int], then: Sequence[int]) -> None:
        self._done = done
        self._then = then

    def process(self, all_numbers: tuple[int, Iterable[int]]) -> Iterator[int]:
        check_delivery(all_numbers[1], self._done)
        yield from self._then


def check_begin(begin: object) -> None:
    """Refuses a step before the transform, which reads the data set itself.

    Raises:
      InputError: the transform is not the first of a pipeline.
    """
    if not isinstance(begin, beam.pvalue.PBegin):
        raise InputError(
            "Expected no step before the batches: they read the data set themselves. "
            "Write `pipeline | PoissonBatches(plan, dataset, ...)`."
        )


@beam.typehints.with_output_types(str)
class WriteBatches(beam.PTransform):
    """Samples blocks and writes the batches of some groups.

    Applied to a pipeline.  Output: the names of the files written.

    Args:
      layout: Layout of the job.
      directory: Folder for the files, from ``open_job``; local or in a store.
      secrets: Where workers find the sampling key and the boundaries.
      dataset: The input.
      spill: The shuffle: a folder that every worker reaches.
      groups: Groups to write; all by default.

    Raises:
      InputError: ``layout`` was made for another data set.

    Example:
      >>> _ = pipeline | WriteBatches(layout, "batches",
      ...                             Secrets(key_file="sampling.key"),
      ...                             dataset=dataset, spill=spill)  # doctest: +SKIP
    """

    def __init__(
        self,
        layout: Layout,
        directory: str,
        secrets: Secrets,
        *,
        dataset: Dataset,
        spill: Spill,
        groups: Iterable[int] | None = None,
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

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """Wires map, reduce, map.

        Raises:
          InputError: there is a step before, or the key file is refused.
        """
        check_begin(begin)
        known = know_input(read_key_file(self._secrets.key_file), self._dataset)
        spill, blocks = self._spill, self._dataset.blocks
        size = spill.blocks_per_file
        files = [blocks[at : at + size] for at in range(0, len(blocks), size)]
        sample = SpillBlocksFn(self._layout, self._secrets, known, spill)
        then = _AwaitFn(range(len(blocks)), self._groups)
        write = WriteSpilledFn(self._layout, self._directory, len(blocks), spill)
        return (
            begin
            | "Files" >> beam.Create(files)  # blocks of a file
            | "SampleAndPack" >> beam.ParDo(sample)  # (0, ordinal)
            | "AllBlocks" >> beam.GroupByKey()  # (0, [ordinal])
            | "Groups" >> beam.ParDo(then)  # group
            | "Spread" >> beam.Reshuffle()
            | "OrderTruncatePadWrite" >> beam.ParDo(write)  # file name
        )
