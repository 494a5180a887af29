"""The map step: blocks to packed rows by step, in files or through the engine.

Formal guarantees:
  - Only rows of the data set are sampled: a file that is not the listed one is refused
    before it is read (``known_input``).
  - Every block has a piece for every group or part, even if no example chose it.
  - A complete file is not written again.
  - A bundle ends after all of its work, or with an error; an abandoned bundle writes
    nothing more.

Sensitive: elements and files, which hold rows.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import apache_beam as beam
import numpy as np
from apache_beam.metrics import Metrics

from accounting.core.validation import InputError
from pipelines.files.key_sources import read_key_file
from pipelines.inputs.known_input import KnownInput
from pipelines.inputs.parquet_blocks import Block
from pipelines.job import progress
from pipelines.job.boundaries import BoundariesFile
from pipelines.job.packing import Layout, PackedRows, sample_and_pack
from pipelines.job.runtime import plain_errors
from pipelines.job.spill import Spill, is_written, spill_path, write_spill

Element = tuple[int, tuple[int, bytes]]  # group, (ordinal of the block, packed rows)


def check_delivery(found: Iterable[int], expected: Sequence[int]) -> None:
    """Checks that each of the expected elements was delivered once.

    Args:
      found: Numbers of the delivered elements.
      expected: Numbers of the sent elements, ascending.

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
        managed secret (see ``keys.read_key_file``).
      boundaries: File of the boundaries of a shuffle, from ``boundaries.complete``.
    """

    key_file: str
    boundaries: BoundariesFile | None = None


class _Sampler:
    """Reads blocks and samples the steps of their rows.

    Args:
      layout: Layout of the job.
      secrets: Secrets of the job.
      known: Digests of the data set.
      edges: Edges of the ranges of steps, as in ``packing.split_by_step``.
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

    def _pack(self, blocks: Sequence[Block]) -> PackedRows:
        is_listed = functools.partial(self._known.is_listed, self._key)
        return sample_and_pack(
            self._layout, self._key, blocks, is_listed, self._boundaries,
            edges=self._edges,
        )  # fmt: skip


@beam.typehints.with_input_types(Block)
@beam.typehints.with_output_types(Element)
class SampleBlockFn(_Sampler, beam.DoFn):
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
        with plain_errors():
            packed = self._pack([block])
            for group in self._groups:
                yield group, (block.ordinal, packed.piece(group))
        self._blocks_read.inc()
        progress.advance(progress.BLOCKS)


@beam.typehints.with_input_types(tuple[Block, ...])
@beam.typehints.with_output_types(tuple[int, int])
class SpillBlocksFn(_Sampler, BundleFn):
    """Blocks that share a file -> (0, ordinal) of each; writes the file."""

    def __init__(
        self,
        layout: Layout,
        secrets: Secrets,
        known: KnownInput,
        spill: Spill,
    ) -> None:
        edges = _part_edges(layout, spill)
        _Sampler.__init__(self, layout, secrets, known, edges)
        BundleFn.__init__(self, spill.num_threads)
        self._spill = spill

    def _spill_blocks(self, blocks: Sequence[Block]) -> None:
        path = spill_path(self._spill.folder, blocks[0].ordinal)
        with plain_errors():
            if not is_written(path):
                # All steps: a resumed job may need others.
                write_packed(path, self._pack(blocks), self._spill)
        progress.advance(progress.BLOCKS, len(blocks))

    def process(self, blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
        self._run(self._spill_blocks, blocks)
        self._blocks_read.inc(len(blocks))
        yield from ((0, block.ordinal) for block in blocks)


def _part_edges(layout: Layout, spill: Spill) -> np.ndarray:
    """Returns the first step of each slice of a file of the map step, and the end."""
    edges = layout.unit_edges()
    return np.append(edges[:-1][:: spill.fan_in.units_per_part], edges[-1])


def write_packed(path: str, packed: PackedRows, spill: Spill) -> None:
    """Writes packed rows, one slice per part.

    Args:
      path: Path of the file.
      packed: The rows.  Sensitive.
      spill: Shuffle of the job.

    Raises:
      OSError: no room, or no access.
    """
    pieces = map(packed.piece, range(len(packed.parts)))
    write_spill(path, packed.sizes, pieces, flush=spill.flush)
