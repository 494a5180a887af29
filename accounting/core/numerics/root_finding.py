"""Root finding that ends on the private side of a target.

Formal guarantees:
  - The function was evaluated at both ends returned: it is above 0 at the lower one and
    at most 0 at the upper one.  So no property of the function, or of the search, can
    make the upper end insufficient.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable

_SMALLEST = 5e-324


def threshold(
    excess: Callable[[float], float],
    guess: float,
    *,
    relative: float,
    stride: float = 2.0,
    least: float = 1e-300,
    most: float = sys.float_info.max,
) -> tuple[float, float]:
    """Returns an interval in which ``excess`` falls to 0: its lower and upper end.

    Args:
      excess: Function of a number >= 0.  It falls, but need not be exactly monotone or
        smooth.
      guess: Where the search starts.
      relative: Largest length of the interval over its upper end; 0 for adjacent
        floating-point numbers.
      stride: First factor by which the search moves away from ``guess``; squared at
        each further move.
      least: If the upper end is at most this, the lower end is 0.
      most: Largest point that is tried.

    Returns:
      Two 0s if ``excess(0)`` is at most 0; ``most`` and infinity if ``excess(most)`` is
      above 0.
    """
    excess = functools.cache(excess)
    if excess(0.0) <= 0:
        return 0.0, 0.0
    low, high = _bracket(excess, min(max(guess, least), most), stride, least, most)
    if low == 0.0 or math.isinf(high):
        return low, high
    return _narrow(excess, low, high, relative)


def _bracket(
    excess: Callable[[float], float],
    guess: float,
    stride: float,
    least: float,
    most: float,
) -> tuple[float, float]:
    low, high = 0.0, guess
    while excess(high) > 0:
        if high >= most:
            return high, math.inf
        low, high, stride = high, min(high * stride, most), stride * stride
    while low == 0.0 and high > least:
        point = max(high / stride, least)
        if excess(point) > 0:
            low = point
        else:
            high, stride = point, stride * stride
    return low, high


def _narrow(
    excess: Callable[[float], float], low: float, high: float, relative: float
) -> tuple[float, float]:
    from scipy import optimize

    ends = [low, high]

    def evaluate(point: float) -> float:
        value = excess(point)
        ends[bool(value <= 0)] = point
        return value

    optimize.brentq(
        evaluate,
        low,
        high,
        xtol=_SMALLEST,
        rtol=max(relative, 4 * sys.float_info.epsilon),
        disp=False,
    )
    # brentq stops a few floating-point numbers apart at best, and at an exact root it
    # leaves the other end where it is.  Bisection does the rest.
    while ends[1] - ends[0] > relative * ends[1]:
        middle = ends[0] + (ends[1] - ends[0]) / 2
        if middle in ends:
            break
        evaluate(middle)
    return ends[0], ends[1]


def log_ratio(value: float, target: float) -> float:
    """Returns a finite ``ln(value / target)`` that is above 0 iff ``value > target``.

    Args:
      value: At least 0.
      target: Above 0.
    """
    ratio = math.log(max(value, _SMALLEST)) - math.log(target)
    return max(ratio, _SMALLEST) if value > target else min(ratio, 0.0)
