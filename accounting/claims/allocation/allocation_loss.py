"""The privacy loss of random allocation: one example in one of t steps of an epoch.

`random_allocation` encloses the likelihood ratio.  This module turns it into a loss in
each direction and composes epochs.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from accounting.claims.allocation import random_allocation
from accounting.core.numerics.root_finding import log_ratio, threshold
from accounting.core.numerics.sums import inner
from accounting.core.pld.loss_distribution import Atoms
from accounting.core.pld.privacy_profile import FINE, Composition


@dataclasses.dataclass(frozen=True, kw_only=True)
class Direction:
    """The loss of one epoch in one direction.

    Attributes:
      masses: Probabilities under the first member of the pair, shape (n,).
      losses: Finite losses, shape (n,).
      infinite_mass: Probability of infinite loss.
      relative_error: Bound on the relative rounding error of the masses.
    """

    masses: NDArray[np.float64]
    losses: NDArray[np.float64]
    infinite_mass: float
    relative_error: float

    def delta(self, epsilon: float) -> float:
        """Returns delta of one epoch by direct summation, without margins."""
        gain = -np.expm1(np.minimum(epsilon - self.losses, 0.0))
        return inner(self.masses, gain)

    @functools.cached_property
    def atoms(self) -> Atoms:
        """The privacy-loss distribution of one epoch."""
        return Atoms(self.masses, self.losses, self.infinite_mass)


@functools.lru_cache(maxsize=512)  # `null_clones` asks for many numbers of steps
def directions(
    noise_multiplier: float, num_steps: int, upper: bool, num_cells: int
) -> tuple[Direction, Direction]:
    """Returns the losses of one epoch in the remove and in the add direction.

    Args:
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
      num_steps: t, number of steps of the epoch.
      upper: True for an upper bound on delta, False for a lower one.
      num_cells: Number of grid cells of the likelihood ratios.
    """
    ratios = random_allocation.allocation(noise_multiplier, num_steps, upper, num_cells)
    losses = np.log(ratios.values / num_steps)
    kept = ratios.masses > 0
    masses, losses = ratios.masses[kept], losses[kept]
    error = random_allocation.relative_error(num_steps)
    remove = Direction(
        masses=masses * np.exp(losses),
        losses=losses,
        infinite_mass=ratios.lost if upper else 0.0,
        relative_error=error,
    )
    add = Direction(
        masses=masses,
        losses=-losses,
        infinite_mass=ratios.zero_mass if upper else 0.0,
        relative_error=error,
    )
    return remove, add


def upper_delta(direction: Direction, count: int, epsilon: float) -> float:
    """Returns an upper bound on delta of ``count`` epochs in one direction.

    Args:
      direction: Loss of one epoch.
      count: Number of independent epochs.
      epsilon: At least 0.
    """
    margin = 1 + count * direction.relative_error
    if count == 1:
        value = direction.delta(epsilon) + direction.infinite_mass
    else:
        sums = Composition(direction.atoms, count)
        value = sums.at(epsilon, FINE).delta(epsilon)
    return min(1.0, value * margin)


def upper_epsilon(direction: Direction, count: int, delta: float) -> float:
    """Returns an upper bound on epsilon; arguments as for `upper_delta`.

    Args:
      delta: In (0, 1).
    """
    margin = 1 + count * direction.relative_error
    if count == 1:
        return threshold(
            lambda point: log_ratio(upper_delta(direction, 1, point), delta),
            1.0,
            relative=1e-9,
            most=1e6,
        )[1]
    return Composition(direction.atoms, count).epsilon(delta / margin)
