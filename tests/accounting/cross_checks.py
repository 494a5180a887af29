"""A second opinion: Renyi accounting.

It is not used for a claim: it is looser than the numerical composition, and must never
come out below it.

References:
  Mironov, Talwar and Zhang (2019), arXiv:1908.10530; Canonne, Kamath and Steinke
  (2020), arXiv:2004.00010, for the conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special

from accounting.core import accountant
from accounting.core import plan as plans
from accounting.core.plan import DpSgdPlan
from accounting.core.samplers import poisson
from accounting.core.validation import InputError


def _check_poisson(plan: DpSgdPlan) -> None:
    if plan.sampler != plans.POISSON:
        raise InputError(f"Expected sampler={plan.sampler!r} to be 'poisson' here.")


def renyi_divergence(
    plan: DpSgdPlan, *, noise_multiplier: float, order: float
) -> float:
    """Returns the Renyi divergence of any order above 1, by quadrature.

    Over T steps, of removing an example: the worse direction (Mironov et al. 2019,
    Theorem 5).
    """
    _check_poisson(plan)
    rate, noise = poisson.probability(plan), noise_multiplier
    # The integrand is that of N(0, s^2), of N(order, s^2), or between them.
    x = np.arange(-40 * noise, order + 40 * noise, noise / 12)
    exponents = order * np.logaddexp(
        math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2)
    )
    exponents -= x**2 / (2 * noise**2)
    log_moment = special.logsumexp(exponents) - math.log(12 * math.sqrt(2 * math.pi))
    return plan.num_steps * float(log_moment) / (order - 1)


def _least(bound: Callable[[float], float]) -> float:
    """Returns the least value of a bound that has one minimum over the orders."""
    orders = 1 + np.geomspace(1e-2, 1e4, 31)
    for _ in range(2):
        values = [bound(float(order)) for order in orders]
        best = int(np.argmin(values))
        low, high = orders[max(best - 1, 0)], orders[min(best + 1, len(orders) - 1)]
        orders = np.linspace(low, high, 31)
    return min(bound(float(order)) for order in orders)


def renyi_epsilon(plan: DpSgdPlan, *, noise_multiplier: float, delta: float) -> float:
    """Returns the epsilon of Renyi accounting, least over fine orders."""
    accountant.check_delta(delta)

    def converted(order: float) -> float:
        divergence = renyi_divergence(
            plan, noise_multiplier=noise_multiplier, order=order
        )
        divergence += math.log1p(-1 / order)
        return divergence - math.log(delta * order) / (order - 1)

    return max(0.0, _least(converted))


def renyi_delta(plan: DpSgdPlan, *, noise_multiplier: float, epsilon: float) -> float:
    """Returns the delta of Renyi accounting, least over fine orders."""
    accountant.check_epsilon(epsilon)

    def converted(order: float) -> float:
        divergence = renyi_divergence(
            plan, noise_multiplier=noise_multiplier, order=order
        )
        exponent = (order - 1) * (divergence - epsilon + math.log1p(-1 / order))
        return exponent - math.log(order)

    return math.exp(min(0.0, _least(converted)))
