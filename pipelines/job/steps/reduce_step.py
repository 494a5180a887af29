"""The reduce step: packed rows of all blocks to the files of batches.

A shuffle through files may have two passes, of which the first sorts parts by unit.

Formal guarantees:
  - A group is written only from exactly one piece of every block.
  - A file is visible under its final name only when it is complete; its checksum is
    written after it.  A finished file is not written again.

Sensitive: every piece.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterable, Iterator

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from pipelines.files import storage
from pipelines.files.storage import is_remote, join, new_file, write_atomically
from pipelines.job import progress
from pipelines.job.job_folder import checksum_path, read_checksum
from pipelines.job.packing import Layout, Unit, encode_steps, pack_again
from pipelines.job.runtime import plain_errors
from pipelines.job.spill import SliceReader, Spill, is_written, part_path, spill_path
from pipelines.job.steps.map_step import BundleFn, check_delivery, write_packed

#: Number of slices that a worker requests from a store at once; s3fs keeps ten
#: connections.
_REQUESTS = 8


def write_group(
    layout: Layout, directory: str, group: int, units: Iterable[Unit]
) -> None:
    """Writes the file of a group and then its checksum, unless they are there.

    Args:
      layout: Layout of the job.
      directory: Directory of the job.
      group: Number of the group.
      units: Units of the group, in order.  Sensitive.

    Raises:
      OSError: no room, or no access.
    """
    name = layout.file(group).name
    if read_checksum(directory, name, storage.size(join(directory, name))):
        return  # an engine that lost a worker may run a bundle again
    # Not cached: the job reads the files of its shuffle, but not this one.
    with new_file(join(directory, name), mode=0o600, cached=False) as write:
        checksum = encode_steps(layout, units, write)
    # Last: a file with a checksum is finished.
    text = json.dumps(checksum.to_json(), sort_keys=True)
    write_atomically(checksum_path(directory, name), text.encode(), mode=0o600)


class _SliceReading(BundleFn):
    """A DoFn that reads the same slice of several files."""

    def __init__(self, spill: Spill, num_slices: int) -> None:
        super().__init__(spill.num_threads)
        self._spill = spill
        self._num_slices = num_slices

    def start_bundle(self) -> None:
        super().start_bundle()
        if not hasattr(self, "_slices"):  # kept for later bundles
            self._slices = SliceReader(self._spill.folder, self._num_slices)

    def _read(self, paths: Iterable[str], number: int) -> Iterator[bytes]:
        def read(path: str) -> bytes:
            return self._slices.read(path, number)

        if not is_remote(self._spill.folder):
            yield from map(read, paths)
            return
        # A store answers slowly, but many requests at once.
        with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
            yield from pool.map(read, paths)


@beam.typehints.with_input_types(int)
@beam.typehints.with_output_types(tuple[int, int])
class SortPartFn(_SliceReading):
    """Task of the second pass -> (0, task); writes rows of a part, sorted by unit."""

    def __init__(self, layout: Layout, num_blocks: int, spill: Spill) -> None:
        super().__init__(spill, spill.fan_in.num_parts(layout))
        self._columns = layout.columns
        edges = layout.unit_edges()
        units = self._num_slices * spill.fan_in.units_per_part
        # The last part may have fewer units, but its files have as many slices.
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
            write_packed(path, pack_again(pieces, self._columns, edges), self._spill)

    def process(self, task: int) -> Iterator[tuple[int, int]]:
        self._run(self._sort, task)
        yield 0, task


class _Writer:
    """A DoFn that writes the files of groups."""

    def __init__(self, layout: Layout, directory: str, num_blocks: int) -> None:
        self._layout = layout
        self._directory = directory
        self._num_blocks = num_blocks
        self._steps_written = Metrics.counter("dpsgd", "steps_written")

    def _write(self, group: int, units: Iterable[Unit]) -> None:
        with plain_errors():
            write_group(self._layout, self._directory, group, units)
        progress.advance(progress.STEPS, len(self._layout.steps(group)))

    def _count(self, group: int) -> str:
        self._steps_written.inc(len(self._layout.steps(group)))
        return self._layout.file(group).name


@beam.typehints.with_input_types(tuple[int, Iterable[tuple[int, bytes]]])
@beam.typehints.with_output_types(str)
class WriteGroupFn(_Writer, beam.DoFn):
    """(group, elements) -> name of the file of the group."""

    def process(
        self, group_and_elements: tuple[int, Iterable[tuple[int, bytes]]]
    ) -> Iterator[str]:
        group, values = group_and_elements
        # Flink iterates values once.  Sorted: the order of arrival must not matter.
        elements = sorted(values)
        ordinals = (ordinal for ordinal, _ in elements)
        check_delivery(ordinals, range(self._num_blocks))
        pieces = (data for _, data in elements)
        self._write(group, [(self._layout.steps(group), pieces)])
        yield self._count(group)


@beam.typehints.with_input_types(int)
@beam.typehints.with_output_types(str)
class WriteSpilledFn(_Writer, _SliceReading):
    """Group -> name of the file of the group."""

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
