"""Searches for what a lower bound on delta refutes."""

from __future__ import annotations

import math
from collections.abc import Callable

from accounting.core.numerics.calibration import LEAST_NOISE, MOST_NOISE, TOLERANCE
from accounting.core.numerics.root_finding import log_ratio, threshold

#: Largest epsilon that a search tries.
_LARGEST_EPSILON = 2.0**60


def largest_insufficient_noise(
    log_excess: Callable[[float], float],
    guess: float,
    *,
    stride: float = 1.5,
) -> float:
    """Returns the largest noise multiplier with ``log_excess > 0``, rounded down.

    If ``log_excess`` is of a lower bound on delta, no noise multiplier up to the one
    returned meets the target, since less noise is never more private.

    Args:
      log_excess: Noise multiplier -> ``ln(delta / target)``; it need not be exactly
        monotone.
      guess: Noise multiplier at which the search starts.
      stride: First factor by which the search moves away from ``guess``.

    Returns:
      0 if the target is met without noise.
    """
    return threshold(
        log_excess, guess,
        relative=TOLERANCE, stride=stride, least=LEAST_NOISE, most=MOST_NOISE,
    )[0]  # fmt: skip


def lower_epsilon(lower: Callable[[float], float], upper: float, delta: float) -> float:
    """Returns the largest epsilon with ``lower(epsilon) > delta``, rounded down, or 0.

    Args:
      lower: Epsilon -> a lower bound on delta.
      upper: An upper bound on epsilon at ``delta``, where the search starts; may be
        infinite.
      delta: In (0, 1).
    """
    low, high = threshold(
        lambda epsilon: log_ratio(lower(epsilon), delta),
        upper if math.isfinite(upper) else 1.0,
        relative=1e-5,
        most=_LARGEST_EPSILON,
    )
    # ``lower`` was evaluated at the lower end and exceeds delta there.
    return high if math.isinf(high) else low
