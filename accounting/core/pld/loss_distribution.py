"""Discrete privacy-loss distributions that dominate the exact ones.

A loss L between two grid points, l and l', is split between them so that the
probabilities under P *and* under Q are preserved ("connect the dots").  The likelihood
ratio becomes a mean-preserving spread of itself, so the hockey-stick divergence can
only grow, at every epsilon and after any composition: every result is pessimistic.  The
error is of second order in ``l' - l``; rounding losses up costs a first-order error in
each step.

References:
  Doroshenko, Ghazi, Kamath, Kumar and Manurangsi (2022), arXiv:2207.04380.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray

from accounting.core.numerics import inner
from accounting.core.pld.dominating_pairs import Pair

#: Mass of P outside the support of a pair, per side: far below any delta.
_LEAST_TAIL = 1e-290


@dataclasses.dataclass(frozen=True)
class Atoms:
    """A discrete privacy-loss distribution.

    Attributes:
      masses: Probabilities under P, shape (n,).
      losses: Finite losses, shape (n,).
      infinite_mass: Probability of infinite loss under P.
    """

    masses: NDArray[np.float64]
    losses: NDArray[np.float64]
    infinite_mass: float = 0.0

    def clipped(self, low: float, high: float) -> Atoms:
        """Returns a dominating distribution with finite losses in [low, high] only.

        Smaller losses are moved up to ``low``.  This costs nothing if no sum with one
        of them exceeds epsilon.  Larger losses are split between ``high`` and infinity,
        which preserves their masses under P and under Q.  This costs nothing if every
        sum with one of them exceeds epsilon, since delta is then linear in the
        likelihood ratio Q / P.

        Args:
          low: Smallest finite loss.
          high: Largest finite loss.
        """
        excess = np.maximum(self.losses - high, 0.0)
        infinite = self.infinite_mass + inner(self.masses, -np.expm1(-excess))
        losses = np.clip(self.losses, low, high)
        return Atoms(self.masses * np.exp(-excess), losses, infinite)

    def tilted(self, order: float) -> tuple[NDArray[np.float64], float]:
        """Returns the tilted probabilities, and ``ln E[e^(order L)]``.

        Under the tilt, the probability of a loss L is multiplied by ``e^(order L)`` and
        the result is normalised.  Shape (n,), and a number.
        """
        exponents = order * self.losses
        largest, smallest = float(exponents.max()), float(exponents.min())
        if largest < 1.0 and smallest > -1.0 and self.infinite_mass < 0.5:
            # Near order 0 the moment is nearly 1: sum the difference.
            weights = self.masses * np.exp(exponents)
            excess = inner(self.masses, np.expm1(exponents)) - self.infinite_mass
            return weights / float(weights.sum()), math.log1p(excess)
        # The largest product of mass and factor may have neither the largest mass nor
        # the largest factor.
        with np.errstate(under="ignore"):
            exponents += self._log_masses
            largest = float(exponents.max())
            weights = np.exp(exponents - largest)
        total = float(weights.sum())
        return weights / total, largest + math.log(total)

    def cumulants(self, order: float) -> tuple[float, float, float]:
        """Returns ``ln E[e^(order L)]`` and its first two derivatives."""
        if order not in self._cumulants:
            weights, log_moment = self.tilted(order)
            mean = inner(weights, self.losses)
            variance = inner(weights, (self.losses - mean) ** 2)
            self._cumulants[order] = log_moment, mean, variance
        return self._cumulants[order]

    @functools.cached_property  # searches ask for the same orders
    def _cumulants(self) -> dict[float, tuple[float, float, float]]:
        return {}

    @functools.cached_property
    def _log_masses(self) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):
            return np.log(self.masses)


def support(pair: Pair) -> tuple[float, float]:
    """Returns an interval outside of which P has a negligible mass."""
    return pair.support(_LEAST_TAIL)


def spread(pair: Pair, edges: NDArray[np.float64], low: float, high: float) -> Atoms:
    """Returns a discrete distribution that dominates the loss of ``pair``.

    Its losses are those at the cell edges, clipped to [low, high].

    Args:
      pair: Dominating pair of one step.
      edges: Increasing points x, shape (n,), from the lower to the upper end of
        `support`; losses between the edges of a cell are split between them.
      low: Smallest finite loss; see `Atoms.clipped`.
      high: Largest finite loss.
    """
    cells, masses, nodes = pair.nodes(edges)
    below, above = pair.upper_tails(edges[0], edges[-1])
    whole = Atoms(masses.ravel(), pair.loss(nodes.ravel()), above).clipped(low, high)
    grid = np.clip(pair.loss(cells), low, high)
    masses = whole.masses.reshape(masses.shape)
    losses = whole.losses.reshape(masses.shape)
    # If a loss is r above the lower edge, the share of the upper edge is
    # (1 - e^-r) / (1 - e^-width).
    width = np.diff(grid)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.expm1(grid[:-1, None] - losses) / np.expm1(-width)
    share = np.where(width > 0, np.clip(share, 0.0, 1.0), 1.0)
    found = np.zeros(len(grid))
    found[:-1] += (masses * (1 - share)).sum(axis=1)
    found[1:] += (masses * share).sum(axis=1)
    # Losses below the support are rounded up to its edge, which is pessimistic.
    found[0] += below
    kept = found > 0
    return Atoms(found[kept], grid[kept], whole.infinite_mass)


def mix(parts: list[tuple[float, Atoms]]) -> Atoms:
    """Returns the mixture of losses with the given weights.

    It dominates a mechanism that draws a public component and then runs it.
    """
    return Atoms(
        np.concatenate([weight * part.masses for weight, part in parts]),
        np.concatenate([part.losses for _, part in parts]),
        sum(weight * part.infinite_mass for weight, part in parts),
    )
