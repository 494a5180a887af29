"""The accountant: epsilon, delta and noise multiplier of a `DpSgdPlan`.

Every answer is for the worse of both directions of a neighbouring relation.  The
default is zero-out: an example is replaced by a ghost that contributes zero
(`REPLACE_SPECIAL` in dp_accounting).  `accounting.core.neighboring_relation` lists the
others.  Answers are intervals whose type tells a guarantee from a lower bound; see
`accounting.core.intervals`.  Lower bounds that take seconds to compute are in
`accounting.lower_bounds`.

How tight the bounds are: for a delta of 1e-20 or more, upper bounds of Poisson and
truncated batches are within 1e-4 of what their theorem gives, and lower bounds are
useful.  For a delta of 1e-14 times the number of epochs or more, upper bounds of balls
and bins are within 1e-3.  At a smaller delta the bounds still hold, epsilon rises as
delta falls, and ``delta(epsilon(d)) <= d``; but they may be far from tight.  Bounds on
delta of Poisson and truncated batches are then Chernoff's: ten times as large, or far
more where rare steps lose most.  Below 1e-17, bounds of balls and bins are those that
reveal the steps of an example.

Example:
  >>> from accounting.core.plan import TRUNCATED_POISSON, DpSgdPlan
  >>> plan = DpSgdPlan(
  ...     sampler="poisson", num_examples=60_000, expected_batch_size=600,
  ...     num_steps=1000, num_epochs=10)
  >>> round(epsilon(plan, noise_multiplier=1.1, delta=1e-5).guarantee, 2)
  1.52
"""

from __future__ import annotations

import dataclasses
import math

from accounting.core import sampler_registry
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.neighboring_relation import REPLACE_SPECIAL, brought
from accounting.core.numerics import (
    LEAST_TIGHT_DELTA,
    MOST_NOISE,
    log_ratio,
    round_up,
    threshold,
)
from accounting.core.plan import TRUNCATED_POISSON, DpSgdPlan
from accounting.core.validation import InputError, check_float, check_int

#: More steps are refused, since rounding errors would add up.
MOST_STEPS = 10**9
#: Noise for a smaller delta is not computed: its bounds leave the range of numbers.
LEAST_TARGET_DELTA = 1e-200
#: Relative width at which searches for epsilon end, or less.
_LEFT = 1e-6


def _sampler(
    plan: DpSgdPlan, relation: str, max_examples_per_user: int = 1
) -> sampler_registry.Sampler:
    check_int("num_steps", plan.num_steps, at_most=MOST_STEPS)
    return brought(plan.sampler, relation, max_examples_per_user)


def check_epsilon(epsilon: float) -> float:
    """Returns ``epsilon`` if it is a finite number >= 0."""
    return check_float("epsilon", epsilon, at_least=0.0)


def check_delta(delta: float) -> float:
    """Returns ``delta`` if it is strictly between 0 and 1."""
    remedy = "Choose it well below 1 / num_examples."
    return check_float("delta", delta, above=0.0, below=1.0, remedy=remedy)


def check_noise_multiplier(noise_multiplier: float) -> float:
    """Returns ``noise_multiplier`` if it is a number from 0 to `MOST_NOISE`."""
    asked = "noise_multiplier", noise_multiplier
    return check_float(*asked, at_least=0.0, at_most=MOST_NOISE)


