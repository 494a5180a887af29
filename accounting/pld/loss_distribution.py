"""Discrete privacy losses that dominate the exact ones.

A loss L between two others, l and l', is split between them so that the probabilities
under P *and* under Q are preserved ("connect the dots").  The likelihood ratio becomes
a mean-preserving spread of itself, so the hockey-stick divergence can only grow, at
every epsilon and after any composition: every result is pessimistic.  The error is of
second order in ``l' - l``, where rounding losses up costs a first-order error at each
step.

References:
  Doroshenko, Ghazi, Kamath, Kumar and Manurangsi (2022), arXiv:2207.04380.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from accounting.pld.dominating_pairs import MonotonePair

#: Of P, what is left out of the support of a pair: far below any delta.
_LEAST_TAIL = 1e-290


@dataclasses.dataclass(frozen=True)
class Atoms:
    """Masses under P of finite losses, and of infinite loss."""

    masses: NDArray[np.float64]
    losses: NDArray[np.float64]
    infinite_mass: float = 0.0

    def clipped(self, low: float, high: float) -> Atoms:
        """Returns a dominating loss, of which finite values are between two ends.

        Smaller losses are moved up, which costs nothing where no sum with one of them
        exceeds epsilon.  Larger ones are split between the upper end and infinity, so
        that both members of the pair keep their masses.  That costs nothing where every
        sum with one of them exceeds epsilon: delta is linear in the likelihood ratio
        Q / P there.

        Args:
          low: The smallest finite loss.
          high: The largest.
        """
        excess = np.maximum(self.losses - high, 0.0)
        infinite = self.infinite_mass + float(self.masses @ -np.expm1(-excess))
        losses = np.clip(self.losses, low, high)
        return Atoms(self.masses * np.exp(-excess), losses, infinite)

    def tilted(self, order: float) -> tuple[NDArray[np.float64], float]:
        """Returns probabilities multiplied by ``e^(order L)``, and ln of their sum."""
        exponents = order * self.losses
        largest, smallest = float(exponents.max()), float(exponents.min())
        if largest < 1.0 and smallest > -1.0 and self.infinite_mass < 0.5:
            # Near order 0 the moment is 1 plus little: sum the difference.
            weights = self.masses * np.exp(exponents)
            excess = float(self.masses @ np.expm1(exponents)) - self.infinite_mass
            return weights / float(weights.sum()), math.log1p(excess)
        # Masses and exponents may cancel: neither alone is what is largest.
        with np.errstate(divide="ignore", under="ignore"):
            exponents += np.log(self.masses)
            largest = float(exponents.max())
            weights = np.exp(exponents - largest)
        total = float(weights.sum())
        return weights / total, largest + math.log(total)

    def cumulants(self, order: float) -> tuple[float, float, float]:
        """Returns ``ln E[e^(order L)]`` and its first two derivatives."""
        weights, log_moment = self.tilted(order)
        mean = float(weights @ self.losses)
        return log_moment, mean, float(weights @ (self.losses - mean) ** 2)


def support(pair: MonotonePair) -> tuple[float, float]:
    """Returns an interval that P next to never leaves."""
    return pair.support(_LEAST_TAIL)


def spread(
    pair: MonotonePair, edges: NDArray[np.float64], low: float, high: float
) -> Atoms:
    """Returns losses at points, and at the ends, that dominate ``pair``.

    Args:
      pair: One step.
      edges: Increasing points x, between whose losses others are split; the first and
        the last are those of `support`.
      low: The smallest finite loss; see `Atoms.clipped`.
      high: The largest.
    """
    cells, masses, nodes = pair.nodes(edges)
    below, above = pair.upper_tails(edges[0], edges[-1])
    whole = Atoms(masses.ravel(), pair.loss(nodes.ravel()), above).clipped(low, high)
    grid = np.clip(pair.loss(cells), low, high)
    masses = whole.masses.reshape(masses.shape)
    losses = whole.losses.reshape(masses.shape)
    # Of a loss r above the lower point, the upper share is (1 - e^-r)/(1 - e^-width).
    width = np.diff(grid)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.expm1(grid[:-1, None] - losses) / np.expm1(-width)
    share = np.where(width > 0, np.clip(share, 0.0, 1.0), 1.0)
    found = np.zeros(len(grid))
    found[:-1] += (masses * (1 - share)).sum(axis=1)
    found[1:] += (masses * share).sum(axis=1)
    # Upwards, hence pessimistic: losses below the support are less than at its edge.
    found[0] += below
    kept = found > 0
    return Atoms(found[kept], grid[kept], whole.infinite_mass)


def mix(parts: list[tuple[float, Atoms]]) -> Atoms:
    """Returns the mixture, with the given weights, of losses.

    Dominates a mechanism that first draws a public component and then runs it.
    """
    return Atoms(
        np.concatenate([weight * part.masses for weight, part in parts]),
        np.concatenate([part.losses for _, part in parts]),
        sum(weight * part.infinite_mass for weight, part in parts),
    )
