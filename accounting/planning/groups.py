"""Epsilon for the examples of a user, and for groups of examples.

Formal guarantees:
  - For the examples of a user the least proven epsilon is returned; for any other
    group, such as an example and its replacement, the epsilon by group privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from accounting.core import accountant
from accounting.core.neighboring_relation import (
    MOST_EXAMPLES_PER_USER,
    REPLACE_SPECIAL,
    is_supported,
)
from accounting.core.numerics import settled_epsilon
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import check_int


def user_epsilon(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    max_examples_per_user: int,
) -> float:
    """Returns the least proven epsilon for users with at most k examples.

    It uses the sampler's bounds for users, such as Poisson sampling's by mixtures of
    Gaussians.  For other samplers, and for k above `MOST_EXAMPLES_PER_USER`, it uses
    group privacy.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: Delta of the claim for a user, in (0, 1).
      max_examples_per_user: k, at least 1.

    Raises:
      InputError: a value out of range.
    """
    count = check_int("max_examples_per_user", max_examples_per_user, at_least=1)
    found = math.inf
    for size in _unit_sizes(plan, count):
        of_unit = _epsilon_of(plan, noise_multiplier, size)
        groups = -(-count // size)
        # Group privacy gives each unit only a share of delta, so its result is at least
        # this product.  It may still exceed what was found: hence the minimum.
        if groups * of_unit(delta) < found:
            found = min(found, _of_group(of_unit, delta, groups))
    return found


def group_epsilon(
    plan: DpSgdPlan, *, noise_multiplier: float, delta: float, group_size: int
) -> float:
    """Returns an epsilon for data sets that differ by several zero-outs.

    Examples are the examples of a user and, as a group of two, an example and its
    replacement.  By group privacy: if the plan is (e, d)-private for one, it is
    ``(k e, d (e^(k e) - 1) / (e^e - 1))``-private for k.  Infinite if no e is
    proven.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: Delta of the claim for the group, in (0, 1).
      group_size: k, at least 1.

    Raises:
      InputError: a value out of range.
    """
    check_int("group_size", group_size, at_least=1)
    return _of_group(_epsilon_of(plan, noise_multiplier, 1), delta, group_size)


def _unit_sizes(plan: DpSgdPlan, count: int) -> tuple[int, ...]:
    """Returns the sizes of the units whose bounds are tried, in order."""
    groups = -(-count // MOST_EXAMPLES_PER_USER)
    size = -(-count // groups)
    if size > 1 and is_supported(plan.sampler, REPLACE_SPECIAL, size):
        return size, 1
    return (1,)


def _epsilon_of(
    plan: DpSgdPlan, noise_multiplier: float, count: int
) -> Callable[[float], float]:
    """Returns a function from delta to the epsilon of so many examples."""
    return lambda delta: (
        accountant.epsilon(
            plan,
            noise_multiplier=noise_multiplier,
            delta=delta,
            max_examples_per_user=count,
        ).guarantee
    )


def _of_group(of_unit: Callable[[float], float], delta: float, count: int) -> float:
    """Returns the epsilon of ``count`` units, by group privacy.

    Args:
      of_unit: Delta -> epsilon of one unit.
      delta: Delta of the claim, in (0, 1).
      count: Number of units, at least 1.
    """
    accountant.check_delta(delta)
    if count == 1:
        return of_unit(delta)

    def needed(epsilon: float) -> float:
        log_share = -math.log(count) if epsilon == 0 else _log_group(epsilon, count)
        if math.log(delta) + log_share < -680.0:
            return math.inf
        return of_unit(delta * math.exp(log_share))

    return count * settled_epsilon(needed, margin=1e-5, most_tries=60)


def _log_group(epsilon: float, count: int) -> float:
    """Returns ``ln((e^epsilon - 1) / (e^(count epsilon) - 1))``."""

    def log_expm1(value: float) -> float:
        return value + math.log(-math.expm1(-value))

    return log_expm1(epsilon) - log_expm1(count * epsilon)
