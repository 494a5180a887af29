"""The least noise that meets a target: bisection that ends on the private side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

#: Relative width of the bracket at which the search ends.
TOLERANCE = 1e-4
_LEAST, _MOST = 1e-6, 1e12


def smallest_noise(
    log_excess: Callable[[float], float],
    guess: float,
    *,
    tolerance: float = TOLERANCE,
    stride: float = 1.5,
) -> float:
    """Returns the least noise multiplier with ``log_excess <= 0``, from above.

    ``log_excess`` is the logarithm of delta over its target; it need not be exactly
    monotone.  The value returned is one at which it was evaluated and is at most 0, so
    no property of the search can make the result insufficient.  The search starts at
    ``guess`` and brackets the answer in strides of this factor, squared each time.

    Returns:
      0 if no noise at all is enough; infinity if no noise is.
    """
    if log_excess(0.0) <= 0:
        return 0.0
    _, high = _search(log_excess, guess, tolerance, stride)
    if high[1] > 0:
        return math.inf
    return high[0]


def largest_insufficient_noise(
    log_excess: Callable[[float], float],
    guess: float,
    *,
    tolerance: float = TOLERANCE,
    stride: float = 1.5,
) -> float:
    """Returns a noise multiplier with ``log_excess > 0``, almost the largest.

    Where ``log_excess`` is of a lower bound on delta, no noise multiplier up to this
    one meets the target: less noise is never more private.  0 if there is none.
    """
    if log_excess(0.0) <= 0:
        return 0.0
    low, _ = _search(log_excess, guess, tolerance, stride)
    return low[0] if low[1] > 0 else 0.0


def _search(
    log_excess: Callable[[float], float],
    guess: float,
    tolerance: float,
    stride: float,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns a narrow bracket of evaluated points, if both signs were met."""
    low, high = _bracket(log_excess, min(max(guess, 2 * _LEAST), _MOST / 2), stride)
    if low[1] <= 0 or high[1] > 0:
        return low, high
    for count in itertools.count():
        if high[0] <= low[0] * (1 + tolerance):
            return low, high
        if count % 3 == 2:
            # However uneven the two sides, the bracket halves at every third step.
            middle = math.sqrt(low[0] * high[0])
        else:
            middle = _next_point(low, high, tolerance)
        value = log_excess(middle)
        if value > 0:
            low = (middle, value)
        else:
            high = (middle, value)
    raise AssertionError("unreachable")


def _bracket(
    log_excess: Callable[[float], float], guess: float, factor: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    low = high = (guess, log_excess(guess))
    while low[1] <= 0 and low[0] > _LEAST:
        high = low
        point = low[0] / factor
        low, factor = (point, log_excess(point)), factor**2
    while high[1] > 0 and high[0] < _MOST:
        low = high
        point = high[0] * factor
        high, factor = (point, log_excess(point)), factor**2
    return low, high


def _next_point(
    low: tuple[float, float], high: tuple[float, float], tolerance: float
) -> float:
    """Returns where to look next: a secant step in logarithms, kept inside."""
    width = math.log(high[0] / low[0])
    share = low[1] / (low[1] - high[1]) if math.isfinite(high[1]) else 0.5
    # A little beyond the secant's root, on alternating sides, so that both ends move.
    nudge = 0.25 * tolerance / width
    share = share - nudge if share > 0.5 else share + nudge
    return low[0] * math.exp(width * min(max(share, 0.02), 0.98))


def round_up(value: float, digits: int) -> float:
    """Returns ``value`` to so many significant digits, upwards."""
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale


def log_ratio(value: float, target: float) -> float:
    """Returns ``ln(value / target)``, finite for a value of 0."""
    return math.log(max(value, 1e-300) / target)


def smallest_noise_in_two(
    delta: Callable[[float, float], float],
    target: float,
    guess: float,
    coarse: float,
    fine: float,
) -> float:
    """Returns `smallest_noise` for ``delta(noise_multiplier, fineness) <= target``.

    Searches with the coarse bound, and then a little around with the fine one; only the
    fine one decides.
    """
    start = smallest_noise(
        lambda noise: log_ratio(delta(noise, coarse), target),
        guess,
        tolerance=1e-3,
        stride=1.01,
    )
    if start in (0.0, math.inf):
        return start
    return smallest_noise(
        lambda noise: log_ratio(delta(noise, fine), target), start, stride=1.0005
    )


def lower_epsilon(lower: Callable[[float], float], upper: float, delta: float) -> float:
    """Returns almost the largest epsilon at which ``lower(epsilon) > delta``, or 0."""
    if lower(0.0) <= delta:
        return 0.0
    low, high = 0.0, upper
    if math.isinf(upper):
        high = 1.0
        while lower(high) > delta:
            low, high = high, 2 * high
            if high > 2.0**60:
                return math.inf
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        if lower(middle) > delta:
            low = middle
        else:
            high = middle
    # The lower end: the bound was evaluated there and refutes it.
    return low
