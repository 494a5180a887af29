"""Dominating pairs of one step: mixtures of two Gaussians with a monotone loss.

Notation.  One step of DP-SGD with noise multiplier ``s``, in the direction of the
differing example and in units of the clip norm, is dominated by a pair (P, Q) with

    P = (1 - a) N(0, s^2) + a N(+1, s^2),     Q = (1 - b) N(0, s^2) + b N(-1, s^2):

``(a, b) = (q, 0)`` when an example included with probability q is removed, ``(0, q)``
when it is added (mirrored, so that the loss increases with x), and ``(q, q)`` when an
example is replaced by its opposite.  The privacy loss is ``L(x) = ln dP/dQ(x)``.

References:
  Abadi et al. (2016), arXiv:1607.00133; Zhu, Dong and Wang (2022), arXiv:2106.08567,
  for dominating pairs and their composition.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

#: Quadrature nodes per panel, and largest panel width in noise standard deviations: the
#: quadrature error of a Gaussian density is then below 1e-12 of the panel's mass up to
#: twelve standard deviations from the mean, and below rounding in the bulk.
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(4)
_PANEL_WIDTH = 0.05


class MonotonePair(abc.ABC):
    """A pair (P, Q) of distributions on the real line with an increasing loss.

    Attributes:
      noise_multiplier: ``s``, the standard deviation of every Gaussian component.
    """

    noise_multiplier: float

    @abc.abstractmethod
    def loss(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the loss at points ``x``, of any shape; it increases with x."""

    @abc.abstractmethod
    def upper_density(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the density of P at points ``x``, of any shape."""

    @abc.abstractmethod
    def support(self, tail_mass: float) -> tuple[float, float]:
        """Returns an interval outside of which P has mass <= ``tail_mass`` per side."""

    @abc.abstractmethod
    def upper_tails(self, low: float, high: float) -> tuple[float, float]:
        """Returns ``P(x < low)`` and ``P(x > high)``.

        Args:
          low: Lower end, in clip norms.
          high: Upper end, in clip norms.
        """

    def nodes(
        self, edges: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Returns cell edges, and the masses under P and positions x of their nodes.

        Cells that are too wide for the quadrature are cut.

        Args:
          edges: Increasing points, shape (n,).

        Returns:
          Arrays of shapes (cells + 1,), (cells, nodes) and (cells, nodes).
        """
        edges = np.union1d(edges, self._panels(edges[0], edges[-1]))
        half = np.diff(edges)[:, None] / 2
        x = (edges[:-1, None] + half) + half * _POINTS
        return edges, half * _WEIGHTS * self.upper_density(x), x

    def _panels(self, low: float, high: float) -> NDArray[np.float64]:
        """Returns increasing points from ``low`` to ``high`` for the quadrature."""
        width = _PANEL_WIDTH * self.noise_multiplier
        return np.linspace(low, high, 2 + int((high - low) / width))

    def sketch(self, low: float, high: float) -> tuple[NDArray[np.float64], ...]:
        """Returns positions x of few nodes, and their masses under P: for choices.

        Args:
          low: Lower end, in clip norms.
          high: Upper end, in clip norms.
        """
        ends = self._panels(low, high)
        x = (ends[1:] + ends[:-1]) / 2
        return x, np.diff(ends) * self.upper_density(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair(MonotonePair):
    """The pair of the module docstring.

    Attributes:
      upper_weight: ``a``, weight of the shifted component of P, in [0, 1].
      lower_weight: ``b``, weight of the shifted component of Q: 0 or ``a``, or any
        number in [0, 1] if ``a`` is 0.
      noise_multiplier: ``s``, above 0.
    """

    upper_weight: float
    lower_weight: float
    noise_multiplier: float

    def loss(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns ``L(x)``, which increases with x."""
        scale = self.noise_multiplier**2
        gain = _log_mixture(self.upper_weight, (2 * x - 1) / (2 * scale))
        return gain - _log_mixture(self.lower_weight, (-2 * x - 1) / (2 * scale))

    def upper_density(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the density of P."""
        scale = self.noise_multiplier
        density = (1 - self.upper_weight) * np.exp(-((x / scale) ** 2) / 2)
        density += self.upper_weight * np.exp(-(((x - 1) / scale) ** 2) / 2)
        return density / (scale * math.sqrt(2 * math.pi))

    def support(self, tail_mass: float) -> tuple[float, float]:
        """Returns an interval outside of which P has mass <= ``tail_mass`` per side."""
        width = -float(special.ndtri(tail_mass)) * self.noise_multiplier
        high = width + (1.0 if self.upper_weight > 0 else 0.0)
        low = -width + (1.0 if self.upper_weight == 1.0 else 0.0)
        return low, high

    def upper_tails(self, low: float, high: float) -> tuple[float, float]:
        """Returns ``P(x < low)`` and ``P(x > high)``.

        Args:
          low: Lower end, in clip norms.
          high: Upper end, in clip norms.
        """

        def tail(point: float, sign: float) -> float:
            centred = special.ndtr(sign * point / self.noise_multiplier)
            shifted = special.ndtr(sign * (point - 1) / self.noise_multiplier)
            weight = self.upper_weight
            return float((1 - weight) * centred + weight * shifted)

        return tail(low, 1.0), tail(high, -1.0)


#: One step: a public mixture of pairs, each with its probability.
Step = list[tuple[float, MonotonePair]]


def _log_mixture(weight: float, exponent: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns ``ln(1 - weight + weight * e^exponent)`` without overflow."""
    if weight == 0.0:
        return np.zeros_like(exponent)
    if weight == 1.0:
        return exponent
    small = np.log1p(weight * np.expm1(np.minimum(exponent, 1.0)))
    large = exponent + np.log(weight + (1 - weight) * np.exp(-np.maximum(exponent, 0)))
    return np.where(exponent < 1.0, small, large)


def remove_pair(sampling_probability: float, noise_multiplier: float) -> Pair:
    """Returns the pair of a Poisson-subsampled Gaussian: example against ghost.

    Args:
      sampling_probability: q, in [0, 1].
      noise_multiplier: s, above 0.
    """
    return Pair(
        upper_weight=sampling_probability,
        lower_weight=0.0,
        noise_multiplier=noise_multiplier,
    )


def add_pair(sampling_probability: float, noise_multiplier: float) -> Pair:
    """Returns the pair of a Poisson-subsampled Gaussian: ghost against example.

    Args:
      sampling_probability: q, in [0, 1].
      noise_multiplier: s, above 0.
    """
    return Pair(
        upper_weight=0.0,
        lower_weight=sampling_probability,
        noise_multiplier=noise_multiplier,
    )


def replace_pair(sampling_probability: float, noise_multiplier: float) -> Pair:
    """Returns the pair of a Poisson-subsampled Gaussian: example against its opposite.

    Args:
      sampling_probability: q, in [0, 1].
      noise_multiplier: s, above 0.
    """
    return Pair(
        upper_weight=sampling_probability,
        lower_weight=sampling_probability,
        noise_multiplier=noise_multiplier,
    )
