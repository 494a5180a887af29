"""Privacy-loss distributions on a uniform grid that dominate the exact ones.

A loss L between two grid points is split between them so that the probabilities under
P *and* under Q are preserved ("connect the dots").  The likelihood ratio becomes a
mean-preserving spread of itself, so the hockey-stick divergence can only grow, at every
epsilon and after any composition: every result is pessimistic.  The error is of second
order in the spacing, where rounding losses up costs a first-order error at each step.

References:
  Doroshenko, Ghazi, Kamath, Kumar and Manurangsi (2022), arXiv:2207.04380.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from accounting.pld.dominating_pairs import MonotonePair

#: Cells of a single step; more are traded for a coarser, still pessimistic, grid.
MAX_CELLS = 1 << 19


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossDistribution:
    """Masses under P of the losses ``(first + k) * spacing``, and of infinite loss."""

    spacing: float
    first: int
    masses: NDArray[np.float64]
    infinite_mass: float

    @property
    def losses(self) -> NDArray[np.float64]:
        """The grid of finite losses."""
        points = self.first + np.arange(len(self.masses))
        return np.asarray(points * self.spacing, np.float64)


def least_spacing(losses: NDArray[np.float64]) -> float:
    """Returns the spacing of the finest grid that is used for these losses.

    It has at most ``MAX_CELLS`` cells, and counts its points from 0 in 64-bit integers.
    """
    return max(float(np.ptp(losses)) / MAX_CELLS, float(np.abs(losses).max()) * 1e-10)


def spread(
    masses: NDArray[np.float64],
    losses: NDArray[np.float64],
    spacing: float,
    infinite_mass: float = 0.0,
) -> LossDistribution:
    """Returns the atoms split to the grid points around them; dominates the atoms.

    Args:
      masses: Of the atoms under P, shape (atoms,).
      losses: Of the atoms, shape (atoms,).
      spacing: Of the grid.
      infinite_mass: Probability of infinite loss under P.
    """
    below = np.floor(losses / spacing)
    # At r above the lower grid point, the upper share is (1 - e^-r)/(1 - e^-spacing).
    share = np.expm1(below * spacing - losses) / math.expm1(-spacing)
    share = np.clip(share, 0.0, 1.0)
    first = int(below.min())
    cells = (below - first).astype(np.int64)
    size = int(cells.max()) + 2
    grid = np.zeros(size)
    grid += np.bincount(cells, masses * (1 - share), size)
    grid += np.bincount(cells + 1, masses * share, size)
    return LossDistribution(
        spacing=spacing, first=first, masses=grid, infinite_mass=infinite_mass
    )


def discretize(
    pair: MonotonePair, spacing: float, tail_mass: float
) -> LossDistribution:
    """Returns a distribution on the grid that dominates ``pair``.

    At most ``tail_mass`` of P on the side of large losses becomes infinite loss, and as
    much on the other side is moved up to where the support begins.

    Args:
      pair: One step.
      spacing: Of the grid.
      tail_mass: What either side of the support may leave out of P.
    """
    low, high = pair.support(tail_mass)
    ends = pair.loss(np.array([low, high]))
    first, last = math.floor(ends[0] / spacing), math.ceil(ends[1] / spacing)
    inner = pair.inverse_loss(np.arange(first, last + 1) * spacing)
    inner = inner[(inner > low) & (inner < high)]
    masses, losses = pair.atoms(np.concatenate(([low], inner, [high])))
    below, above = pair.upper_tails(low, high)
    # Upwards, hence pessimistic: losses below the support are less than at its edge.
    masses = np.append(masses, below)
    losses = np.append(losses, ends[0])
    return spread(masses, losses, spacing, above)


def mix(
    parts: list[tuple[float, LossDistribution]],
) -> LossDistribution:
    """Returns the mixture, with the given weights, of distributions on one spacing.

    Dominates a mechanism that first draws a public component and then runs it.
    """
    first = min(part.first for _, part in parts)
    last = max(part.first + len(part.masses) for _, part in parts)
    masses = np.zeros(last - first)
    for weight, part in parts:
        start = part.first - first
        masses[start : start + len(part.masses)] += weight * part.masses
    return LossDistribution(
        spacing=parts[0][1].spacing,
        first=first,
        masses=masses,
        infinite_mass=sum(weight * part.infinite_mass for weight, part in parts),
    )
