"""Second opinions: Renyi accounting, and the closed form of TAN with its limits.

Neither is used for a claim.  Renyi accounting is looser than the numerical composition
and must never come out below it; TAN's closed form approximates Renyi accounting at
large noise and is *not* a bound.

References:
  Mironov, Talwar and Zhang (2019), arXiv:1908.10530; Canonne, Kamath and Steinke
  (2020), arXiv:2004.00010, for the conversion; Sander, Stock and Sablayrolles (2023),
  arXiv:2210.03403, Equation 4.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from accounting import bounds, poisson
from accounting import plan as plans
from accounting.plan import DpSgdPlan
from accounting.validation import InputError

#: Below this noise multiplier epsilon is not a function of TAN's total noise.
TAN_LEAST_NOISE = 2.0


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
    from accounting import profiles

    steps = poisson.steps(poisson.probability(plan), noise_multiplier)
    moments = [profiles.atoms(step, 1e-280).cumulants(order - 1)[0] for step in steps]
    return plan.num_steps * max(moments) / (order - 1)


def renyi_epsilon(plan: DpSgdPlan, *, noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of Renyi accounting, least over a fine grid of orders."""
    bounds.check_delta(delta)
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
    bounds.check_epsilon(epsilon)
    least = 0.0
    for order in 1 + np.geomspace(1e-2, 1e4, 400):
        divergence = renyi_divergence(
            plan, noise_multiplier=noise_multiplier, order=float(order)
        )
        converted = (order - 1) * (divergence - epsilon + math.log1p(-1 / order))
        least = min(least, converted - math.log(order))
    return math.exp(least)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TanEstimate:
    """The closed form of TAN.  An estimate for tuning, never a guarantee.

    Attributes:
      epsilon: ``eta^2 + 2 eta sqrt(ln(1/delta))``.
      eta: Inverse of the total amount of noise, ``q sqrt(T/2) / s``.
      warning: Why the estimate must not be used, or None where it serves.
    """

    epsilon: float
    eta: float
    warning: str | None


def tan_estimate(
    plan: DpSgdPlan, *, noise_multiplier: float, delta: float
) -> TanEstimate:
    """Returns TAN's estimate of epsilon, with a warning outside its range."""
    _check_poisson(plan)
    bounds.check_delta(delta)
    if noise_multiplier <= 0:
        raise InputError(f"Expected noise_multiplier={noise_multiplier!r} > 0.")
    rate = float(plan.sampling_probability)
    eta = rate * math.sqrt(plan.num_steps / 2) / noise_multiplier
    warning = None
    if noise_multiplier < TAN_LEAST_NOISE:
        warning = (
            f"noise_multiplier={noise_multiplier:g} is below {TAN_LEAST_NOISE:g}: the "
            "true epsilon grows beyond this estimate, at 0.5 and below without bound."
        )
    value = eta**2 + 2 * eta * math.sqrt(-math.log(delta))
    return TanEstimate(epsilon=value, eta=eta, warning=warning)
