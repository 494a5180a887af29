"""Exact uniform shuffles of data of any size, by keyed rank.

Every example draws a 128-bit rank from the stream of its block; the order of the ranks
is a uniformly random permutation.  Its split into batches of equal size needs only the
rank of the first example of each batch, its boundary: an exact selection, in two passes
over ranks that are drawn anew, block by block.  No permutation is ever held in memory,
and the data is not read.

Formal guarantees, for a uniform secret key and up to the PRF assumption:
  - exact split: step t of an epoch gets the examples of positions ceil(t n / T) to
    ceil((t + 1) n / T) - 1 of the permutation; every example is in exactly one step.
  - uniform permutation: all orders are equally likely, within n^2 / 2^128 in total
    variation (two equal ranks).
  - determinism: ranks depend on (key, plan, epoch, block, row) alone.

Public: the plan.  Sensitive: ranks and boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from accounting.plan import PERSISTENT_SHUFFLE, DpSgdPlan
from pipelines.keys import derive
from pipelines.streams import Stream

#: Buckets of about this many ranks; the memory of both passes is then a few times
#: num_examples / _BUCKET_RANKS + steps_per_epoch * _BUCKET_RANKS words.
_BUCKET_RANKS = 64
_MOST_BUCKET_BITS = 24


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
      second_word: Index of a number -> its low word; asked for in order, and only where
        the high words are equal.
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
    """Returns the (high, low) words of the ranks of the rows of a block.  Sensitive."""
    epoch = 0 if plan.sampler == PERSISTENT_SHUFFLE else epoch
    key = derive(sampling_key, "shuffle", plan.fingerprint, epoch, block_name)
    stream = Stream(key)
    return stream.words(num_rows), stream.words(num_rows)


def first_positions(num_examples: int, steps_per_epoch: int) -> np.ndarray:
    """Returns the position at which each step of an epoch starts, int64.

    The batches are as equal as can be: sizes differ by at most one.
    """
    steps = np.arange(steps_per_epoch, dtype=np.int64)
    return -(-steps * num_examples // steps_per_epoch)


def find_boundaries(
    plan: DpSgdPlan, sampling_key: bytes, blocks: Sequence[tuple[str, int]]
) -> np.ndarray:
    """Returns the ranks that start the steps of every epoch.  Sensitive.

    Args:
      plan: A shuffle.
      sampling_key: Secret, 32 bytes.
      blocks: (name, number of rows) of every block of the data.

    Returns:
      uint64, shape (epochs, steps_per_epoch - 1, 2): (high, low) of the first example
      of steps 1, 2, ... of each epoch; one epoch for all if the shuffle is persistent.
    """
    epochs = 1 if plan.sampler == PERSISTENT_SHUFFLE else plan.num_epochs
    positions = first_positions(plan.num_examples, plan.steps_per_epoch)[1:]
    if not len(positions):
        return np.empty((epochs, 0, 2), np.uint64)
    return np.stack(
        [
            _select(plan, sampling_key, blocks, epoch, positions)
            for epoch in range(epochs)
        ]
    )


def _select(
    plan: DpSgdPlan,
    sampling_key: bytes,
    blocks: Sequence[tuple[str, int]],
    epoch: int,
    positions: np.ndarray,
) -> np.ndarray:
    """The ranks at some positions of the sorted order, shape (positions, 2)."""
    bits = max(1, (plan.num_examples // _BUCKET_RANKS).bit_length())
    shift = np.uint64(64 - min(bits, _MOST_BUCKET_BITS))
    counts = np.zeros(1 << (64 - int(shift)), np.int64)
    for name, num_rows in blocks:
        high, _ = draw_ranks(plan, sampling_key, epoch, name, num_rows)
        counts += np.bincount((high >> shift).astype(np.int64), minlength=len(counts))
    ends = np.cumsum(counts)
    bucket = np.searchsorted(ends, positions, side="right")
    wanted = np.zeros(len(counts), bool)
    wanted[bucket] = True
    found = []
    for name, num_rows in blocks:
        high, low = draw_ranks(plan, sampling_key, epoch, name, num_rows)
        kept = wanted[(high >> shift).astype(np.int64)]
        found.append(np.stack([high[kept], low[kept]], axis=1))
    ranks = np.concatenate(found)
    ranks = ranks[np.lexsort((ranks[:, 1], ranks[:, 0]))]
    # A bucket starts among the kept ranks after those of the wanted buckets before it.
    starts = np.cumsum(np.where(wanted, counts, 0)) - np.where(wanted, counts, 0)
    within = positions - (ends - counts)[bucket]
    return ranks[starts[bucket] + within]


def shuffled_steps(
    plan: DpSgdPlan,
    sampling_key: bytes,
    block_name: str,
    num_rows: int,
    boundaries: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (row, step, priority): one step per row and epoch.  Sensitive."""
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
