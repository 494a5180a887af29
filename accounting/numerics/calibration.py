"""The least noise that meets a target, and what a lower bound refutes."""

from __future__ import annotations

import math
from collections.abc import Callable

from accounting.numerics.root_finding import log_ratio, threshold

#: Relative distance of what suffices and what does not, where a search ends.
TOLERANCE = 1e-4
_LEAST, _MOST = 1e-6, 1e12
#: No search looks for a larger epsilon.
_LARGEST_EPSILON = 2.0**60


def smallest_noise(
    log_excess: Callable[[float], float],
    guess: float,
    *,
    tolerance: float = TOLERANCE,
    stride: float = 1.5,
) -> float:
    """Returns the least noise multiplier with ``log_excess <= 0``, from above.

    The value returned is one at which ``log_excess`` was evaluated and is at most 0.

    Args:
      log_excess: The logarithm of delta over its target, of a noise multiplier; it need
        not be exactly monotone.
      guess: Where the search starts.
      tolerance: Relative distance from a value that does not suffice, at most.
      stride: First factor by which the search moves away from ``guess``.

    Returns:
      0 if no noise at all is enough; infinity if no noise is.
    """
    return _search(log_excess, guess, tolerance, stride)[1]


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
    Arguments as for `smallest_noise`.
    """
    return _search(log_excess, guess, tolerance, stride)[0]


def _search(
    log_excess: Callable[[float], float],
    guess: float,
    tolerance: float,
    stride: float,
) -> tuple[float, float]:
    return threshold(
        log_excess, guess, relative=tolerance, stride=stride, least=_LEAST, most=_MOST
    )


def round_up(value: float, digits: int) -> float:
    """Returns ``value`` to so many significant digits, upwards."""
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale


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
    """Returns almost the largest epsilon at which ``lower(epsilon) > delta``, or 0.

    Args:
      lower: A lower bound on delta, of epsilon.
      upper: An upper bound on epsilon at ``delta``; may be infinite.
      delta: In (0, 1).
    """
    low, high = threshold(
        lambda epsilon: log_ratio(lower(epsilon), delta),
        upper if math.isfinite(upper) else 1.0,
        relative=1e-5,
        most=_LARGEST_EPSILON,
    )
    # The lower end: the bound was evaluated there and refutes it.
    return high if math.isinf(high) else low
