"""Which rows are in which step, by the definition of each sampler.

The batch job, the certificate and the audits all ask this module.  A block of rows is
one Parquet row group.  It has a ChaCha20 stream of its own, keyed by (key, plan,
label), so that a retried, repeated or re-ordered bundle makes the same choices on every
engine.  A sampler draws from the stream, in this order:

- Poisson: for each row the number of its steps, binomial by inversion of the exact
  distribution; then for each row a uniform subset of that size; then a priority for
  each participation.  Independent coin flips, one per step, have the same law; their
  cost would grow with rows x steps.
- cyclic Poisson: for each row a uniform group; then, for each group of rows in turn,
  as for Poisson among its steps; then the priorities.
- balls and bins: for each epoch and row a uniform step; then the priorities.
- shuffles: for each row a rank of 128 bits, by which an epoch is sorted and cut into
  steps of equal size.  The upper half of the rank is the priority.  The ranks that
  start the steps suffice to cut: two passes over all ranks find them, and no
  permutation is held.
- deterministic: nothing.

A step keeps its rows of least priority, at most the cap.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20 and
keyed BLAKE2b (Poisson within 2**-128 per row in total variation; shuffles of n rows
within n**2 / 2**128):
  - inclusion probability: a row takes part in step t with probability
    ``plan.sampling_probability``, for all t in [0, num_steps).
  - independence: participations of a row in distinct steps, and of distinct rows, are
    independent.  The number of rows that choose a step is binomial.
  - groups: with ``bands`` k, the groups of rows are uniform and independent, and a row
    takes part in steps of its group g alone, t = g modulo k.  Given the groups, the two
    promises above hold for those steps.
  - uniform truncation: a step with more than B rows keeps a uniformly random subset of
    size B, whatever the order in which they arrive.
  - once per epoch: with the other samplers, every row takes part in exactly one step of
    every epoch.  With balls and bins that step is uniform and independent of other rows
    and epochs; with shuffles all orders are equally likely, and step t of T gets the
    examples of places ceil(t n / T) to ceil((t + 1) n / T) - 1.
  - determinism: the same (key, plan, label, number of rows) gives the same choices, on
    any machine; other keys, plans or labels give independent ones.

Public: the plan.  Sensitive: keys and everything returned.

References:
  Beltran et al. (2024), arXiv:2406.17298, Lemma 1, with rows and steps exchanged.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from accounting.core import sampler_registry
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

#: Number of ranks that a search keeps, up to this many bits that name a bucket of
#: ranks: 2**24 counters take 128 MiB.
_FEW_RANKS, _MOST_BITS = 1 << 20, 24

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
      starts: For each shuffle of the plan, the ranks that start steps 1, 2, ...; empty
        for a plan without shuffles.
    """

    plan: DpSgdPlan
    key: bytes = dataclasses.field(repr=False)
    starts: Sequence[Ranks] | np.ndarray = dataclasses.field(default=(), repr=False)

    def choose(self, rows: BlockSpan) -> Choices:
        """Returns the steps that the rows of a block choose.  Sensitive."""
        return _SAMPLERS[self.plan.sampler](self, rows)

    def stream(self, rows: BlockSpan) -> Stream:
        """Returns the stream of a block."""
        return Stream(derive(self.key, "sampling", self.plan.fingerprint, rows.label))

    def rank_stream(self, rows: BlockSpan, shuffle: int) -> Stream:
        """Returns the stream of a block's ranks: all upper words, then all lower ones.

        Args:
          rows: The block.
          shuffle: Number of the plan's shuffle, from 0.
        """
        labels = ("shuffle", self.plan.fingerprint, shuffle, rows.label)
        return Stream(derive(self.key, *labels))

    def ranks(self, rows: BlockSpan, shuffle: int) -> Ranks:
        """Returns the ranks of the rows of a block.

        Args:
          rows: The block.
          shuffle: Number of the plan's shuffle, from 0.
        """
        stream = self.rank_stream(rows, shuffle)
        return stream.words(rows.num_rows), stream.words(rows.num_rows)


#: Calls a function with every item; yields the results in order.
Run = Callable[[Callable[[BlockSpan], Any], Sequence[BlockSpan]], Iterable[Any]]


def make_sampler(
    plan: DpSgdPlan, key: bytes, blocks: Sequence[BlockSpan], run: Run = map
) -> PlanSampler:
    """Returns the sampler of a plan; for a shuffle it draws all ranks twice.

    Args:
      plan: How batches are sampled.
      key: Secret key of the data set.
      blocks: All blocks of the data set, in order.
      run: Draws the ranks of blocks, by default one after the other.

    Raises:
      InputError: as for `check_assigned`.
    """
    check_assigned(plan)
    sampler = PlanSampler(plan=plan, key=key)
    shuffles = range(plan.num_shuffles)
    starts = [_starts(sampler, blocks, each, run) for each in shuffles]
    return dataclasses.replace(sampler, starts=starts)


