"""Deterministic batches: every example in exactly one step of each epoch.

The bounds are exact.  An example is used in E steps, with independent noise in each:
this is one Gaussian mechanism with noise multiplier ``s / sqrt(E)``, whichever the
steps are.  Under replace-one a step changes by twice the clip norm, which halves the
noise multiplier.  All k rows of a user may be in one step, which then changes by k clip
norms.

References:
  Balle and Wang (2018), arXiv:1805.06530, Theorem 8.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from accounting.core import neighboring_relation, sampler_registry
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    REPLACE_SPECIAL,
)
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import dominating_pairs

METHOD = "Gaussian mechanism, closed form (Balle and Wang 2018)"
#: Why samplers that use every example once per epoch refuse add-or-remove.
MOVES_OTHERS = (
    "one example more or less moves others to other steps, so that many steps change"
)


def _exact(
    formula: Callable[..., float], plan: DpSgdPlan, noise_multiplier: float, at: float
) -> Bounds:
    """Returns a formula of `dominating_pairs` for all epochs, rounded up and down."""
    noise = noise_multiplier / math.sqrt(plan.num_epochs)
    return Bounds(
        upper=formula(noise, at),
        lower=formula(noise, at, upper=False),
        method=METHOD,
    )


def delta(plan: DpSgdPlan, noise_multiplier: float, epsilon: float) -> Bounds:
    """Returns the exact delta at ``epsilon``, up to rounding.

    Args:
      plan: A plan of deterministic batches.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      epsilon: At least 0.
    """
    return _exact(dominating_pairs.gaussian_delta, plan, noise_multiplier, epsilon)


def epsilon(plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
    """Returns the exact epsilon at ``delta``, up to rounding.

    Args:
      plan: A plan of deterministic batches.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      delta: In (0, 1).
    """
    return _exact(dominating_pairs.gaussian_epsilon, plan, noise_multiplier, delta)


def noise_multiplier(plan: DpSgdPlan, epsilon: float, delta: float) -> NoiseBounds:
    """Returns the noise multiplier that ``(epsilon, delta)`` needs, up to rounding.

    Args:
      plan: A plan of deterministic batches.
      epsilon: At least 0.
      delta: In (0, 1).
    """
    scale = math.sqrt(plan.num_epochs)
    return NoiseBounds(
        sufficient=dominating_pairs.gaussian_noise(epsilon, delta) * scale,
        necessary=dominating_pairs.gaussian_noise(epsilon, delta, upper=False) * scale,
        method=METHOD,
    )


def gaussian_dp(plan: DpSgdPlan, noise_multiplier: float) -> float:
    """Returns the mu for which the mechanism is mu-GDP, rounded up; may be infinite.

    Args:
      plan: A plan of deterministic batches.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
    """
    if noise_multiplier == 0.0:
        return math.inf
    return math.sqrt(plan.num_epochs) / noise_multiplier * (1 + 1e-15)


def of_sensitivity(count: int) -> sampler_registry.Sampler:
    """Returns the exact bounds for a larger sensitivity.

    Args:
      count: L2 sensitivity of a step's sum, in clip norms.
    """

    def needed(plan: DpSgdPlan, epsilon: float, delta: float) -> NoiseBounds:
        one = noise_multiplier(plan, epsilon, delta)
        assert one.necessary is not None
        # A product of doubles is off by half a unit in the last place.
        return dataclasses.replace(
            one,
            sufficient=math.nextafter(one.guarantee * count, math.inf),
            necessary=math.nextafter(one.necessary * count, 0.0),
        )

    def scaled(bound: Callable[..., Any]) -> Callable[..., Any]:
        return lambda plan, noise, *at: bound(plan, noise / count, *at)

    return dataclasses.replace(
        _ZERO_OUT,
        epsilon=scaled(epsilon),
        delta=scaled(delta),
        noise_multiplier=needed,
        gaussian_dp=scaled(gaussian_dp),
    )


_WORDING = sampler_registry.Wording(
    sampling="fixed batches, every example in one step of each epoch",
    discretization="none, closed form",
)
_ZERO_OUT = sampler_registry.Sampler(
    epsilon=epsilon,
    delta=delta,
    noise_multiplier=noise_multiplier,
    closed_form=True,
    relations=(REPLACE_SPECIAL, REPLACE_ONE),
    refusals={ADD_OR_REMOVE_ONE: MOVES_OTHERS},
    gaussian_dp=gaussian_dp,
    wording=_WORDING,
)
SAMPLER = dataclasses.replace(
    _ZERO_OUT,
    users=of_sensitivity,
    under={
        REPLACE_ONE: dataclasses.replace(
            of_sensitivity(2),
            wording=dataclasses.replace(
                _WORDING, num_examples=neighboring_relation.SAME_NUMBER
            ),
        )
    },
)
