"""Which steps each example takes part in: a pure function of (key, plan, block, row).

A block is one Parquet row group, named by its file and index.  Every block has its own
ChaCha20 stream, keyed by (sampling key, plan, block name), so a retried, repeated or
re-ordered bundle makes the same choices on every engine.

A row first draws how many steps it takes part in, from the exact binomial law, and then
which ones, a uniform subset of that size.  Together these are independent coin flips,
one per step (Beltran et al. 2024, arXiv:2406.17298, Lemma 1, with rows and steps
exchanged).  The cost grows with the rows read plus the participations drawn, not with
rows x steps.

With ``bands``, a row first draws its group, and then a subset of its group's steps.
Deterministic batches follow the order of the data.  Balls-and-bins draws one uniform
step per row and epoch.  Shuffles are in ``shuffle``.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20 and
keyed BLAKE2b (for Poisson samplers, within 2**-64 in total variation over a data set of
2**40 rows):
  - inclusion probability: a row takes part in step t with probability
    ``plan.sampling_probability``, for all t in [0, num_steps).
  - groups: with ``bands`` k, the groups of rows are uniform and independent, and a row
    takes part in steps of its group g alone, t = g modulo k.  Given the groups, what
    follows of inclusion and independence holds for those steps.
  - independence across steps: the participations of a row in distinct steps are
    independent.
  - independence across rows: the participations of distinct rows are independent.
  - batch size law: the number of rows that choose step t is Binomial(num_examples,
    sampling_probability).
  - uniform truncation: a step with more than B rows keeps a uniformly random subset of
    size B, whatever the order in which they arrive.
  - once per epoch: with the other samplers, every row takes part in exactly one step of
    every epoch; with balls-and-bins that step is uniformly random, independent of other
    rows and epochs.
  - determinism: the same (key, plan, block name, number of rows) gives the same
    participations and priorities, on any machine.
  - separation: other keys, plans or block names give independent choices.

Public: the plan.  Sensitive: the key and everything that these functions return.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

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
from pipelines.sampling import shuffle
from pipelines.sampling.shuffle import count_at_or_below

_WORD = 1 << 64
# Decimal digits: 128-bit thresholds stay exact after millions of recurrence steps.
_PRECISION = 80


@dataclasses.dataclass(frozen=True)
class Participations:
    """Rows of one block and the steps they chose; parallel arrays.  Sensitive.

    Attributes:
      row: int64, index within the block.
      step: int64, in [0, num_steps).
      priority: uint64, uniform; a truncated step keeps the smallest.
    """

    row: np.ndarray
    step: np.ndarray
    priority: np.ndarray

    def __repr__(self) -> str:
        return "Participations(sensitive)"


@functools.lru_cache(maxsize=8)
def binomial_thresholds(
    num_trials: int, probability: Fraction
) -> tuple[np.ndarray, np.ndarray]:
    """Returns floor(2**128 Pr[Bin <= k]) for k = 0, 1, ... as (high, low) uint64 words.

    The number of thresholds at or below a uniform 128-bit number is then binomial, with
    an error of at most 2**-128 per threshold.  Computed with 80 decimal digits.

    Args:
      num_trials: At least 1.
      probability: In [0, 1).
    """
    with decimal.localcontext() as context:
        context.prec = _PRECISION
        # p0 is far below the smallest float for large num_trials * probability.
        context.Emin, context.Emax = decimal.MIN_EMIN, decimal.MAX_EMAX
        success = decimal.Decimal(probability.numerator) / probability.denominator
        odds = success / (1 - success)
        term = (1 - success) ** num_trials
        total, thresholds = term, [term]
        scale = decimal.Decimal(_WORD) ** 2
        for k in range(num_trials - 1):
            # Terms shrink past the mean, so the table ends at one below 2**-160.
            if k > num_trials * success and term * scale * (1 << 32) < 1:
                break
            term = term * odds * (num_trials - k) / (k + 1)
            total += term
            thresholds.append(total)
        integers = [min(int(t * scale), _WORD**2 - 1) for t in thresholds]
    high = np.array([value // _WORD for value in integers], np.uint64)
    low = np.array([value % _WORD for value in integers], np.uint64)
    return high, low


def binomial_counts(
    stream: Stream, num_trials: int, probability: Fraction, size: int
) -> np.ndarray:
    """Returns independent Binomial(num_trials, probability) draws, int64.

    Args:
      stream: Source of randomness.
      num_trials: At least 1.
      probability: In [0, 1].
      size: Number of draws.
    """
    if probability == 1:
        return np.full(size, num_trials, np.int64)
    high, low = binomial_thresholds(num_trials, probability)
    words = stream.words(size)
    # A word equal to the high half of a threshold is decided by 64 more bits.
    return count_at_or_below(high, low, words, lambda _: stream.words(1)[0])


def distinct_steps(
    stream: Stream, counts: np.ndarray, num_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, step), sorted: for row i a uniform subset of ``counts[i]`` steps.

    Each row draws steps until it has ``counts[i]`` distinct ones.  The first distinct
    values of an i.i.d. uniform sequence are a uniform subset.

    Args:
      stream: Source of randomness.
      counts: int64, in [0, num_steps], one per row.
      num_steps: Steps to choose from.

    Returns:
      Parallel int64 arrays of length ``counts.sum()``.
    """
    codes = np.empty(0, np.int64)
    missing = counts
    while missing.any():
        rows = np.repeat(np.arange(len(counts)), missing)
        fresh = rows * num_steps + stream.integers(num_steps, len(rows))
        codes = np.unique(np.concatenate([codes, fresh]))
        missing = counts - np.bincount(codes // num_steps, minlength=len(counts))
    return codes // num_steps, codes % num_steps


def uniform_subsets(
    stream: Stream, counts: np.ndarray, num_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns such arrays in linear time, even if rows take most steps.

    Arguments as for ``distinct_steps``.
    """
    light = np.where(counts <= num_steps // 2, counts, 0)
    row, step = distinct_steps(stream, light, num_steps)
    heavy = np.flatnonzero(counts > num_steps // 2)
    if not len(heavy):
        return row, step
    present = np.ones((len(heavy), num_steps), bool)
    present[distinct_steps(stream, num_steps - counts[heavy], num_steps)] = False
    heavy_row, heavy_step = np.nonzero(present)
    return np.append(row, heavy[heavy_row]), np.append(step, heavy_step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockRows:
    """A block as the sampler sees it.

    Attributes:
      name: Unique within the data set, and the same in every run.
      num_rows: Number of rows in the block.
      first_row: Number of rows in all blocks before it.
    """

    name: str
    num_rows: int
    first_row: int = 0


#: Parallel arrays: row, step, priority; see `Participations`.
Choices = tuple[np.ndarray, np.ndarray, np.ndarray]
#: (plan, sampling key, block, boundaries of a shuffle) -> the steps of the block's
#: rows.
Assign = Callable[[DpSgdPlan, bytes, BlockRows, np.ndarray | None], Choices]


def _block_stream(plan: DpSgdPlan, sampling_key: bytes, block: BlockRows) -> Stream:
    # The fingerprint makes two plans under one key independent.
    return Stream(derive(sampling_key, "sampling", plan.fingerprint, block.name))


def _poisson(
    plan: DpSgdPlan, sampling_key: bytes, block: BlockRows, _: np.ndarray | None
) -> Choices:
    stream = _block_stream(plan, sampling_key, block)
    counts = binomial_counts(
        stream, plan.num_steps, plan.sampling_probability, block.num_rows
    )
    row, step = uniform_subsets(stream, counts, plan.num_steps)
    return row, step, stream.words(len(row))


def _cyclic_poisson(
    plan: DpSgdPlan, sampling_key: bytes, block: BlockRows, _: np.ndarray | None
) -> Choices:
    assert plan.bands is not None
    stream = _block_stream(plan, sampling_key, block)
    group = stream.integers(plan.bands, block.num_rows)
    rows, turns = [], []
    for number in range(min(plan.bands, plan.num_steps)):
        its_rows = np.flatnonzero(group == number)
        num_turns = len(range(number, plan.num_steps, plan.bands))
        rate = plan.sampling_probability
        counts = binomial_counts(stream, num_turns, rate, len(its_rows))
        row, turn = uniform_subsets(stream, counts, num_turns)
        rows.append(its_rows[row])
        turns.append(turn * plan.bands + number)
    row, step = np.concatenate(rows), np.concatenate(turns)
    return row, step, stream.words(len(row))


def _balls_and_bins(
    plan: DpSgdPlan, sampling_key: bytes, block: BlockRows, _: np.ndarray | None
) -> Choices:
    stream = _block_stream(plan, sampling_key, block)
    size = plan.num_epochs * block.num_rows
    row = np.tile(np.arange(block.num_rows), plan.num_epochs)
    first_step = np.repeat(np.arange(plan.num_epochs), block.num_rows)
    first_step *= plan.steps_per_epoch
    step = first_step + stream.integers(plan.steps_per_epoch, size)
    return row, step, stream.words(size)


def _deterministic(
    plan: DpSgdPlan, sampling_key: bytes, block: BlockRows, _: np.ndarray | None
) -> Choices:
    del sampling_key  # nothing is random
    position = block.first_row + np.arange(block.num_rows)
    within = position * plan.steps_per_epoch // plan.num_examples
    epochs = np.arange(plan.num_epochs) * plan.steps_per_epoch
    row = np.tile(np.arange(block.num_rows), plan.num_epochs)
    step = (epochs[:, None] + within).ravel()
    return row, step, np.tile(position.astype(np.uint64), plan.num_epochs)


def _shuffle(
    plan: DpSgdPlan,
    sampling_key: bytes,
    block: BlockRows,
    boundaries: np.ndarray | None,
) -> Choices:
    if boundaries is None:
        raise ValueError("A shuffle needs the boundaries of its steps.")
    return shuffle.shuffled_steps(
        plan, sampling_key, block.name, block.num_rows, boundaries
    )


_SAMPLERS: dict[str, Assign] = {
    DETERMINISTIC: _deterministic,
    PERSISTENT_SHUFFLE: _shuffle,
    DYNAMIC_SHUFFLE: _shuffle,
    POISSON: _poisson,
    TRUNCATED_POISSON: _poisson,
    BALLS_AND_BINS: _balls_and_bins,
    CYCLIC_POISSON: _cyclic_poisson,
    TRUNCATED_CYCLIC_POISSON: _cyclic_poisson,
}


def register(name: str, assign: Assign) -> None:
    """Registers, in this process, how a sampler assigns rows to steps.

    A retried or repeated bundle must make the same choices: ``assign`` may draw only
    from streams keyed by ``derive(key, label, plan.fingerprint, ...)``.

    Args:
      name: As registered with `accounting.core.sampler_registry`.
      assign: A pure function.  Its last argument is None except for shuffles.

    Raises:
      InputError: the name is taken, or not registered with the accountant.
    """
    sampler_registry.rules(name)
    if name in _SAMPLERS:
        raise InputError(
            f"Expected sampler={name!r} not to be registered yet. Choose another name."
        )
    _SAMPLERS[name] = assign


def check_assigned(plan: DpSgdPlan) -> None:
    """Refuses a plan whose sampler has no registered assignment of rows to steps.

    Raises:
      InputError: there is none.
    """
    if plan.sampler not in _SAMPLERS:
        sampler_registry.refuse(
            plan.sampler,
            "an assignment of rows to steps",
            "Register one with pipelines.sampling.samplers.register.",
        )


def find_boundaries(
    plan: DpSgdPlan, sampling_key: bytes, blocks: Sequence[BlockRows]
) -> np.ndarray | None:
    """Returns the boundaries of a shuffle, or None for other samplers.  Sensitive.

    Other arguments as for ``sample_block``.

    Args:
      blocks: All blocks of the data set.
    """
    if not plan.num_shuffles:
        return None
    named = [(block.name, block.num_rows) for block in blocks]
    return shuffle.find_boundaries(plan, sampling_key, named)


def sample_block(
    plan: DpSgdPlan,
    sampling_key: bytes,
    block: BlockRows,
    boundaries: np.ndarray | None = None,
) -> Participations:
    """Returns the participations of the rows of one block.  Sensitive.

    Args:
      plan: Public description of the sampling.
      sampling_key: Secret, 32 bytes; a job uses ``KnownInput.data_set_key``.
      block: The block.
      boundaries: From ``find_boundaries``.

    Raises:
      InputError: the sampler has no registered assignment of rows to steps.
    """
    check_assigned(plan)
    row, step, priority = _SAMPLERS[plan.sampler](plan, sampling_key, block, boundaries)
    return Participations(row=row, step=step, priority=priority)


def arrange_steps(
    step: np.ndarray,
    priority: np.ndarray,
    steps: Sequence[int] | range,
    truncated_batch_size: int | None,
) -> list[np.ndarray]:
    """Returns, for each of ``steps``, the participations that form its batch, in order.

    Rows are sorted by priority, a uniformly random order that does not depend on the
    order of arrival.  A batch above the cap loses its end.

    Args:
      step: int64, the step of each participation in a group.  Sensitive.
      priority: uint64, parallel to ``step``.  Sensitive.
      steps: Consecutive steps of the group, ascending.
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
