"""A lower bound on delta of a sum of losses, by the inversion of `inversion`.

*Smoothing* adds ``E[h(S - x)]`` with ``h(y) = E[(1 - e^-(y + Z))+] - (1 - e^-y)+``, the
time value of an option: the integral over u up to v of half the normal density of mean
-u/2 and variance u at y.  That is ``e^(-y / 2 - u / 8)`` times the density n_u of mean
0.  The integral of ``n_u / 2`` is at most ``v n_v``, so h is at most ``v e^(v / 8)``
times the density of Z at -y, and smoothing adds at most ``v e^(v / 8)`` times the
density of S + Z at x.  *Wrapping* is bounded by Chernoff's bound.  `of_sum` subtracts
both.
"""

from __future__ import annotations

import math

import numpy as np

from accounting.core.pld import saddlepoint
from accounting.core.pld.inversion import Contour, LaplaceSum
from accounting.core.pld.loss_distribution import Atoms
from accounting.core.pld.privacy_profile import FINE, inverted


def lower_delta(loss: Atoms, num_steps: int, epsilon: float) -> float:
    """Returns a lower bound on delta of a sum of independent losses.

    Args:
      loss: Finite loss of one step, dominated by the exact one.
      num_steps: T.
      epsilon: At least 0.
    """
    focus = saddlepoint.focus(loss, num_steps, epsilon)
    low, high = focus.ends
    # Small losses are omitted.  Large ones are split as if any sum with one of them
    # exceeded epsilon; the probability that one does not is subtracted.
    split = loss.clipped(-math.inf, high)
    kept = split.losses >= low
    left_out = float(split.masses[~kept].sum())
    infinite = split.infinite_mass
    below = Atoms(split.masses[kept], split.losses[kept], infinite + left_out)
    total = inverted(focus, FINE, lambda cost, fineness: below)
    wrapping = wrapped(below, num_steps, total.contour, epsilon)
    ever = -math.expm1(num_steps * math.log1p(-infinite)) * (1 - left_out) ** num_steps
    not_above = num_steps * infinite * _falls(below, num_steps - 1, epsilon - high)
    certain = ever * (2 - total.slack) - not_above
    return max(0.0, of_sum(total, epsilon, wrapping) + certain)


def _falls(loss: Atoms, num_steps: int, most: float) -> float:
    """Returns a Chernoff bound on the probability that a sum is at most ``most``."""
    deviation = math.sqrt(max(num_steps, 1) * loss.cumulants(0.0)[2])
    rates = [factor / max(deviation, 1e-100) for factor in (0.5, 1.0, 2.0, 4.0, 8.0)]
    exponents = [num_steps * loss.tilted(-rate)[1] + rate * most for rate in rates]
    return math.exp(min(*exponents, 0.0))


def of_sum(total: LaplaceSum, epsilon: float, wrapping: float) -> float:
    """Returns a lower bound on delta, if the exact loss dominates that of the sum.

    Args:
      total: The sum.
      epsilon: At least 0.
      wrapping: Bound on the wrapping error, as returned by `wrapped`.
    """
    variance = total.contour.variance
    density = max(total.density(epsilon), 0.0) + total.density_error
    added = variance * math.exp(variance / 8) * density
    mean = total.mean(epsilon) - total.error - added - wrapping
    if mean <= 0.0:
        return 0.0
    exponent = total.log_chernoff(epsilon) + math.log(mean)
    return math.exp(min(exponent, 0.0)) * (2 - total.slack)


def wrapped(loss: Atoms, num_steps: int, contour: Contour, epsilon: float) -> float:
    """Returns a bound on the wrapping error: all terms of k != 0.

    It is relative to Chernoff's bound, as `LaplaceSum.mean` is.
    ``E_r[e^(-r X) (1 - e^-X)+]`` is at most ``E_r[e^(h X)]`` for any h >= -r, here with
    X = S - epsilon - k W.

    Args:
      loss: Loss of one step.
      num_steps: T.
      contour: Contour of the inversion; r and W matter.
      epsilon: At least 0.
    """
    order, period = contour.order, contour.period
    log_moment, _, variance = loss.cumulants(order)
    scale = 1 / max(math.sqrt(num_steps * variance), 1e-100)

    def share(rate: float) -> float:
        moment = num_steps * (loss.tilted(order + rate)[1] - log_moment)
        exponent = moment - rate * epsilon - abs(rate) * period
        return math.exp(min(exponent, 700.0)) / -math.expm1(-abs(rate) * period)

    rates = (scale * np.geomspace(0.2, 60.0, 25)).tolist()
    above = min(share(rate) for rate in rates)
    return above + min(share(-min(rate, order)) for rate in (*rates, order))
