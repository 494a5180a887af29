"""The law of the number of runs of a selection, as a table that is sampled exactly.

Formal guarantees:
  - the probabilities are multiples of 2^-64 that add up to 1, and the law of what
    `NumberOfRuns.draw` returns is exactly the table, if its input is uniform.  What is
    accounted for is this table, not the law it was made from.
  - at least one run: nothing is said by a selection that releases nothing.

References:
  Papernot and Steinke (2022), arXiv:2110.03620, for truncated negative binomial laws.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.core.numerics.root_finding import threshold
from accounting.core.validation import InputError, check_float, check_int

#: Denominator of the probabilities.
WHOLE = 1 << 64
#: Probability of larger numbers of runs, which are left out.
_TAIL = 1e-6
#: Most numbers of runs in a table.
_MOST_RUNS = 20_000
MOST_MEAN, MOST_AS_GOOD = 1_000, 100
_LEAST_RATE, _MOST_RATE = 1e-12, 2e3
#: Shapes that are tried: a larger one is more concentrated; infinity is Poisson's.
SHAPES = (1.0, 3.0, 10.0, math.inf)
#: A candidate is good if it is among this share of all.
TOP = 0.1


@dataclasses.dataclass(frozen=True)
class NumberOfRuns:
    """A law on 1, 2, ..., n.

    Attributes:
      shares: Probability of each number in units of 2^-64; they add up to 2^64.
      shape: Shape of the law that the table was made from, for messages.
    """

    shares: tuple[int, ...]
    shape: float

    def __post_init__(self) -> None:
        """Refuses what is no law.

        Raises:
          InputError: a negative share, or a sum other than 2^64.
        """
        if min(self.shares) < 0 or sum(self.shares) != WHOLE:
            raise InputError("Expected shares >= 0 that add up to 2^64.")

    @functools.cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """Probability of each number, shape (n,)."""
        return np.array([share / WHOLE for share in self.shares])

    @property
    def mean(self) -> float:
        """Expected number of runs."""
        return float(self.probabilities @ np.arange(1, len(self.shares) + 1))

    def derivative(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``f'(1 - x)`` for ``f(z) = E[z^K]``, up to a relative 1e-11.

        It is the sum over k of k times the probability of k runs and that the k - 1
        others are worse, if each is with probability 1 - x.

        Args:
          x: In [0, 1], shape (n,).
        """
        found = np.zeros(len(x))
        factors = self.probabilities * np.arange(1, len(self.shares) + 1)
        for factor in factors[::-1].tolist():  # Horner: all terms are at least 0
            found *= 1 - x
            found += factor
        return found

    def success(self) -> float:
        """Returns the probability that a candidate of the best ``TOP`` is tried."""
        runs = np.arange(1, len(self.shares) + 1)
        return 1.0 - float(self.probabilities @ (1 - TOP) ** runs)

    def draw(self, uniform: int) -> int:
        """Returns a number of runs.

        Args:
          uniform: Uniformly random in [0, 2^64), from a secret key.
        """
        check_int("uniform", uniform, at_least=0, at_most=WHOLE - 1)
        return 1 + bisect.bisect_right(list(itertools.accumulate(self.shares)), uniform)


def law(shape: float, mean: float) -> NumberOfRuns:
    """Returns the negative binomial law on 1, 2, ... of a shape and a mean.

    Args:
      shape: eta, at least 1; infinity for Poisson's.
      mean: Expected number of runs, in [1, 1000].
    """
    check_float("mean", mean, at_least=1.0, at_most=MOST_MEAN)
    return _smallest(shape, lambda found: mean - found.mean)


def as_good_as(num_runs: int, shape: float) -> NumberOfRuns:
    """Returns the law that tries a good candidate as surely as ``num_runs`` runs do.

    Args:
      num_runs: In [1, 100].
      shape: Of `law`.

    Raises:
      InputError: a value out of range, or a shape that would need too many runs.
    """
    check_int("num_runs", num_runs, at_least=1, at_most=MOST_AS_GOOD)
    wanted = 1 - (1 - TOP) ** num_runs
    return _smallest(shape, lambda found: wanted - found.success())


def _smallest(shape: float, excess: Callable[[NumberOfRuns], float]) -> NumberOfRuns:
    """Returns the law of least rate at which ``excess`` is not above 0."""

    def of(rate: float) -> NumberOfRuns:
        return NumberOfRuns(_shares(_weights(shape, max(rate, _LEAST_RATE))), shape)

    # Without a tolerance, no mean of a table is exactly 1.
    rate = threshold(
        lambda rate: excess(of(rate)) - 1e-9,
        10.0,
        relative=1e-9,
        least=_LEAST_RATE,
        most=_MOST_RATE,
    )[1]
    if math.isinf(rate):
        raise InputError(
            f"Expected a law of shape {shape:g} to need a mean of {_MOST_RATE:g} at "
            "most. Ask for fewer runs."
        )
    return of(rate)


def _weights(shape: float, rate: float) -> NDArray[np.float64]:
    """Returns probabilities of 1, 2, ...; the law's mean with 0 would be ``rate``."""
    runs = np.arange(1, _MOST_RUNS + 1, dtype=np.float64)
    logs = -special.gammaln(runs + 1)
    if math.isinf(shape):
        logs += runs * math.log(rate)
    else:
        logs += special.gammaln(runs + shape) + runs * math.log(rate / (rate + shape))
    weights = np.exp(logs - logs.max())
    above = np.cumsum(weights[::-1])[::-1]
    weights = weights[above > _TAIL * above[0]]
    return weights / weights.sum()


def _shares(weights: NDArray[np.float64]) -> tuple[int, ...]:
    shares = [int(weight * WHOLE) for weight in weights.tolist()]
    # What rounding left goes where it matters least.
    shares[int(np.argmax(weights))] += WHOLE - sum(shares)
    return tuple(shares)