def check_assigned(plan: DpSgdPlan) -> None:
    """Refuses a plan whose sampler has no registered assignment of rows to steps.

    Raises:
      InputError: there is no such assignment.
    """
    if plan.sampler not in _SAMPLERS:
        sampler_registry.refuse(
            plan.sampler,
            "an assignment of rows to steps",
            "Register one with pipelines.core.choices.register.",
        )


def register(name: str, assign: Assign) -> None:
    """Lets jobs use a sampler.

    Args:
      name: Name under which the accountant knows the sampler.
      assign: (sampler, block) -> choices of the block's rows, a pure function.  Its
        author promises that it has the law that the accountant assumes.

    Raises:
      InputError: the name is taken, or not registered with the accountant.
    """
    sampler_registry.rules(name)
    if name in _SAMPLERS:
        raise InputError(
            f"Expected sampler={name!r} not to be registered yet. Choose another name."
        )
    _SAMPLERS[name] = assign


def arrange_steps(
    step: np.ndarray,
    priority: np.ndarray,
    steps: Sequence[int],
    truncated_batch_size: int | None,
) -> list[np.ndarray]:
    """Returns, for each of ``steps``, the participations that form its batch, in order.

    Args:
      step: The step of each participation.  Sensitive.
      priority: uint64, parallel to ``step``.  Sensitive.
      steps: Consecutive steps, ascending.
      truncated_batch_size: Cap on the rows of a step, or None.

    Returns:
      One int64 array of indices into ``step`` for each of ``steps``, possibly empty.
    """
    order = np.lexsort((priority, step))
    edges = np.searchsorted(step[order], [*steps, steps[-1] + 1])
    return [
        order[start:end][:truncated_batch_size]
        for start, end in itertools.pairwise(edges)
    ]


def first_places(plan: DpSgdPlan) -> np.ndarray:
    """Returns the place in the order of an epoch at which each of its steps starts."""
    return -(
        -np.arange(plan.steps_per_epoch) * plan.num_examples // plan.steps_per_epoch
    )


@functools.lru_cache(maxsize=2)
def binomial_table(num_trials: int, probability: Fraction) -> list[int]:
    """Returns floor(2**128 Pr[Bin <= k]) for k = 0, 1, ..., in exact integers.

    The table ends before ``num_trials``, or with the first entry of 2**128 - 1.

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
    """Returns (row, step), sorted: a uniform subset of the steps for each row.

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
    if is_heavy.any():  # a row in over half of the steps draws those that it is not in
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


def bucket_bits(plan: DpSgdPlan) -> int:
    """Returns how many first bits of a rank name its bucket in a search for starts."""
    few = max(1, min(_FEW_RANKS, plan.num_examples // 16))
    ranks = plan.num_examples * plan.steps_per_epoch
    return max(1, min(_MOST_BITS, (ranks // few).bit_length()))


def _starts(
    sampler: PlanSampler, blocks: Sequence[BlockSpan], shuffle: int, run: Run
) -> Ranks:
    """Returns the ranks at the places of the sorted order where steps 1, 2, ... start.

    Ranks are counted by their first bits; only those that share them with a start are
    kept and sorted.
    """
    places = first_places(sampler.plan)[1:]
    bits = bucket_bits(sampler.plan)
    shift = np.uint64(64 - bits)
    counts = np.zeros(1 << bits, np.int64)

    def buckets(rows: BlockSpan) -> np.ndarray:
        words = sampler.rank_stream(rows, shuffle).words(rows.num_rows)
        return (words >> shift).astype(np.int64)

    for found in run(buckets, blocks):
        np.add.at(counts, found, 1)
    bucket = np.searchsorted(np.cumsum(counts), places, side="right")
    is_kept = np.zeros(len(counts), bool)
    is_kept[bucket] = True

    def kept(rows: BlockSpan) -> np.ndarray:
        high, low = sampler.ranks(rows, shuffle)
        kept = np.flatnonzero(is_kept[(high >> shift).astype(np.int64)])
        return np.stack([high[kept], low[kept]])

    high, low = np.concatenate([*run(kept, blocks)], axis=1)
    order = np.lexsort((low, high))
    skipped = np.cumsum(np.where(is_kept, 0, counts))
    first = order[places - skipped[bucket]]
    return high[first], low[first]


#: (sampler, block) -> choices of its rows.
Assign = Callable[[PlanSampler, BlockSpan], Choices]

_SAMPLERS: dict[str, Assign] = {
    DETERMINISTIC: _deterministic,
    PERSISTENT_SHUFFLE: _shuffled,
    DYNAMIC_SHUFFLE: _shuffled,
    POISSON: _poisson,
    TRUNCATED_POISSON: _poisson,
    BALLS_AND_BINS: _balls_and_bins,
    CYCLIC_POISSON: _cyclic_poisson,
    TRUNCATED_CYCLIC_POISSON: _cyclic_poisson,
}
