"""Which steps each example takes part in, as a pure function of (key, block, row).

A block is one Parquet row group, named by its file and index.  Every block has its own
ChaCha20 stream, keyed by (sampling key, plan, block name), so a retried, repeated or
re-ordered bundle makes the same choices on every engine.

A row first draws how many steps it takes part in, from the exact binomial law, and then
which ones, a uniform subset of that size: together, independent coin flips for every
step (Beltran et al. 2024, arXiv:2406.17298, Lemma 1, with rows and steps exchanged).
The cost is that of the rows read and the participations drawn, never rows x steps.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20 and
keyed BLAKE2b (Poisson samplers; within 2**-64 in total variation for a whole data set
of 2**40 rows):
  - inclusion probability: a row takes part in step t with probability
    ``plan.sampling_probability``, for all t in [0, num_steps).
  - independence across steps: the participations of a row in distinct steps are
    independent.
  - independence across rows: the participations of distinct rows are independent.
  - batch size law: the rows that choose step t are Binomial(num_examples,
    sampling_probability) in number.
  - uniform truncation: of a step with more than B rows a uniformly random subset of
    size B is kept, whatever the order in which they arrive.
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

from accounting.plan import POISSON, TRUNCATED_POISSON, DpSgdPlan
from accounting.validation import InputError
from pipelines.keys import derive

_WORD = 1 << 64
# Digits that leave 128-bit thresholds exact after millions of recurrence steps.
_PRECISION = 80


@dataclasses.dataclass(frozen=True)
class Participations:
    """Rows of one block and the steps they chose; parallel arrays.  Sensitive.

    Attributes:
      row: int64, index within the block.
      step: int64, in [0, num_steps).
      priority: uint64, uniform; of a step that is too large the smallest are kept.
    """

    row: np.ndarray
    step: np.ndarray
    priority: np.ndarray

    def __repr__(self) -> str:
        return "Participations(sensitive)"


class Stream:
    """Uniform 64-bit words of ChaCha20 with 20 rounds.  Sensitive."""

    def __init__(self, key: bytes) -> None:
        from randomgen import ChaCha

        self._generator = ChaCha(key=int.from_bytes(key, "little"), rounds=20)

    def words(self, count: int) -> np.ndarray:
        """Returns the next ``count`` words, uint64."""
        return self._generator.random_raw(count)

    def integers(self, bound: int, count: int) -> np.ndarray:
        """Returns ``count`` exactly uniform integers in [0, bound), int64."""
        words = self.words(count)
        # The last, incomplete run of ``bound`` words would favour small integers.
        limit = np.uint64(_WORD - _WORD % bound - 1)
        while (rejected := words > limit).any():
            words[rejected] = self.words(int(rejected.sum()))
        return (words % np.uint64(bound)).astype(np.int64)


@functools.lru_cache(maxsize=8)
def binomial_thresholds(
    num_trials: int, probability: Fraction
) -> tuple[np.ndarray, np.ndarray]:
    """Returns floor(2**128 Pr[Bin <= k]) for k = 0, 1, ... as (high, low) uint64 words.

    A uniform 128-bit number w then has a binomial number of thresholds at or below it,
    up to 2**-128 for each threshold.  Computed with 80 decimal digits.

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
            # Past the mean the terms only shrink: one below 2**-160 ends the table.
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
    """Returns ``size`` independent Binomial(num_trials, probability) draws, int64."""
    if probability == 1:
        return np.full(size, num_trials, np.int64)
    high, low = binomial_thresholds(num_trials, probability)
    words = stream.words(size)
    counts = np.searchsorted(high, words, side="right")
    # A word equal to the high half of a threshold is decided by 64 more bits.
    first = np.searchsorted(high, words, side="left")
    for row in np.flatnonzero(first < counts):
        second = stream.words(1)[0]
        tied = low[first[row] : counts[row]]
        counts[row] = first[row] + np.searchsorted(tied, second, side="right")
    return counts.astype(np.int64)


def distinct_steps(
    stream: Stream, counts: np.ndarray, num_steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (row, step), sorted: for row i a uniform subset of ``counts[i]`` steps.

    Uniform draws are added until a row has as many distinct ones as it needs; never
    more, so the subset is that of the first distinct values of an i.i.d. sequence, and
    therefore uniform.
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
    """``distinct_steps`` whose cost stays linear when a row takes most of the steps."""
    light = np.where(counts <= num_steps // 2, counts, 0)
    row, step = distinct_steps(stream, light, num_steps)
    heavy = np.flatnonzero(counts > num_steps // 2)
    if not len(heavy):
        return row, step
    present = np.ones((len(heavy), num_steps), bool)
    present[distinct_steps(stream, num_steps - counts[heavy], num_steps)] = False
    heavy_row, heavy_step = np.nonzero(present)
    return np.append(row, heavy[heavy_row]), np.append(step, heavy_step)


def _poisson(
    plan: DpSgdPlan, stream: Stream, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    counts = binomial_counts(
        stream, plan.num_steps, plan.sampling_probability, num_rows
    )
    return uniform_subsets(stream, counts, plan.num_steps)


_Sampler = Callable[[DpSgdPlan, Stream, int], tuple[np.ndarray, np.ndarray]]
_SAMPLERS: dict[str, _Sampler] = {POISSON: _poisson, TRUNCATED_POISSON: _poisson}


def check_sampler(plan: DpSgdPlan) -> None:
    """Refuses a plan that this module cannot sample.

    Raises:
      InputError: the sampler and those there are.
    """
    if plan.sampler not in _SAMPLERS:
        raise InputError(
            f"Expected sampler={plan.sampler!r} to be one of {', '.join(_SAMPLERS)}: "
            "the others are accounted for, but not yet sampled."
        )


def sample_block(
    plan: DpSgdPlan, sampling_key: bytes, block_name: str, num_rows: int
) -> Participations:
    """Returns the participations of the rows of one block.  Sensitive.

    Args:
      plan: Public description of the sampling.
      sampling_key: Secret, 32 bytes.
      block_name: Unique within the data set, and the same in every run.
      num_rows: Rows of the block.

    Raises:
      InputError: a sampler that is not there.
    """
    check_sampler(plan)
    # The plan is a label too: one key used for two plans must not correlate them.
    key = derive(sampling_key, "sampling", plan.fingerprint, block_name)
    stream = Stream(key)
    row, step = _SAMPLERS[plan.sampler](plan, stream, num_rows)
    return Participations(row=row, step=step, priority=stream.words(len(row)))


def arrange_steps(
    step: np.ndarray,
    priority: np.ndarray,
    steps: Sequence[int] | range,
    truncated_batch_size: int | None,
) -> list[np.ndarray]:
    """Returns, for each of ``steps``, which participations make its batch, in order.

    Rows stand in the order of their priorities, which is uniformly random and does not
    depend on the order of arrival; a batch that is too large loses its end.

    Args:
      step: int64, the step of each participation of a group.  Sensitive.
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
