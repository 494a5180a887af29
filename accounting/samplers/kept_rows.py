"""How many rows of a user a truncated step keeps: for a lower bound.

With all other gradients zero, evicting others changes nothing, and a step's sum is
N(J, s^2) with J the user's rows that are sampled and kept: of i sampled beside m
others, all, or if i + m > B a hypergeometric number of them.  Steps are independent.

Probabilities of keeping any are rounded down, by one factor for all.  That is to forget
the user in a step at random, independent of the noise: mixing Q into P, or P into Q,
lowers both hockey-stick divergences, which are jointly convex.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from accounting.plan import DpSgdPlan
from accounting.pld.poisson_lower_bound import Component

#: Relative error of the probabilities, taken off them.
_ROUNDING = 1e-9
#: Beyond so many deviations others are not counted: what is left out keeps no row.
_DEVIATIONS = 12


def components(plan: DpSgdPlan, count: int) -> tuple[Component, ...]:
    """Returns the pair of one step.

    Args:
      plan: With a cap B.
      count: Rows of the user, k; at most ``plan.num_examples``.
    """
    size = plan.truncated_batch_size
    assert size is not None
    # Increasing in q.
    rate = math.nextafter(float(plan.sampling_probability), 0.0)
    others = max(plan.num_examples - count, 0)
    mean = others * rate
    reach = _DEVIATIONS * math.sqrt(mean) + _DEVIATIONS**2
    sampled = np.arange(max(0, int(mean - reach)), min(others, int(mean + reach)) + 1)
    chances = stats.binom.pmf(sampled, others, rate)
    kept = np.zeros(count + 1)
    for own in range(1, count + 1):
        own_chance = float(stats.binom.pmf(own, count, rate))
        fits = sampled + own <= size
        kept[own] += own_chance * float(chances[fits].sum())
        for number in range(1, own + 1):
            share = stats.hypergeom.pmf(number, sampled[~fits] + own, own, size)
            kept[number] += own_chance * float(chances[~fits] @ share)
    return tuple(
        Component(float(number), float(kept[number]) * (1 - _ROUNDING), 0.0)
        for number in range(1, count + 1)
    )
