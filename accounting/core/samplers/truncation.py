"""The cap of truncated Poisson batches, and its cost for any mechanism.

    delta(eps) <= delta_Poisson(eps) + (1 + e^eps) T Pr[Bin(n, q) > B].

Couple the truncated sampler with the untruncated one.  They differ with probability at
most ``eta = T Pr[Bin(n, q) > B]`` on either data set, so
``Pr[M(D) in S] <= Pr[M_P(D) in S] + eta <= e^eps Pr[M_P(D') in S] + delta_P + eta
<= e^eps (Pr[M(D') in S] + eta) + delta_P + eta``.  It holds for the rows of a user,
too: with or without them, truncation changes a step only if more than B are sampled.

References:
  Chua et al. (2024), arXiv:2411.04205, Theorem 3.3.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

from scipy import special

from accounting.core import sampler_registry
from accounting.core.plan import DpSgdPlan
from accounting.core.samplers.composed_steps import rounded_up

#: Largest share of a target delta for truncation by `smallest_cap`.
_SHARE_OF_DELTA = 1e-5
#: Factor that covers the relative error of the incomplete beta function.
TAIL_SLACK = 1 + 1e-9


def tail_probability(
    num_trials: int, sampling_probability: float, threshold: int
) -> float:
    """Returns ``Pr[Bin(num_trials, sampling_probability) > threshold]``, rounded up.

    Args:
      num_trials: At least 0.
      sampling_probability: In (0, 1].
      threshold: Any integer.
    """
    if threshold >= num_trials:
        return 0.0
    if threshold < 0:
        return 1.0
    tail = special.betainc(threshold + 1, num_trials - threshold, sampling_probability)
    return min(1.0, float(tail) * TAIL_SLACK)


def step_tail(plan: DpSgdPlan, size: int) -> float:
    """Returns a bound on the probability that a step has more than ``size`` examples.

    Where examples are in groups, it is a step of the group of a given example, which
    counts as in it: each other example is in that group and step with probability b/n.

    Args:
      plan: A plan of Poisson batches.
      size: At least 1.
    """
    rate = rounded_up(Fraction(plan.expected_batch_size, plan.num_examples))
    if plan.bands is None:
        return tail_probability(plan.num_examples, rate, size)
    return tail_probability(plan.num_examples - 1, rate, size - 1)


def truncation_probability(plan: DpSgdPlan) -> float:
    """Returns the probability that one given step is truncated; see `step_tail`."""
    assert plan.truncated_batch_size is not None
    return step_tail(plan, plan.truncated_batch_size)


def truncation_delta(plan: DpSgdPlan, epsilon: float) -> float:
    """Returns ``(1 + e^epsilon) T Pr[Bin(n, q) > B]``, the additive correction.

    Args:
      plan: A plan of truncated Poisson batches, with cap B.
      epsilon: At least 0.
    """
    truncated = truncation_probability(plan)
    if truncated == 0.0:
        return 0.0
    exponent = epsilon + math.log1p(math.exp(-epsilon)) + math.log(truncated)
    return math.exp(min(exponent + math.log(plan.num_steps), 700.0))


def smallest_cap(plan: DpSgdPlan, epsilon: float, delta: float) -> int:
    """Returns the least B whose additive correction is at most 1e-5 of ``delta``.

    Args:
      plan: A plan of Poisson batches.
      epsilon: At least 0.
      delta: In (0, 1).

    Example:
      >>> smallest_cap(
      ...     DpSgdPlan(sampler="poisson", num_examples=36_800_000,
      ...               expected_batch_size=65_536, num_steps=562), 5.0, 2.7e-8)
      67754
    """
    allowed = math.log(_SHARE_OF_DELTA) + math.log(delta) - math.log(plan.num_steps)
    allowed -= epsilon + math.log1p(math.exp(-epsilon))

    def is_enough(size: int) -> bool:
        tail = step_tail(plan, size)
        return tail == 0.0 or math.log(tail) <= allowed

    sizes = range(plan.expected_batch_size, plan.num_examples)
    return sizes.start + bisect.bisect_left(sizes, True, key=is_enough)


TRUNCATION = sampler_registry.Truncation(
    untruncated="poisson", delta=truncation_delta, smallest_cap=smallest_cap
)
