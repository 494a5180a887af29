"""Searches that end on the private side of a target, and sums.

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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SMALLEST = 5e-324
#: Below this delta bounds are safe, but not tight: Chernoff's.
LEAST_TIGHT_DELTA = 1e-20


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
      guess: Point at which the search starts.
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


#: Relative distance of a sufficient and an insufficient value that ends a search.
TOLERANCE = 1e-4
_FINE_TOLERANCE = 2e-6
#: The noise that a search tries.  The square of much more leaves the range of numbers.
LEAST_NOISE, MOST_NOISE = 1e-6, 1e12
#: Largest number of secants before a search, and the largest logarithm of a change.
_MOST_SECANTS, _FARTHEST = 12, 3.0
#: Derivative of ``ln(-ln delta)`` by the logarithm of the noise, of a Gaussian tail.
_RISE = 2.0
#: Least ``-ln delta`` that is told from 0.
_LEAST_LOG = 1e-16


def smallest_noise(
    log_excess: Callable[[float], float],
    guess: float,
    *,
    tolerance: float = TOLERANCE,
    stride: float = 1.5,
) -> float:
    """Returns the least noise multiplier with ``log_excess <= 0``, rounded up.

    ``log_excess`` was evaluated at the value returned and is at most 0 there.

    Args:
      log_excess: Noise multiplier -> ``ln(delta / target)``; it need not be exactly
        monotone.
      guess: Noise multiplier at which the search starts.
      tolerance: Largest relative distance of the result from an insufficient value.
      stride: First factor by which the search moves away from ``guess``.

    Returns:
      0 if the target is met without noise; infinity if no noise multiplier meets it.
    """
    return threshold(
        log_excess, guess,
        relative=tolerance, stride=stride, least=LEAST_NOISE, most=MOST_NOISE,
    )[1]  # fmt: skip


def round_up(value: float, digits: int) -> float:
    """Returns ``value`` rounded up to a number of significant digits.

    Args:
      value: Above 0.
      digits: Number of significant digits.
    """
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale


def _approximate_noise(
    log_delta: Callable[[float], float],
    log_target: float,
    guess: float,
    tolerance: float,
    rise: float,
) -> tuple[float, float] | None:
    """Returns a noise multiplier that meets the target and hardly exceeds the least.

    By secants for ``ln(-ln delta)``, which is nearly linear in the logarithm of the
    noise where delta is small.

    Args:
      log_delta: Noise multiplier -> ln delta.
      log_target: ln of the target delta, below 0.
      guess: Noise multiplier at which the search starts.
      tolerance: Largest relative distance from the least, if secants are right.
      rise: First guess of the derivative of ``ln(-ln delta)``.

    Returns:
      The noise multiplier, at which ``log_delta`` was evaluated, and the derivative;
      None if secants do not get there.
    """

    def bent(value: float) -> float:
        return math.log(max(-value, _LEAST_LOG))

    last, before = 0.0, 0.0
    for _ in range(_MOST_SECANTS):
        point = min(max(guess, LEAST_NOISE), MOST_NOISE)
        found = log_delta(point)
        value = bent(found)
        # Nearer points differ by rounding, too.
        if last and abs(math.log(point / last)) > tolerance:
            rise = (value - before) / math.log(point / last)
        if rise <= 0.0:
            return None
        away = (bent(log_target) - value) / rise
        if found <= log_target and -tolerance <= away:
            return point, rise
        last, before = point, value
        away = min(max(away, -_FARTHEST), _FARTHEST)
        guess = point * math.exp(away + tolerance / 2)
    return None


def smallest_noise_in_two(
    delta: Callable[[float, float], float],
    target: float,
    guess: float,
    coarse: float,
    fine: float,
    coarse_tolerance: float = 1e-3,
) -> float:
    """Returns `smallest_noise` for ``delta(noise_multiplier, fineness) <= target``.

    Searches with the cheap coarse bound, and then near its result with the fine bound,
    which alone decides.

    Args:
      delta: (noise multiplier, fineness) -> an upper bound on delta.
      target: Target delta, in (0, 1).
      guess: Noise multiplier at which the search starts.
      coarse: Fineness of the first search.
      fine: Fineness of the second search.
      coarse_tolerance: Relative tolerance of the first search.
    """

    @functools.cache
    def log_excess(noise: float, fineness: float) -> float:
        return log_ratio(delta(noise, fineness), target)

    if log_excess(0.0, fine) <= 0:
        return 0.0
    start, rise, log_target = guess, _RISE, math.log(target)
    for fineness, tolerance in ((coarse, coarse_tolerance), (fine, _FINE_TOLERANCE)):
        excess = functools.partial(log_excess, fineness=fineness)

        def log_delta(noise: float, fineness: float = fineness) -> float:
            return log_excess(noise, fineness) + log_target

        found = _approximate_noise(log_delta, log_target, start, tolerance, rise)
        if found is None:
            start = smallest_noise(
                excess, start, tolerance=max(tolerance, 3e-5), stride=1.001
            )
        else:
            start, rise = found
        if math.isinf(start):
            break
    return start


def settled_epsilon(
    needed: Callable[[float], float], *, margin: float, most_tries: int
) -> float:
    """Returns an epsilon >= 0 with ``needed(epsilon) <= epsilon``; infinite if none.

    It serves bounds that spend a part of delta which depends on epsilon itself.

    Args:
      needed: Epsilon -> the epsilon that is proven with the delta left at it.  Rises.
      margin: Each epsilon tried exceeds what the last one needed by this relative
        margin, so that the search, which climbs from 0, ends on the private side.
      most_tries: Number of tries after which infinity is returned.
    """
    epsilon = 0.0
    for _ in range(most_tries):
        found = needed(epsilon)
        if math.isinf(found):
            break
        if found <= epsilon:
            return epsilon
        epsilon = found * (1 + margin)
    return math.inf


def epsilon_after_cost(
    cost: Callable[[float], float],
    needed_at: Callable[[float], float],
    delta: float,
) -> float:
    """Returns an upper bound on epsilon at ``delta``, given an addition to delta.

    Args:
      cost: Epsilon -> the addition to delta.  Rises.
      needed_at: Delta -> an upper bound on epsilon without the addition.
      delta: In (0, 1).

    Returns:
      Infinity if the addition alone exceeds ``delta``.
    """

    def needed(epsilon: float) -> float:
        added = cost(epsilon)
        return math.inf if added >= delta else needed_at(delta - added)

    return settled_epsilon(needed, margin=1e-7, most_tries=50)


def inner(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Returns the sum of ``left * right``, added pairwise.

    Above some ten thousand elements, ``a @ b`` starts threads that wait for each other:
    on a busy machine it takes a hundred times as long as this.

    Args:
      left: Shape (n,).
      right: Shape (n,).
    """
    return float((left * right).sum())
