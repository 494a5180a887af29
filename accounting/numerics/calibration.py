"""The least noise that meets a target, and what a lower bound refutes."""

from __future__ import annotations

import math
from collections.abc import Callable

from accounting.numerics.root_finding import log_ratio, threshold

#: Relative distance of what suffices and what does not, where a search ends.
TOLERANCE = 1e-4
_FINE_TOLERANCE = 3e-5
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
    """Returns ``value`` to so many significant digits, upwards.

    Args:
      value: Above 0.
      digits: Significant digits that are kept.
    """
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale


def smallest_noise_in_two(
    delta: Callable[[float, float], float],
    target: float,
    guess: float,
    coarse: float,
    fine: float,
    coarse_tolerance: float = 1e-3,
) -> float:
    """Returns `smallest_noise` for ``delta(noise_multiplier, fineness) <= target``.

    Searches with the coarse bound, and then a little around with the fine one; only the
    fine one decides.

    Args:
      delta: (noise multiplier, fineness) -> a bound on delta.
      target: Delta.
      guess: Noise multiplier where the search starts.
      coarse: Fineness of the first search.
      fine: Fineness that decides.
      coarse_tolerance: Relative distance where the first search ends.
    """
    start = smallest_noise(
        lambda noise: log_ratio(delta(noise, coarse), target),
        guess,
        tolerance=coarse_tolerance,
        stride=1.01,
    )
    if start in (0.0, math.inf):
        return start
    return smallest_noise(
        lambda noise: log_ratio(delta(noise, fine), target),
        start,
        tolerance=_FINE_TOLERANCE,
        stride=1 + coarse_tolerance / 2,
    )


def settled_epsilon(
    needed: Callable[[float], float], *, margin: float, most_tries: int
) -> float:
    """Returns an epsilon >= 0 with ``needed(epsilon) <= epsilon``; infinite if none.

    For an epsilon of which a part of delta, spent elsewhere, depends itself.

    Args:
      needed: The epsilon that is proven with what an epsilon leaves of delta; it rises.
      margin: Each try is by so much, relatively, above what the last one needed, so
        that the climb from 0 ends on the private side.
      most_tries: After so many the answer is infinity.
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
    """Returns an epsilon that holds at ``delta`` after a cost is paid from it.

    Args:
      cost: Epsilon -> what is added to delta; it rises.
      needed_at: Delta -> an upper bound on epsilon without the cost.
      delta: In (0, 1).

    Returns:
      Infinity if the cost alone exceeds ``delta``.
    """

    def needed(epsilon: float) -> float:
        added = cost(epsilon)
        return math.inf if added >= delta else needed_at(delta - added)

    return settled_epsilon(needed, margin=1e-7, most_tries=50)


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
