"""Profiles of what is composed: training runs and Gaussian releases.

A run's profile is that of `accountant.delta`, under the same relation and unit.

Public: everything.
"""

from __future__ import annotations

import functools

from accounting.composition.profile import Profile
from accounting.core import accountant
from accounting.core.neighboring_relation import REPLACE_SPECIAL, brought
from accounting.core.plan import DpSgdPlan
from accounting.core.pld.gaussian import gaussian_delta


def gaussian(noise_multiplier: float) -> Profile:
    """Returns the profile of one Gaussian release.

    Args:
      noise_multiplier: Noise standard deviation over the L2 sensitivity.
    """
    accountant.check_noise_multiplier(noise_multiplier)

    def deltas(epsilon: float) -> tuple[float, float]:
        found = gaussian_delta(noise_multiplier, epsilon)
        return found, found

    return Profile(deltas)


def run(
    plan: DpSgdPlan,
    noise_multiplier: float,
    *,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> Profile:
    """Returns the profile of a training run; arguments as for `accountant.delta`.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the profile is for all examples of a user.

    Raises:
      InputError: a value out of range, or a relation that is not accounted for.
    """
    noise = accountant.check_noise_multiplier(noise_multiplier)
    sampler = brought(plan.sampler, neighboring_relation, max_examples_per_user)
    if sampler.profile is not None:
        # Laws of a selection ask for the same epsilons.
        return Profile(functools.cache(sampler.profile(plan, noise)))

    def deltas(epsilon: float) -> tuple[float, float]:
        if sampler.delta_by_direction is not None:
            both = sampler.delta_by_direction(plan, noise, epsilon)
            return both.remove.guarantee, both.add.guarantee
        found = sampler.delta(plan, noise, epsilon).guarantee
        return found, found

    return Profile(deltas, is_costly=not sampler.closed_form)