def epsilon(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> Bounds:
    """Returns bounds on epsilon at ``delta``.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: In (0, 1).
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    sampler = _sampler(plan, neighboring_relation, max_examples_per_user)
    noise = check_noise_multiplier(noise_multiplier)
    target = check_delta(delta)
    result = sampler.epsilon(plan, noise, target)
    if target < LEAST_TIGHT_DELTA and not sampler.closed_form:
        result = _consistent(sampler, plan, noise, target, result)
    return _six_digits(sampler, plan, noise, target, result)


def _six_digits(
    sampler: sampler_registry.Sampler,
    plan: DpSgdPlan,
    noise_multiplier: float,
    delta: float,
    found: Bounds,
) -> Bounds:
    """Returns bounds on epsilon without what a search leaves after six digits.

    Noise that was found for an epsilon of six digits then has at most this epsilon.
    """
    upper = found.guarantee
    if not 0.0 < upper < math.inf:
        return found
    rounded = float(f"{upper:.6g}")
    if not (found.lower or 0.0) <= rounded < upper <= rounded * (1 + _LEFT):
        return found
    proof = sampler.delta(plan, noise_multiplier, rounded)
    if proof.guarantee > delta:
        return found
    # The bound on delta may have another proof, with a claim of its own.
    return dataclasses.replace(found, upper=rounded, method=proof.method)


def _consistent(
    sampler: sampler_registry.Sampler,
    plan: DpSgdPlan,
    noise_multiplier: float,
    delta: float,
    found: Bounds,
) -> Bounds:
    """Returns bounds on epsilon at which the proven delta is at most ``delta``.

    At a tiny delta, the bounds on delta may be looser than those on epsilon.
    """
    if not 0.0 < found.guarantee < math.inf:
        return found

    def excess(epsilon: float) -> float:
        proven = sampler.delta(plan, noise_multiplier, epsilon).guarantee
        return log_ratio(proven, delta)

    if excess(found.guarantee) <= 0.0:
        return found
    _, high = threshold(excess, found.guarantee, relative=1e-4, stride=1.001)
    return dataclasses.replace(found, upper=max(high, found.guarantee))


def delta(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    epsilon: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> Bounds:
    """Returns bounds on delta at ``epsilon``: a point of the privacy profile.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      epsilon: At least 0.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    sampler = _sampler(plan, neighboring_relation, max_examples_per_user)
    noise = check_noise_multiplier(noise_multiplier)
    target = check_epsilon(epsilon)
    return sampler.delta(plan, noise, target)


def noise_multiplier(
    plan: DpSgdPlan,
    *,
    epsilon: float,
    delta: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> NoiseBounds:
    """Returns bounds on the noise multiplier that ``(epsilon, delta)`` needs.

    ``sufficient`` is at most 0.01 % above the least noise multiplier that the bounds
    used here prove.  It is rounded up and verified to meet the target.

    Args:
      plan: How batches are made.
      epsilon: Target, at least 0.
      delta: Target, in (0, 1), at least `LEAST_TARGET_DELTA`.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.

    Raises:
      InputError: a value out of range, a relation that is not accounted for, or a
        target that no noise meets.
    """
    sampler = _sampler(plan, neighboring_relation, max_examples_per_user)
    check_epsilon(epsilon)
    check_delta(delta)
    remedy = "Use 1e-20: what is less probable than that never happens."
    check_float("delta", delta, at_least=LEAST_TARGET_DELTA, remedy=remedy)
    result = _verified(sampler, plan, float(epsilon), float(delta))
    if result.sufficient is not None and math.isinf(result.sufficient):
        raise InputError(
            f"Expected epsilon={epsilon!r}, delta={delta!r} to be reachable with some "
            "noise multiplier. Raise epsilon or delta."
        )
    return result


def _verified(
    sampler: sampler_registry.Sampler, plan: DpSgdPlan, epsilon: float, delta: float
) -> NoiseBounds:
    # The search may use a coarser grid than `delta` does: its result must hold there.
    result = sampler.noise_multiplier(plan, epsilon, delta)
    value = result.sufficient
    if value is None or math.isinf(value):
        return result
    # Only rounding separates a closed form from its target: no digits are cut.
    value = value if sampler.closed_form or value == 0.0 else round_up(value, 6)
    for _ in range(1000):
        answer = sampler.delta(plan, value, epsilon)
        if answer.guarantee <= delta:
            return dataclasses.replace(result, sufficient=value, method=answer.method)
        if sampler.closed_form:
            value = math.nextafter(value, math.inf)
        else:
            value = round_up(value * (1 + 1e-4), 6)
    raise ArithmeticError(f"noise multiplier {value!r} could not be verified")


def smallest_truncated_batch_size(
    *,
    num_examples: int,
    expected_batch_size: int,
    num_steps: int,
    epsilon: float,
    delta: float,
    sampler: str = TRUNCATED_POISSON,
    bands: int | None = None,
) -> int:
    """Returns the least cap on the examples of a step with a negligible privacy cost.

    For truncated Poisson it is the least B with
    ``(1 + e^epsilon) T Pr[Bin(n, q) > B] <= 1e-5 delta``.  For a smaller cap,
    ``epsilon(plan, ...)`` of a plan with that cap includes the cost.

    Args:
      num_examples: n, slots of the data set.
      expected_batch_size: Expected examples per step, q n.
      num_steps: T.
      epsilon: Target, at least 0.
      delta: Target, in (0, 1).
      sampler: A sampler whose plans have a cap.
      bands: As in `DpSgdPlan`.

    Raises:
      InputError: a value out of range, or a sampler without a cap.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    check_int("num_steps", num_steps, at_least=1, at_most=MOST_STEPS)
    truncation = truncation_of(sampler)
    untruncated = DpSgdPlan(
        sampler=truncation.untruncated,
        num_examples=num_examples,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        bands=bands,
    )
    return truncation.smallest_cap(untruncated, float(epsilon), float(delta))


def truncation_of(sampler: str) -> sampler_registry.Truncation:
    """Returns the truncation of a sampler.

    Raises:
      InputError: the sampler has none.
    """
    found = sampler_registry.get(sampler).truncation
    if found is None:
        sampler_registry.refuse(
            sampler, "a smallest cap", "Give truncated_batch_size as a number."
        )
    return found
