"""Which rows are in which step, by the definition of each sampler: the reference.

The batch job makes the same choices faster, in ``pipelines.sampling``.  This module
shares no code with it except sub-keys and the stream cipher.

Every block of rows has a ChaCha20 stream of its own, keyed by (key, plan, label).  From
it are drawn, in this order:

- Poisson: for each row the number of its steps, binomial by inversion of the exact
  distribution; then for each row a uniform subset of that size; then a priority for
  each participation.  Independent coin flips, one per step, have the same law.
- cyclic Poisson: for each row a uniform group; then, for each group of rows in turn,
  as for Poisson among its steps; then the priorities.
- balls and bins: for each epoch and row a uniform step; then the priorities.
- shuffles: for each row a rank of 128 bits, by which an epoch is sorted and cut into
  steps of equal size.  The upper half of the rank is the priority.
- deterministic: nothing.

A step keeps its rows of least priority, at most the cap.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20 and
keyed BLAKE2b:
  - the law: steps of rows have the law of the plan's sampler, as ``accounting`` assumes
    it (Poisson within 2**-128 per row in total variation; shuffles within
    n**2 / 2**128).
  - the same choices: they equal those of the job, for every sampler of ``accounting``.

Public: the plan.  Sensitive: keys and everything returned.

References:
  Beltran et al. (2024), arXiv:2406.17298, Lemma 1: counts first, then subsets.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from accounting.core.plan import (
    BALLS_AND_BINS,
    CYCLIC_POISSON,
    DETERMINISTIC,
    DYNAMIC_SHUFFLE,
    PERSISTENT_SHUFFLE,
    POISSON,
    TRUNCATED_CYCLIC_POISSON,
    TRUNCATED_POISSON,
    DpSgdPlan,
)
from accounting.core.validation import InputError
from pipelines.core.keys import Stream, derive

#: Maximum bits that name a bucket of ranks: 2**22 counters take 32 MiB.
_MOST_BITS = 22

#: Parallel arrays: int64 row in its block, int64 step, uint64 priority.
Choices = tuple[np.ndarray, np.ndarray, np.ndarray]
#: Sorted thresholds: high and low words of 128-bit ranks, uint64.
Ranks = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSpan:
    """A block of rows as a sampler sees it.

    Attributes:
      label: Unique within the data set.
      num_rows: Number of rows in the block.
      first_row: Number of rows in all blocks before it.
    """

    label: str
    num_rows: int
    first_row: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSampler:
    """The choices of one data set under one key.

    Attributes:
      plan: How batches are sampled.
      key: Secret key of the data set.
      starts: Of each shuffle, the ranks that start steps 1, 2, ...; else empty.
    """

    plan: DpSgdPlan
    key: bytes = dataclasses.field(repr=False)
    starts: tuple[Ranks, ...] = dataclasses.field(default=(), repr=False)

    def choose(self, rows: BlockSpan) -> Choices:
        """Returns the steps that the rows of a block choose.  Sensitive."""
        return _SAMPLERS[self.plan.sampler](self, rows)

    def stream(self, rows: BlockSpan) -> Stream:
        """Returns the stream of a block."""
        return Stream(derive(self.key, "sampling", self.plan.fingerprint, rows.label))

    def ranks(self, rows: BlockSpan, shuffle: int) -> Ranks:
        """Returns the ranks of the rows of a block in one of the plan's shuffles.

        Args:
          rows: The block.
          shuffle: Number of the shuffle, from 0.
        """
        labels = ("shuffle", self.plan.fingerprint, shuffle, rows.label)
        stream = Stream(derive(self.key, *labels))
        return stream.words(rows.num_rows), stream.words(rows.num_rows)


def make_sampler(
    plan: DpSgdPlan, key: bytes, blocks: Sequence[BlockSpan]
) -> PlanSampler:
    """Returns the sampler of a plan; for a shuffle it draws all ranks twice.

    Args:
      plan: How batches are sampled.
      key: Secret key of the data set.
      blocks: All blocks of the data set, in order.

    Raises:
      InputError: a registered sampler of somebody else.
    """
    if plan.sampler not in _SAMPLERS:
        raise InputError(
            f"Expected sampler={plan.sampler!r} to be one of {', '.join(_SAMPLERS)}: "
            "there is no reference for others, and its batches cannot be certified."
        )
    sampler = PlanSampler(plan=plan, key=key)
    starts = [_starts(sampler, blocks, each) for each in range(plan.num_shuffles)]
    return dataclasses.replace(sampler, starts=tuple(starts))


@functools.lru_cache(maxsize=2)
def binomial_table(num_trials: int, probability: Fraction) -> list[int]:
    """Returns floor(2**128 Pr[Bin <= k]) for k = 0, 1, ..., in exact integers.

    It ends before ``num_trials``, or with the first entry of 2**128 - 1.

    Args:
      num_trials: At least 1.
      probability: In (0, 1).
    """
    success = probability.numerator
    failure = probability.denominator - success
    whole = probability.denominator**num_trials
    total = term = failure**num_trials
    table = list[int]()
    for k in range(num_trials):
        table.append((total << 128) // whole)
        if table[-1] + 1 == 1 << 128:
            break
        term = term * (num_trials - k) * success // ((k + 1) * failure)
        total += term
    return table


def _binomial(
    stream: Stream, trials: int, probability: Fraction, size: int
) -> np.ndarray:
    """Returns binomial draws: how many entries of the table a uniform number reaches.

    The number has 128 bits; the lower 64 are drawn only where the upper do not decide.
    """
    if probability == 1:
        return np.full(size, trials)
    table = binomial_table(trials, probability)
    high = np.array([entry >> 64 for entry in table], np.uint64)
    words = stream.words(size)
    counts = np.searchsorted(high, words, side="left")
    for tied in np.flatnonzero(counts < np.searchsorted(high, words, side="right")):
        number = int(words[tied]) << 64 | int(stream.words(1)[0])
        counts[tied] = bisect.bisect_right(table, number)
    return counts


def _subsets(
    stream: Stream, counts: np.ndarray, num_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, step), sorted: of each row, a uniform subset of the steps.

    Rows draw steps until each has its number of distinct ones.
    """
    codes, missing = np.empty(0, np.int64), counts
    while missing.any():
        row = np.repeat(np.arange(len(counts)), missing)
        drawn = row * num_steps + stream.integers(num_steps, len(row))
        codes = np.unique(np.concatenate([codes, drawn]))
        missing = counts - np.bincount(codes // num_steps, minlength=len(counts))
    return np.divmod(codes, num_steps)


def _poisson(sampler: PlanSampler, rows: BlockSpan) -> Choices:
    plan, stream = sampler.plan, sampler.stream(rows)
    row, step = _independent(stream, plan, plan.num_steps, rows.num_rows)
    return row, step, stream.words(len(row))


def _cyclic_poisson(sampler: PlanSampler, rows: BlockSpan) -> Choices:
    plan, stream = sampler.plan, sampler.stream(rows)
    groups = plan.bands
    assert groups is not None
    group = stream.integers(groups, rows.num_rows)
    found = []
    for each in range(min(groups, plan.num_steps)):
        members = np.flatnonzero(group == each)
        num_turns = (plan.num_steps - each - 1) // groups + 1
        row, turn = _independent(stream, plan, num_turns, len(members))
        found.append((members[row], each + groups * turn))
    row, step = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return row, step, stream.words(len(row))


def _independent(
    stream: Stream, plan: DpSgdPlan, steps: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, step): each row in each step with the plan's probability."""
    counts = _binomial(stream, steps, plan.sampling_probability, num_rows)
    is_heavy = counts > steps // 2
    row, step = _subsets(stream, np.where(is_heavy, 0, counts), steps)
    if is_heavy.any():  # of more than half of the steps, the others are drawn
        heavy = np.flatnonzero(is_heavy)
        chosen = np.ones((len(heavy), steps), bool)
        chosen[_subsets(stream, steps - counts[heavy], steps)] = False
        more, its_step = np.nonzero(chosen)
        row, step = np.append(row, heavy[more]), np.append(step, its_step)
    return row, step


def _each_epoch(plan: DpSgdPlan, rows: BlockSpan) -> tuple[np.ndarray, np.ndarray]:
    """Returns every row once per epoch, and the first step of that epoch."""
    row = np.tile(np.arange(rows.num_rows), plan.num_epochs)
    first_steps = np.arange(plan.num_epochs) * plan.steps_per_epoch
    return row, np.repeat(first_steps, rows.num_rows)


def _balls_and_bins(sampler: PlanSampler, rows: BlockSpan) -> Choices:
    plan, stream = sampler.plan, sampler.stream(rows)
    row, first_step = _each_epoch(plan, rows)
    step = first_step + stream.integers(plan.steps_per_epoch, len(row))
    return row, step, stream.words(len(row))


def _deterministic(sampler: PlanSampler, rows: BlockSpan) -> Choices:
    plan = sampler.plan
    row, first_step = _each_epoch(plan, rows)
    position = rows.first_row + row
    step = first_step + position * plan.steps_per_epoch // plan.num_examples
    return row, step, position.astype(np.uint64)


def _shuffled(sampler: PlanSampler, rows: BlockSpan) -> Choices:
    plan = sampler.plan
    row, first_step = _each_epoch(plan, rows)
    steps, priorities = [], []
    for epoch in range(plan.num_epochs):
        shuffle = epoch % plan.num_shuffles
        high, low = sampler.ranks(rows, shuffle)
        steps.append(_reached(sampler.starts[shuffle], high, low))
        priorities.append(high)
    return row, first_step + np.concatenate(steps), np.concatenate(priorities)


def _reached(starts: Ranks, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Returns how many of the sorted 128-bit ``starts`` each rank reaches."""
    count = np.searchsorted(starts[0], high, side="left")
    next_high, next_low = (np.append(each, np.uint64(0)) for each in starts)
    while True:  # where the upper words are equal, the lower decide
        more = (count < len(starts[0])) & (next_high[count] == high)
        more &= next_low[count] <= low
        if not more.any():
            return count
        count[more] += 1


def _starts(sampler: PlanSampler, blocks: Sequence[BlockSpan], shuffle: int) -> Ranks:
    """Returns the ranks at the places of the sorted order where steps 1, 2, ... start.

    Ranks are counted by their first bits; only those that share them with a start are
    kept and sorted.
    """
    plan = sampler.plan
    steps = np.arange(1, plan.steps_per_epoch)
    places = -(-steps * plan.num_examples // plan.steps_per_epoch)
    bits = max(1, min(_MOST_BITS, plan.num_examples.bit_length() - 4))
    shift = np.uint64(64 - bits)
    counts = np.zeros(1 << bits, np.int64)
    for rows in blocks:
        bucket, number = np.unique(
            sampler.ranks(rows, shuffle)[0] >> shift, return_counts=True
        )
        counts[bucket] += number
    bucket = np.searchsorted(np.cumsum(counts), places, side="right")
    is_kept = np.isin(np.arange(len(counts)), bucket)
    kept = []
    for rows in blocks:
        ranks = np.stack(sampler.ranks(rows, shuffle))
        kept.append(ranks[:, is_kept[ranks[0] >> shift]])
    high, low = np.concatenate(kept, axis=1)
    order = np.lexsort((low, high))
    skipped = np.cumsum(np.where(is_kept, 0, counts))
    found = order[places - skipped[bucket]]
    return high[found], low[found]


_SAMPLERS: dict[str, Callable[[PlanSampler, BlockSpan], Choices]] = {
    DETERMINISTIC: _deterministic,
    PERSISTENT_SHUFFLE: _shuffled,
    DYNAMIC_SHUFFLE: _shuffled,
    POISSON: _poisson,
    TRUNCATED_POISSON: _poisson,
    BALLS_AND_BINS: _balls_and_bins,
    CYCLIC_POISSON: _cyclic_poisson,
    TRUNCATED_CYCLIC_POISSON: _cyclic_poisson,
}
