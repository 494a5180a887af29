"""The Gaussian mechanism in closed form: exact, and a safe bound for every sampler.

One example that is used in every one of T steps with noise multiplier ``s`` is exactly
one Gaussian mechanism with noise multiplier ``s / sqrt(T)``.  Subsampling an example
can only help (keep the output with probability q, else draw from the ghost's: both
members of the subsampled pair arise by the same post-processing), so this is an upper
bound for any sampler that uses an example at most T times.

References:
  Balle and Wang (2018), arXiv:1805.06530, Theorem 8.
"""

from __future__ import annotations

import math


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Returns the exact hockey-stick divergence at ``epsilon``.

    ``Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s)``, both directions.

    Example:
      >>> round(gaussian_delta(1.0, 1.0), 6)
      0.126937
    """
    from scipy import special

    if noise_multiplier <= 0.0:
        return 1.0
    if math.isinf(noise_multiplier):
        return 0.0
    near = 1 / (2 * noise_multiplier) - epsilon * noise_multiplier
    far = -1 / (2 * noise_multiplier) - epsilon * noise_multiplier
    if near < -1.0:
        return _tail_delta(near, far)
    value = special.ndtr(near) - math.exp(
        min(epsilon + float(special.log_ndtr(far)), 0.0)
    )
    return min(1.0, max(0.0, float(value)))


def _tail_delta(near: float, far: float) -> float:
    # Both terms share the factor phi(near): e^eps phi(far) = phi(near).  Factoring it
    # out keeps relative accuracy where the two terms nearly cancel.
    from scipy import special

    factor = math.exp(-(near**2) / 2) / 2
    ratio = special.erfcx(-near / math.sqrt(2)) - special.erfcx(-far / math.sqrt(2))
    return max(0.0, factor * float(ratio))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Returns the smallest epsilon >= 0 at which ``gaussian_delta`` is at most delta.

    Rounded up in the last bits of a bisection; infinite without noise.
    """
    if noise_multiplier <= 0.0:
        return math.inf
    if gaussian_delta(noise_multiplier, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(noise_multiplier, high) > delta:
        high *= 2
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if gaussian_delta(noise_multiplier, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def gaussian_noise(epsilon: float, delta: float) -> float:
    """Returns the least noise multiplier with ``gaussian_delta`` at most ``delta``.

    Rounded up in the last bits of a bisection.
    """
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) > delta:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if gaussian_delta(middle, epsilon) > delta:
            low = middle
        else:
            high = middle
    return high
