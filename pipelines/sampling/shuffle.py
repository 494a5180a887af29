"""Exact uniform shuffles of data of any size, by keyed rank.

Every example draws a 128-bit rank from the stream of its block; the order of the ranks
is a uniformly random permutation.  The rank of the first example of each batch, its
boundary, suffices to split the permutation into batches.  An exact selection finds the
boundaries in two passes over the ranks, drawn again block by block in each pass.  The
permutation is never held in memory, and the data is not read.

Formal guarantees, for a uniform secret key and up to the PRF assumption:
  - exact split: step t of an epoch gets the examples of positions ceil(t n / T) to
    ceil((t + 1) n / T) - 1 of the permutation; every example is in exactly one step.
  - uniform permutation: all orders are equally likely, within n^2 / 2^128 in total
    variation (the probability of two equal ranks).
  - determinism: ranks depend on (key, plan, epoch, block, row) alone.

Public: the plan.  Sensitive: ranks and boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from accounting.core.plan import DpSgdPlan
from pipelines.core.keys import Stream, derive
from pipelines.core.threads import in_order

#: Target number of ranks in a bucket.  Buckets are larger where few ranks are kept in
#: any case, because a small table of counts stays in the processor's cache.
_BUCKET_RANKS = 64
_FEW_RANKS = 1 << 20
_MOST_BUCKET_BITS = 24
#: The first pass counts; the second keeps the ranks of buckets with a boundary.
_PASSES = 2
_WORD_BYTES = 8
_RANK_BYTES = 2 * _WORD_BYTES
#: Peak bytes per bucket, per kept rank, and per row of the block being drawn; measured
#: and rounded up.
_TABLE_COPIES = 48
_KEPT_COPIES = 64
_BLOCK_COPIES = 48


def count_at_or_below(
    high: np.ndarray,
    low: np.ndarray,
    words: np.ndarray,
    second_word: Callable[[int], int],
) -> np.ndarray:
    """Returns how many 128-bit thresholds are <= each of some 128-bit numbers, int64.

    Args:
      high: Sorted high words of the thresholds, uint64.
      low: Their low words.
      words: High words of the numbers.
      second_word: Index of a number -> its low word; called in ascending order, only
        where the high words are equal.
    """
    counts = np.searchsorted(high, words, side="right")
    first = np.searchsorted(high, words, side="left")
    for index in np.flatnonzero(first < counts):
        tied = low[first[index] : counts[index]]
        second = np.uint64(second_word(int(index)))
        counts[index] = first[index] + np.searchsorted(tied, second, side="right")
    return counts.astype(np.int64)


def draw_ranks(
    plan: DpSgdPlan, sampling_key: bytes, epoch: int, block_name: str, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the (high, low) words of the ranks of a block's rows.  Sensitive.

    Args:
      plan: Plan of a shuffling sampler.
      sampling_key: Secret, 32 bytes.
      epoch: From 0; a persistent shuffle uses one order for all epochs.
      block_name: Unique within the data set.
      num_rows: Number of rows in the block.

    Returns:
      Two arrays of shape (num_rows,), uint64.
    """
    stream = _rank_stream(plan, sampling_key, epoch, block_name)
    return stream.words(num_rows), stream.words(num_rows)


def _rank_stream(
    plan: DpSgdPlan, sampling_key: bytes, epoch: int, block_name: str
) -> Stream:
    """Returns the stream of a block's ranks: high words of all rows, then low words."""
    epoch %= plan.num_shuffles
    return Stream(derive(sampling_key, "shuffle", plan.fingerprint, epoch, block_name))


