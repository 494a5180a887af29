"""The accountant with what no privacy claim depends on: lower bounds, curves and caps.

Every guarantee is that of `accounting.core.accountant`, whose other answers are here,
too.

Example:
  >>> from accounting.core.plan import DpSgdPlan
  >>> plan = DpSgdPlan(
  ...     sampler="poisson", num_examples=60_000, expected_batch_size=600,
  ...     num_steps=1000, num_epochs=10)
  >>> found = epsilon(plan, noise_multiplier=1.1, delta=1e-5, both=True)
  >>> round(found.lower, 2), round(found.guarantee, 2)
  (1.52, 1.52)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from accounting.core import accountant as core
from accounting.core import sampler_registry
from accounting.core.accountant import delta_by_direction, noise_multiplier
from accounting.core.intervals import Bounds, ByDirection, NoiseBounds, below
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import TRUNCATED_POISSON, DpSgdPlan
from accounting.core.validation import check_int
from accounting.lower_bounds.searches import lower_epsilon

if TYPE_CHECKING:
    from accounting.lower_bounds.poisson_batches import LowerBound

__all__ = [
    "Bounds",
    "ByDirection",
    "NoiseBounds",
    "delta",
    "delta_by_direction",
    "delta_curve",
    "epsilon",
    "epsilon_curve",
    "noise_multiplier",
    "smallest_truncated_batch_size",
]


def _lower_bound(sampler: str, relation: str, max_examples_per_user: int) -> LowerBound:
    from accounting.lower_bounds.poisson_batches import bound_of  # NumPy

    found = bound_of(sampler, relation, max_examples_per_user)
    if found is None:
        sampler_registry.refuse(
            sampler, "a lower bound", "Ask for the upper one: both=False."
        )
    return found


def epsilon(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    both: bool = False,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> Bounds:
    """Returns bounds on epsilon at ``delta``.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: In (0, 1).
      both: Also compute a lower bound that takes seconds, as for Poisson and truncated
        Poisson batches.  It shows how tight the upper bound is.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    asked = neighboring_relation, max_examples_per_user
    found = core.epsilon(
        plan,
        noise_multiplier=noise_multiplier,
        delta=delta,
        neighboring_relation=neighboring_relation,
        max_examples_per_user=max_examples_per_user,
    )
    if not both or found.lower is not None:
        return found
    bound = _lower_bound(plan.sampler, *asked)
    lower = lower_epsilon(
        lambda point: bound.delta(plan, noise_multiplier, point),
        found.guarantee,
        delta,
    )
    return dataclasses.replace(found, lower=lower, lower_method=bound.method)


def delta(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    epsilon: float,
    both: bool = False,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> Bounds:
    """Returns bounds on delta at ``epsilon``: a point of the privacy profile.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      epsilon: At least 0.
      both: Also compute a lower bound, as for `epsilon`.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    asked = neighboring_relation, max_examples_per_user
    found = core.delta(
        plan,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        neighboring_relation=neighboring_relation,
        max_examples_per_user=max_examples_per_user,
    )
    if not both or found.lower is not None:
        return found
    bound = _lower_bound(plan.sampler, *asked)
    lower = below(bound.delta(plan, noise_multiplier, epsilon), found.guarantee)
    return dataclasses.replace(found, lower=lower, lower_method=bound.method)


def epsilon_curve(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    deltas: Iterable[float],
    neighboring_relation: str = REPLACE_SPECIAL,
) -> list[Bounds]:
    """Returns bounds on epsilon at each of ``deltas``.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      deltas: Each in (0, 1).
      neighboring_relation: One of `neighboring_relation.RELATIONS`.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    return [
        epsilon(
            plan,
            noise_multiplier=noise_multiplier,
            delta=point,
            neighboring_relation=neighboring_relation,
        )
        for point in deltas
    ]


def delta_curve(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    epsilons: Iterable[float],
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> list[Bounds]:
    """Returns bounds on delta at each of ``epsilons``: the privacy profile.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      epsilons: Each at least 0.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    return [
        delta(
            plan,
            noise_multiplier=noise_multiplier,
            epsilon=point,
            neighboring_relation=neighboring_relation,
            max_examples_per_user=max_examples_per_user,
        )
        for point in epsilons
    ]


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
    core.check_epsilon(epsilon)
    core.check_delta(delta)
    check_int("num_steps", num_steps, at_least=1, at_most=core.MOST_STEPS)
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
