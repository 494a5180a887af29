"""An independent truth for sums of losses: randomized response, in fifty digits."""

from __future__ import annotations

import mpmath


def exact_delta(loss: float, num_steps: int, epsilon: float) -> mpmath.mpf:
    """Returns delta of ``num_steps`` losses of +-loss, as a binomial sum."""
    mpmath.mp.dps = 50
    above = 1 / (1 + mpmath.e ** (-mpmath.mpf(loss)))
    total = mpmath.mpf(0)
    for count in range(num_steps + 1):
        value = (2 * count - num_steps) * mpmath.mpf(loss)
        if value > epsilon:
            weight = mpmath.binomial(num_steps, count)
            weight *= above**count * (1 - above) ** (num_steps - count)
            total += weight * (1 - mpmath.e ** (epsilon - value))
    return total
