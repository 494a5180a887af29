"""The largest runs within a privacy budget, and bounds for users and against attacks.

Formal guarantees:
  - Every number of steps or examples returned was itself verified to meet the budget.
  - For the examples of a user the least proven epsilon is returned; for any other
    group, such as an example and its replacement, the epsilon by group privacy.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable

from accounting.core import accountant, sampler_registry
from accounting.core import trade_off as bounds
from accounting.core.neighboring_relation import (
    MOST_EXAMPLES_PER_USER,
    REPLACE_SPECIAL,
    is_supported,
)
from accounting.core.numerics.calibration import settled_epsilon
from accounting.core.plan import DpSgdPlan, goes_through_epochs
from accounting.core.validation import InputError, check_int

#: Largest number of steps that a search tries.
MOST_STEPS = 10_000_000


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Returns the largest integer in [0, most] that fits; ``fits`` is monotone."""
    if fits(most):
        return most
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, min(2 * high, most)
    counts = range(low + 1, high)
    return low + bisect.bisect_left(counts, True, key=lambda count: not fits(count))


def _meets(
    plan: DpSgdPlan, noise_multiplier: float, epsilon: float, delta: float
) -> bool:
    answer = accountant.delta(plan, noise_multiplier=noise_multiplier, epsilon=epsilon)
    return answer.guarantee <= delta


def most_steps(
    plan: DpSgdPlan, *, noise_multiplier: float, epsilon: float, delta: float
) -> int:
    """Returns the largest number of steps of ``plan``'s batches within the budget.

    Samplers that use every example once per epoch get whole epochs of
    ``plan.steps_per_epoch`` steps.  At most ten million steps; 0 if not even one step,
    or epoch, is within the budget.

    Args:
      plan: How batches are made; its number of steps has no effect.
      noise_multiplier: Noise standard deviation over the clip norm.
      epsilon: Epsilon of the budget, at least 0.
      delta: Delta of the budget, in (0, 1).

    Raises:
      InputError: a value out of range.
    """
    accountant.check_delta(delta)
    by_epoch = goes_through_epochs(plan.sampler)
    unit = plan.steps_per_epoch if by_epoch else 1

    def fits(count: int) -> bool:
        longer = dataclasses.replace(
            plan, num_steps=count * unit, num_epochs=count if by_epoch else 1
        )
        return _meets(longer, noise_multiplier, epsilon, delta)

    return unit * _largest(fits, max(1, MOST_STEPS // unit))


def largest_batch_size(
    plan: DpSgdPlan, *, noise_multiplier: float, epsilon: float, delta: float
) -> int:
    """Returns the largest expected batch size, hence the largest q, within the budget.

    The number of steps is ``plan``'s; a cap keeps its distance from the expected batch
    size.  0 if no batch size is within the budget.

    Args:
      plan: A plan whose sampler does not go through epochs, such as Poisson sampling.
      noise_multiplier: Noise standard deviation over the clip norm.
      epsilon: Epsilon of the budget, at least 0.
      delta: Delta of the budget, in (0, 1).

    Raises:
      InputError: a value out of range, or a sampler that uses every example once per
        epoch.
    """
    if goes_through_epochs(plan.sampler):
        free = (n for n in sampler_registry.names() if not goes_through_epochs(n))
        raise InputError(
            f"Expected sampler={plan.sampler!r} to be {' or '.join(map(repr, free))}: "
            "the others use every example once per epoch."
        )
    accountant.check_delta(delta)
    margin = (plan.truncated_batch_size or 0) - plan.expected_batch_size

    def fits(size: int) -> bool:
        cap = None
        if plan.truncated_batch_size is not None:
            cap = min(size + margin, plan.num_examples)
        larger = dataclasses.replace(
            plan, expected_batch_size=size, truncated_batch_size=cap
        )
        return _meets(larger, noise_multiplier, epsilon, delta)

    return _largest(fits, plan.num_examples)


def smallest_delta(
    plan: DpSgdPlan, *, noise_multiplier: float, epsilon: float
) -> float:
    """Returns the smallest delta that is proven at ``epsilon``.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      epsilon: At least 0.

    Raises:
      InputError: a value out of range.
    """
    answer = accountant.delta(plan, noise_multiplier=noise_multiplier, epsilon=epsilon)
    return answer.guarantee


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


def attack_success(
    plan: DpSgdPlan, *, noise_multiplier: float, false_positive_rate: float
) -> float:
    """Returns an upper bound on the true-positive rate of any membership attack.

    An attack decides, from the released model and all other examples, whether an
    example took part.  If it is wrong about a ghost with probability f, it is right
    about the example with at most the probability returned; see
    `accounting.core.trade_off`.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      false_positive_rate: f, in [0, 1].

    Raises:
      InputError: a value out of range.
    """
    found = bounds.trade_off(
        plan, noise_multiplier=noise_multiplier, rates=(false_positive_rate,)
    )
    return found.true_positive_rate(false_positive_rate)
