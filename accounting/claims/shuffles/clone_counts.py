"""The number of steps among which null clones hide an example, rounded down.

It is ``m = 1 + X + Y`` for independent binomial X and Y (`null_clones`).  Only its
distribution function matters, which is an incomplete beta function: no array has the
length of the number of steps.

Formal guarantees:
  - the law returned is stochastically smaller than that of m: each of its distribution
    functions is rounded up.  Fewer clones hide less.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

#: Factor by which distribution functions are rounded up.  The error of the incomplete
#: beta function is below 1e-10 for up to 1e9 trials.
_UP = 1 + 1e-9
#: Number of values of m between a power of two and the next; up to twice this number,
#: every m is a value.
_PER_OCTAVE = 32
#: Probability of larger m, which count as the largest value in use.
_UPPER_TAIL = 1e-4
#: Number of values of the smaller of X and Y.
_NUM_NODES = 256
#: Probability of smaller values of it, relative to that of smaller m, which count as 0.
_NODE_TAIL = 1e-8


@dataclasses.dataclass(frozen=True)
class Coins:
    """Independent coins.

    Attributes:
      trials: Number of coins.
      probability: Of success of each.
    """

    trials: int
    probability: float

    @property
    def mean(self) -> float:
        """The expected number of successes."""
        return self.trials * self.probability

    def at_most(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``Pr[successes <= point]``, rounded up.

        Args:
          points: Whole numbers, of any sign; shape (n,).
        """
        inside = np.clip(points, 0.0, max(self.trials - 1.0, 0.0))
        found = special.betaincc(
            inside + 1, max(self.trials, 1) - inside, self.probability
        )
        found = np.where(points >= self.trials, 1.0, np.minimum(found * _UP, 1.0))
        return np.where(points < 0, 0.0, found)

    def nodes(self, tail: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns values and probabilities of a stochastically smaller number.

        Args:
          tail: Probability, at most, of what is rounded down to 0.
        """
        deviation = math.sqrt(self.mean)
        # Chernoff: Pr[X <= mean - d] <= e^(-d^2 / (2 mean)).
        reach = math.sqrt(-2 * math.log(tail)) * deviation
        low = max(0, math.floor(self.mean - reach))
        high = min(self.trials, math.ceil(self.mean + 5 * deviation) + 2)
        stride = max(1, -(-(high - low) // _NUM_NODES))
        values: NDArray[np.float64] = np.arange(float(low), high + 1.0, stride)
        values[0] = 0.0
        starts = np.append(self.at_most(values - 1), 1.0)
        return values, np.diff(np.maximum.accumulate(starts))


def grid(steps: int) -> NDArray[np.int64]:
    """Returns the values to which m is rounded down, increasing.

    Args:
      steps: Largest m.
    """
    found = list(range(1, min(steps, 2 * _PER_OCTAVE) + 1))
    stride = 2
    while found[-1] + stride <= steps:
        octave = range(found[-1] + stride, min(2 * found[-1], steps) + 1, stride)
        found += octave
        stride *= 2
    return np.array(found)


def rounded_down(
    one: Coins, other: Coins, tail: float
) -> tuple[list[tuple[float, int]], float]:
    """Returns pairs (probability, m), and the probability of smaller m.

    Args:
      one: Coins whose successes are X.
      other: Coins whose successes are Y.
      tail: Probability, at most, of smaller m.
    """
    few, many = sorted((one, other), key=lambda coins: coins.mean)
    values, weights = few.nodes(max(_NODE_TAIL * tail, 1e-300))

    @functools.cache
    def less(m: int) -> float:
        found = float(weights @ many.at_most(m - 2 - values))
        return min(found * _UP, 1.0)

    points = grid(one.trials + other.trials + 1).tolist()
    first = max(bisect.bisect_right(points, tail, key=less) - 1, 0)
    end = max(bisect.bisect_left(points, 1 - _UPPER_TAIL, key=less), first + 1)
    used = points[first:end]
    starts = np.maximum.accumulate([less(m) for m in used])
    shares = np.diff(np.append(starts, 1.0))
    return list(zip(shares.tolist(), used, strict=True)), float(starts[0])
