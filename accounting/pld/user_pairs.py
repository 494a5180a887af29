"""Dominating pairs of one step for a user with several rows.

Each of the k rows is sampled with probability q, so the user adds at most j clip norms
with probability ``w_j = Binom(k, q)(j)``.  The pair is ``sum_j w_j N(j, s^2)`` against
``N(0, s^2)``, or its reverse.  The loss is monotone.

References:
  Choquette-Choo et al. (2024), arXiv:2310.15526, and Charles et al. (2024),
  arXiv:2407.07737, for mixtures of Gaussians and user-level sampling of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from accounting.pld.dominating_pairs import MonotonePair, Step
from accounting.pld.poisson_lower_bound import Component

#: Larger exponents are summed in log space.
_LARGEST = 30.0


def weights(num_rows: int, sampling_probability: float) -> tuple[float, ...]:
    """Returns the probabilities of sampling 0 ... k rows.

    Args:
      num_rows: k, at least 1.
      sampling_probability: q, in (0, 1).
    """
    counts = np.arange(num_rows + 1)
    return tuple(map(float, stats.binom.pmf(counts, num_rows, sampling_probability)))


def components(num_rows: int, sampling_probability: float) -> tuple[Component, ...]:
    """Returns the pair for the lower bound; arguments as for `weights`."""
    _, *rest = weights(num_rows, sampling_probability)
    return tuple(
        Component(float(count), weight, 0.0) for count, weight in enumerate(rest, 1)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserPair(MonotonePair):
    """The pair of the module docstring, or its reverse, mirrored.

    Attributes:
      weights: ``w_0 ... w_k``.
      noise_multiplier: s, above 0.
      adds: Whether the user is absent under P, and present under Q.
    """

    weights: tuple[float, ...]
    noise_multiplier: float
    adds: bool

    def loss(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the loss at ``x``, which increases with x."""
        return -self._log_ratio(-x) if self.adds else self._log_ratio(x)

    def _log_ratio(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        scale = 2 * self.noise_multiplier**2
        excess, largest = np.zeros_like(x), np.zeros_like(x)
        total = np.full_like(x, math.log(self.weights[0]))
        for count, weight in enumerate(self.weights[1:], 1):
            if weight > 0.0:
                exponent = (2 * count * x - count**2) / scale
                largest = np.maximum(largest, exponent)
                excess += weight * np.expm1(np.minimum(exponent, _LARGEST))
                total = np.logaddexp(total, math.log(weight) + exponent)
        # Small losses keep their digits.
        small = (largest < _LARGEST) & (np.abs(excess) < 0.5)
        return np.where(small, np.log1p(np.where(small, excess, 0.0)), total)

    def upper_density(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the density of P."""
        scale = self.noise_multiplier
        density = np.zeros_like(x)
        for count, weight in enumerate(self._upper):
            density += weight * np.exp(-(((x - count) / scale) ** 2) / 2)
        return density / (scale * math.sqrt(2 * math.pi))

    @property
    def _upper(self) -> tuple[float, ...]:
        return (1.0,) if self.adds else self.weights

    def support(self, tail_mass: float) -> tuple[float, float]:
        """Returns an interval outside of which P has mass <= ``tail_mass`` per side."""
        width = -float(special.ndtri(tail_mass)) * self.noise_multiplier
        most = max(n for n, weight in enumerate(self._upper) if weight > 1e-300)
        return -width, width + most

    def upper_tails(self, low: float, high: float) -> tuple[float, float]:
        """Returns ``P(x < low)`` and ``P(x > high)``.

        Args:
          low: Lower end, in clip norms.
          high: Upper end, in clip norms.
        """

        def tail(point: float, sign: float) -> float:
            return sum(
                weight
                * float(special.ndtr(sign * (point - count) / self.noise_multiplier))
                for count, weight in enumerate(self._upper)
            )

        return tail(low, 1.0), tail(high, -1.0)


def steps(
    num_rows: int, sampling_probability: float, noise_multiplier: float
) -> tuple[Step, Step]:
    """Returns one step in both directions, remove first.

    Args:
      num_rows: k, at least 1.
      sampling_probability: q, in (0, 1).
      noise_multiplier: s, above 0.
    """
    make = functools.partial(
        UserPair,
        weights=weights(num_rows, sampling_probability),
        noise_multiplier=noise_multiplier,
    )
    return [(1.0, make(adds=False))], [(1.0, make(adds=True))]