def first_positions(num_examples: int, steps_per_epoch: int) -> np.ndarray:
    """Returns the position at which each step of an epoch starts, int64.

    Batch sizes differ by at most one.

    Args:
      num_examples: Number of examples in an epoch.
      steps_per_epoch: Number of batches in an epoch.

    Returns:
      Shape (steps_per_epoch,), ascending from 0.
    """
    steps = np.arange(steps_per_epoch, dtype=np.int64)
    return -(-steps * num_examples // steps_per_epoch)


def num_epochs_drawn(plan: DpSgdPlan) -> int:
    """Returns how many permutations are drawn; 0 if nothing is shuffled.

    An epoch of one step has no boundary and needs no permutation.
    """
    return 0 if plan.steps_per_epoch == 1 else plan.num_shuffles


def num_block_passes(plan: DpSgdPlan, num_blocks: int) -> int:
    """Returns how many times `find_boundaries` draws the ranks of a block, in total.

    Args:
      plan: Plan of any sampler.
      num_blocks: Number of blocks in the data set.
    """
    return _PASSES * num_blocks * num_epochs_drawn(plan)


def boundaries_bytes(plan: DpSgdPlan) -> int:
    """Returns the size in bytes of the array that `find_boundaries` returns."""
    return _RANK_BYTES * num_epochs_drawn(plan) * (plan.steps_per_epoch - 1)


def search_bytes(plan: DpSgdPlan, largest_block: int, num_threads: int) -> int:
    """Returns the bytes that `find_boundaries` needs in addition to its result.

    Args:
      plan: Plan of a shuffling sampler.
      largest_block: Number of rows in the largest block.
      num_threads: Number of threads that draw ranks.
    """
    table = 1 << _bucket_bits(plan)
    kept = plan.steps_per_epoch * (plan.num_examples / table + 1)
    chunk = _chunk_rows(table) + largest_block
    # One histogram per thread, and one that sums them.
    thread = _WORD_BYTES * (table + 2 * chunk) + _BLOCK_COPIES * largest_block
    return int(_TABLE_COPIES * table + _KEPT_COPIES * kept + (num_threads + 1) * thread)


def find_boundaries(
    plan: DpSgdPlan,
    sampling_key: bytes,
    blocks: Sequence[tuple[str, int]],
    *,
    num_threads: int = 1,
    advance: Callable[[int], None] = lambda blocks: None,
) -> np.ndarray:
    """Returns the ranks that start the steps of every epoch.  Sensitive.

    Args:
      plan: Plan of a shuffling sampler.
      sampling_key: Secret, 32 bytes.
      blocks: (name, number of rows) of every block in the data set.
      num_threads: Number of threads that draw ranks; does not change the result.
      advance: Called with the number of blocks drawn since the last call.

    Returns:
      uint64, shape (epochs, steps_per_epoch - 1, 2): (high, low) rank of the first
      example of steps 1, 2, ... in each epoch; a persistent shuffle has one epoch here.
    """
    found = empty_boundaries(plan)
    with ThreadPoolExecutor(num_threads) as pool:
        search = _Search(plan, sampling_key, blocks, pool, num_threads, advance)
        for epoch in range(num_epochs_drawn(plan)):
            found[epoch] = search.find(epoch)
    return found


def empty_boundaries(plan: DpSgdPlan) -> np.ndarray:
    """Returns an uninitialised array of the shape that `find_boundaries` returns."""
    epochs = max(1, num_epochs_drawn(plan))
    return np.empty((epochs, plan.steps_per_epoch - 1, 2), np.uint64)


def _bucket_bits(plan: DpSgdPlan) -> int:
    """Returns how many leading bits of a rank name its bucket."""
    n, steps = plan.num_examples, plan.steps_per_epoch
    usual = max(1, (n // _BUCKET_RANKS).bit_length())
    kept = max(1, min(n // 16, _FEW_RANKS))
    return min(usual, (steps * n // kept).bit_length(), _MOST_BUCKET_BITS)


def _chunk_rows(table: int) -> int:
    """Returns how many ranks to count at a time, so that a table of counts pays off."""
    return max(1 << 18, table // 2)


_Chunk = list[tuple[str, int]]


class _Search:
    """Finds the ranks at which the steps of an epoch start.  Sensitive."""

    def __init__(
        self,
        plan: DpSgdPlan,
        sampling_key: bytes,
        blocks: Sequence[tuple[str, int]],
        pool: ThreadPoolExecutor,
        num_threads: int,
        advance: Callable[[int], None],
    ) -> None:
        self._plan, self._key, self._advance = plan, sampling_key, advance
        self._pool, self._num_threads = pool, num_threads
        self._num_buckets = 1 << _bucket_bits(plan)
        self._shift = np.uint64(64 - _bucket_bits(plan))
        self._chunks = list(_chunks(blocks, _chunk_rows(self._num_buckets)))

    def find(self, epoch: int) -> np.ndarray:
        """Returns the ranks of the first examples of steps 1, 2, ... of an epoch."""
        plan = self._plan
        positions = first_positions(plan.num_examples, plan.steps_per_epoch)[1:]
        counts = np.zeros(self._num_buckets, np.int64)
        for counted in self._each_chunk(lambda chunk: self._count(chunk, epoch)):
            counts += counted
        ends = np.cumsum(counts)
        bucket = np.searchsorted(ends, positions, side="right")
        wanted = np.zeros(self._num_buckets, bool)
        wanted[bucket] = True
        kept = self._each_chunk(lambda chunk: self._keep(chunk, epoch, wanted))
        ranks = np.concatenate(list(kept))
        ranks = ranks[np.lexsort((ranks[:, 1], ranks[:, 0]))]
        # A bucket's ranks come after those of the wanted buckets before it.
        sizes = np.where(wanted, counts, 0)
        starts = np.cumsum(sizes) - sizes
        return ranks[starts[bucket] + positions - (ends - counts)[bucket]]

    def _each_chunk(
        self, function: Callable[[_Chunk], np.ndarray]
    ) -> Iterator[np.ndarray]:
        if self._num_threads == 1:  # starting a thread costs more than a small search
            done: Iterator[np.ndarray] = map(function, self._chunks)
        else:
            depth = self._num_threads + 1
            done = in_order(self._pool, function, self._chunks, depth)
        for chunk, result in zip(self._chunks, done, strict=True):
            self._advance(len(chunk))
            yield result

    def _bucket(self, high: np.ndarray) -> np.ndarray:
        return (high >> self._shift).astype(np.int64)

    def _count(self, chunk: _Chunk, epoch: int) -> np.ndarray:
        """Returns the number of ranks in each bucket."""
        buckets = []
        for name, size in chunk:
            stream = _rank_stream(self._plan, self._key, epoch, name)
            buckets.append(self._bucket(stream.words(size)))
        return np.bincount(np.concatenate(buckets), minlength=self._num_buckets)

    def _keep(self, chunk: _Chunk, epoch: int, wanted: np.ndarray) -> np.ndarray:
        """Returns the ranks that are in a wanted bucket."""
        found = []
        for name, size in chunk:
            high, low = draw_ranks(self._plan, self._key, epoch, name, size)
            kept = wanted[self._bucket(high)]
            found.append(np.stack([high[kept], low[kept]], axis=1))
        return np.concatenate(found)


def _chunks(blocks: Sequence[tuple[str, int]], least: int) -> Iterator[_Chunk]:
    """Yields runs of consecutive blocks with about ``least`` rows in each run."""
    chunk: _Chunk = []
    rows = 0
    for name, size in blocks:
        chunk.append((name, size))
        rows += size
        if rows >= least:
            yield chunk
            chunk, rows = [], 0
    if chunk:
        yield chunk


def shuffled_steps(
    plan: DpSgdPlan,
    sampling_key: bytes,
    block_name: str,
    num_rows: int,
    boundaries: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (row, step, priority): one step per row and epoch.  Sensitive.

    Other arguments as for ``draw_ranks``.

    Args:
      boundaries: From ``find_boundaries``.

    Returns:
      Parallel arrays of length num_epochs x num_rows.
    """
    steps, priorities = [], []
    for epoch in range(plan.num_epochs):
        thresholds = boundaries[min(epoch, len(boundaries) - 1)]
        high, low = draw_ranks(plan, sampling_key, epoch, block_name, num_rows)
        step = count_at_or_below(
            thresholds[:, 0], thresholds[:, 1], high, low.__getitem__
        )
        steps.append(step + epoch * plan.steps_per_epoch)
        priorities.append(high)
    row = np.tile(np.arange(num_rows), plan.num_epochs)
    return row, np.concatenate(steps), np.concatenate(priorities)
