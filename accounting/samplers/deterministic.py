"""Deterministic batches: every example in exactly one step of each epoch.

Exact.  An example is used in E steps in all, with independent noise each time: one
Gaussian mechanism with noise multiplier ``s / sqrt(E)``, whichever the steps are.

References:
  Balle and Wang (2018), arXiv:1805.06530, Theorem 8.
"""

from __future__ import annotations

import math

from accounting.intervals import Bounds, ByDirection, NoiseBounds
from accounting.plan import DpSgdPlan
from accounting.pld import gaussian

#: Whether the noise that suffices is off by roundings alone.
CLOSED_FORM = True
METHOD = "Gaussian mechanism, closed form (Balle and Wang 2018)"


def delta(plan: DpSgdPlan, noise_multiplier: float, epsilon: float) -> Bounds:
    """Returns the exact delta at ``epsilon``."""
    noise = noise_multiplier / math.sqrt(plan.num_epochs)
    return Bounds(
        upper=gaussian.gaussian_delta(noise, epsilon),
        lower=gaussian.gaussian_delta(noise, epsilon, upper=False),
        method=METHOD,
    )


def delta_by_direction(
    plan: DpSgdPlan, noise_multiplier: float, epsilon: float
) -> ByDirection:
    """Returns the exact delta, which is the same in each direction."""
    exact = delta(plan, noise_multiplier, epsilon)
    return ByDirection(remove=exact, add=exact)


def epsilon(plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
    """Returns the exact epsilon at ``delta``."""
    noise = noise_multiplier / math.sqrt(plan.num_epochs)
    return Bounds(
        upper=gaussian.gaussian_epsilon(noise, delta),
        lower=gaussian.gaussian_epsilon(noise, delta, upper=False),
        method=METHOD,
    )


def noise_multiplier(plan: DpSgdPlan, epsilon: float, delta: float) -> NoiseBounds:
    """Returns the noise multiplier that ``(epsilon, delta)`` needs, up to rounding."""
    scale = math.sqrt(plan.num_epochs)
    return NoiseBounds(
        sufficient=gaussian.gaussian_noise(epsilon, delta) * scale,
        necessary=gaussian.gaussian_noise(epsilon, delta, upper=False) * scale,
        method=METHOD,
    )
