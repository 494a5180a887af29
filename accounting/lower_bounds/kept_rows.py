"""The number of a user's rows that a truncated step keeps, for a lower bound.

If all other gradients are zero, dropping other rows has no effect, and a step's sum is
N(J, s^2), where J is the number of the user's rows that are sampled and kept.  If i of
them are sampled beside m other rows, J = i, or a hypergeometric number if i + m > B.
Steps are independent.

The probabilities of J > 0 are rounded down by one common factor, and improbable draws
count as keeping no row.  So J becomes stochastically smaller, which lowers both
hockey-stick divergences, by the theorem of `user_pairs`.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import stats

from accounting.core.plan import DpSgdPlan
from accounting.lower_bounds.merged_outcomes import Component

#: Relative error of the probabilities, by which they are reduced.
_ROUNDING = 1e-9
#: Numbers of other rows beyond this many deviations count as keeping no row.
_DEVIATIONS = 12
#: So does a number of the user's own rows that is less probable than this.
_LEAST_CHANCE = 1e-30


def rate(plan: DpSgdPlan) -> float:
    """Returns the sampling probability, rounded down, which is more private.

    The probabilities of keeping rows rise with it.
    """
    return math.nextafter(float(plan.sampling_probability), 0.0)


@functools.lru_cache(maxsize=8)
def components(plan: DpSgdPlan, count: int) -> tuple[Component, ...]:
    """Returns the pair of one step.

    Args:
      plan: A plan with a cap B.
      count: k, number of rows of the user; at most ``plan.num_examples``.
    """
    size = plan.truncated_batch_size
    assert size is not None
    probability = rate(plan)
    others = max(plan.num_examples - count, 0)
    mean = others * probability
    reach = _DEVIATIONS * math.sqrt(mean) + _DEVIATIONS**2
    sampled = np.arange(max(0, int(mean - reach)), min(others, int(mean + reach)) + 1)
    chances = stats.binom.pmf(sampled, others, probability)
    kept = np.zeros(count + 1)
    for own in range(1, count + 1):
        own_chance = float(stats.binom.pmf(own, count, probability))
        if own_chance < _LEAST_CHANCE:
            continue
        fits = sampled + own <= size
        kept[own] += own_chance * float(chances[fits].sum())
        for number in range(1, own + 1):
            share = stats.hypergeom.pmf(number, sampled[~fits] + own, own, size)
            kept[number] += own_chance * float(chances[~fits] @ share)
    return tuple(
        Component(float(number), float(kept[number]) * (1 - _ROUNDING), 0.0)
        for number in range(1, count + 1)
    )
