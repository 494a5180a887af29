"""The Gaussian mechanism in closed form: exact, and an upper bound for every sampler.

If one example is used in each of T steps with noise multiplier ``s``, the run is
exactly one Gaussian mechanism with noise multiplier ``s / sqrt(T)``.  Subsampling the
example is post-processing of both members of the pair (keep the output with probability
q, else draw it from the ghost's distribution), so this is an upper bound for any
sampler that uses an example at most T times.

Rounding: the relative error of a result is at most ``_margin``, which is added to an
upper bound and subtracted from a lower one.

References:
  Balle and Wang (2018), arXiv:1805.06530, Theorem 8.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.core.numerics import log_ratio, threshold

#: Least upper bound on delta: a smaller value may have underflowed.
LEAST_DELTA = 1e-300
_UNIT = 2.0**-53


def gaussian_delta(
    noise_multiplier: float, epsilon: float, *, upper: bool = True
) -> float:
    """Returns the hockey-stick divergence at ``epsilon``, rounded up or down.

    ``Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s)`` in both directions.

    Args:
      noise_multiplier: s, at least 0.
      epsilon: At least 0.
      upper: Whether to round up.

    Example:
      >>> round(gaussian_delta(1.0, 1.0), 6)
      0.126937
    """
    if noise_multiplier <= 0.0:
        return 1.0
    if math.isinf(noise_multiplier):
        return 0.0
    half, shift = 1 / (2 * noise_multiplier), epsilon * noise_multiplier
    if math.isinf(half) or math.isinf(shift):
        # Overflow: nothing is known.
        return 1.0 if upper else 0.0
    near = half - shift
    if near + 8 * _UNIT * (half + shift) < -40.0:
        return LEAST_DELTA if upper else 0.0
    margin = _margin(near, half, shift)
    if margin > 1.0:
        return 1.0 if upper else 0.0
    value = _value(near, half, shift)
    if upper:
        return min(1.0, max(value * math.exp(margin), LEAST_DELTA))
    return value * math.exp(-margin) if value > LEAST_DELTA else 0.0


def _margin(near: float, half: float, shift: float) -> float:
    """Returns a bound on the absolute error of ``ln(_value)``.

    The noise and both terms of ``near`` are rounded, and the derivative of ln delta
    with respect to ``near`` is at most ``|near| + 3``.
    """
    return 1e-11 + 8 * _UNIT * (half + shift) * (abs(near) + 3)


def _value(near: float, half: float, shift: float) -> float:
    far = -half - shift
    if near > 5.0:
        # The second term, phi(near) Phi(far) / phi(far), is far below the first.
        ratio = special.erfcx(-far / math.sqrt(2)) / 2
        return float(special.ndtr(near)) - math.exp(-(near**2) / 2) * float(ratio)
    # Both terms have the factor phi(near), since e^eps phi(far) = phi(near).  Factoring
    # it out preserves the relative accuracy if the two terms nearly cancel.
    factor = math.exp(-(near**2) / 2) / 2
    start, width = -near / math.sqrt(2), math.sqrt(2) * half
    if width < 0.5:
        # The difference would cancel: integrate minus the derivative instead.
        nodes, weights = _legendre()
        x = start + width * nodes
        slopes = 2 / math.sqrt(math.pi) - 2 * x * special.erfcx(x)
        return factor * width * float(weights @ slopes)
    return factor * float(special.erfcx(start) - special.erfcx(-far / math.sqrt(2)))


@functools.cache
def _legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns Gauss-Legendre nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(8)
    return (nodes + 1) / 2, weights / 2


def gaussian_epsilon(
    noise_multiplier: float, delta: float, *, upper: bool = True
) -> float:
    """Returns the smallest epsilon >= 0 at which `gaussian_delta` is at most ``delta``.

    Rounded up or down; infinite without noise.

    Args:
      noise_multiplier: s, at least 0.
      delta: In (0, 1).
      upper: Whether to round up.
    """
    if noise_multiplier <= 0.0:
        return math.inf
    low, high = threshold(
        lambda epsilon: log_ratio(
            gaussian_delta(noise_multiplier, epsilon, upper=upper), delta
        ),
        1.0,
        relative=0.0,
    )
    return high if upper else low


def gaussian_noise(epsilon: float, delta: float, *, upper: bool = True) -> float:
    """Returns the least noise multiplier with `gaussian_delta` at most ``delta``.

    Rounded up or down.

    Args:
      epsilon: At least 0.
      delta: In (0, 1).
      upper: Whether to round up.
    """
    low, high = threshold(
        lambda noise: log_ratio(gaussian_delta(noise, epsilon, upper=upper), delta),
        1.0,
        relative=0.0,
    )
    return high if upper else low


def normal_masses(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns standard normal probabilities between points, accurate in both tails.

    Args:
      points: Increasing, shape (n,).

    Returns:
      Shape (n - 1,).
    """
    below, above = np.diff(special.ndtr(points)), -np.diff(special.ndtr(-points))
    return np.where(points[1:] < 0, below, above)
