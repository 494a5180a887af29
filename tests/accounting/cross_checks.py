"""A second opinion: Renyi accounting.

It is not used for a claim: it is looser than the numerical composition, and must never
come out below it.

References:
  Mironov, Talwar and Zhang (2019), arXiv:1908.10530; Canonne, Kamath and Steinke
  (2020), arXiv:2004.00010, for the conversion.
"""

from __future__ import annotations

import math

import numpy as np

from accounting import accountant
from accounting import plan as plans
from accounting.plan import DpSgdPlan
from accounting.samplers import poisson
from accounting.validation import InputError


def _check_poisson(plan: DpSgdPlan) -> None:
    if plan.sampler != plans.POISSON:
        raise InputError(f"Expected sampler={plan.sampler!r} to be 'poisson' here.")


def renyi_divergence(
    plan: DpSgdPlan, *, noise_multiplier: float, order: float
) -> float:
    """Returns the Renyi divergence of any order above 1, by quadrature.

    Over T steps, the worse of both directions.
    """
    _check_poisson(plan)
    from accounting.pld import privacy_profile

    steps = poisson.steps(poisson.probability(plan), noise_multiplier)
    moments = [
        privacy_profile.atoms(step, 1e-280).cumulants(order - 1)[0] for step in steps
    ]
    return plan.num_steps * max(moments) / (order - 1)


def renyi_epsilon(plan: DpSgdPlan, *, noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of Renyi accounting, least over a fine grid of orders."""
    accountant.check_delta(delta)
    best = math.inf
    for order in 1 + np.geomspace(1e-2, 1e4, 400):
        divergence = renyi_divergence(
            plan, noise_multiplier=noise_multiplier, order=float(order)
        )
        converted = divergence + math.log1p(-1 / order)
        converted -= math.log(delta * order) / (order - 1)
        best = min(best, converted)
    return max(0.0, best)


def renyi_delta(plan: DpSgdPlan, *, noise_multiplier: float, epsilon: float) -> float:
    """Returns the delta of Renyi accounting, least over a fine grid of orders."""
    accountant.check_epsilon(epsilon)
    least = 0.0
    for order in 1 + np.geomspace(1e-2, 1e4, 400):
        divergence = renyi_divergence(
            plan, noise_multiplier=noise_multiplier, order=float(order)
        )
        converted = (order - 1) * (divergence - epsilon + math.log1p(-1 / order))
        least = min(least, converted - math.log(order))
    return math.exp(least)
