"""Sums of likelihood ratios, enclosed between two discrete distributions.

An example is in one of t steps, chosen uniformly.  Under the ghost's distribution Q the
likelihood ratio is ``R / t`` with ``R = r_1 + ... + r_t``, where the terms are
independent and ``r = exp((2x - 1) / (2 s^2))`` for x ~ N(0, s^2), so that E[r] = 1.
Both

    delta_remove(epsilon) = E[(R/t - e^epsilon)+]
    delta_add(epsilon)    = E[(1 - e^epsilon R/t)+]

are expectations of convex functions of R.  So R may be replaced by a mean-preserving
*spread* of itself for an upper bound, and by a mean-preserving *contraction* for a
lower bound.  A spread or contraction of independent terms is one of their sum.  So sums
are formed by repeated doubling; after each addition,

  - upper: every atom is split between the two grid points around it, keeping its mean;
  - lower: the atoms of each cell are merged into one at their mean.

Both errors are of second order in the cell size, whereas rounding in one direction
costs a first-order error, so a thousand cells suffice.  For the upper bound, atoms
above the grid are moved to 0, and their share of E[R]/t is counted as infinite loss in
the remove direction, because ``(R - c)+ <= (R - Y - c)+ + Y`` for Y >= 0; in the add
direction a smaller R is worse.  Rounding multiplies a mass by at most
``1 + relative_error``.

`Direction` turns the ratio into a loss in each direction, and epochs are composed.

References:
  Chua et al. (2025), arXiv:2412.16802, for the pair; Feldman and Shenfeld (2026),
  arXiv:2602.17284, for sums on a geometric grid.  Mean-preserving cells are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.core.numerics import inner, log_ratio, threshold
from accounting.core.pld.dominating_pairs import Atoms, normal_masses
from accounting.core.pld.privacy_profile import FINE, Composition

#: Number of grid cells, in an answer and in the early steps of a search.
NUM_CELLS = 2000
COARSE_CELLS = 200
#: Number of cells of the coarse pass that locates the next grid.
_NUM_SCOUTS = 150
#: Largest share of E[R]/t, and of the probability, outside a grid, per side.
_TAIL = 1e-18
#: Probability that one of two sums is 0, below which their grid does not reach down.
_RARE = 1e-16
#: Number of pairs of atoms per block: few enough for a processor's cache.
_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratios:
    """A discrete distribution of a sum of ``num_terms`` likelihood ratios under Q.

    Attributes:
      num_terms: Number of terms of the sum.
      values: Positive, increasing values, shape (n,).
      masses: Probabilities of the values, shape (n,).
      zero_mass: Probability of the value 0.
      lost: Share of the expectation that was moved to infinite loss.
    """

    num_terms: int
    values: NDArray[np.float64]
    masses: NDArray[np.float64]
    zero_mass: float
    lost: float


def single(noise: float, upper: bool, num_cells: int) -> Ratios:
    """Returns an enclosing distribution of one likelihood ratio.

    Args:
      noise: Noise multiplier, above 0.
      upper: True for an upper bound on delta, False for a lower one.
      num_cells: Number of grid cells.
    """
    reach = -float(special.ndtri(_TAIL / 4))
    # Under Q and under P = N(1, s^2) the logarithm is N(-+1/(2 s^2), 1/s^2).
    low, high = -reach / noise - 0.5 / noise**2, reach / noise + 0.5 / noise**2
    # Ratios far below the resolution of the sum share one cell.
    low = max(low, math.log(1e-4 / (1 + noise)) if noise < 1 else low)
    edges = np.linspace(low, high, num_cells + 1)
    below = edges * noise + 0.5 / noise
    points = np.concatenate(([-np.inf], below, [np.inf]))
    masses = normal_masses(points)
    means = normal_masses(points - 1 / noise)
    return _enclose(
        masses, means, np.exp(edges), upper, num_terms=1, zero_mass=0.0, lost=0.0
    )


def _enclose(
    masses: NDArray[np.float64],
    means: NDArray[np.float64],
    edges: NDArray[np.float64],
    upper: bool,
    *,
    num_terms: int,
    zero_mass: float,
    lost: float,
) -> Ratios:
    """Returns the distribution with given ``masses`` and mass-weighted means per cell.

    The first cell is [0, edges[0]], the last (edges[-1], inf).
    """
    if not upper:
        kept = masses > 0
        return Ratios(
            num_terms=num_terms,
            values=means[kept] / masses[kept],
            masses=masses[kept],
            zero_mass=zero_mass,
            lost=lost,
        )
    inner, total = masses[1:-1], means[1:-1]
    share = np.clip((total - edges[:-1] * inner) / np.diff(edges), 0.0, inner)
    grid = np.zeros(len(edges))
    grid[:-1] += inner - share
    grid[1:] += share
    lowest = min(means[0] / edges[0], masses[0])
    grid[0] += lowest
    return Ratios(
        num_terms=num_terms,
        values=edges,
        masses=grid,
        zero_mass=zero_mass + float(masses[0] - lowest + masses[-1]),
        lost=lost + float(means[-1]) / num_terms,
    )


def add(left: Ratios, right: Ratios, upper: bool, num_cells: int) -> Ratios:
    """Returns an enclosing distribution of the sum of two independent sums.

    Args:
      left: One sum.
      right: The other sum, independent of ``left``.
      upper: True for an upper bound on delta, False for a lower one.
      num_cells: Number of grid cells.
    """
    low, high = _extent(left, right)
    return _add_on(left, right, np.geomspace(low, high, num_cells + 1), upper)


def _extent(left: Ratios, right: Ratios) -> tuple[float, float]:
    """Returns an interval with all but ``_TAIL`` of the sum's mass and expectation.

    Sums of which one term is 0 are left out if they hardly ever occur: the interval may
    then be far narrower than 1 %, as that of many terms or of much noise is.
    """
    low, high = left.values[0] + right.values[0], left.values[-1] + right.values[-1]
    tail, zero = _TAIL, left.zero_mass + right.zero_mass
    if zero < _RARE:
        tail += zero
    else:
        low = min(left.values[0], right.values[0])
    width = (high / low) ** (1 / _NUM_SCOUTS)
    edges = np.geomspace(low / width, high * width, _NUM_SCOUTS + 3)
    scouts = _add_on(_thinned(left), _thinned(right), edges, upper=False)
    from_below = np.cumsum(scouts.masses)
    weights = scouts.masses * scouts.values / scouts.num_terms
    from_above = np.cumsum(weights[::-1])[::-1]
    first = int(np.searchsorted(from_below, tail))
    last = int(np.count_nonzero(from_above > _TAIL)) - 1
    # One scout further on both sides, as scouts are the means of their cells.
    margin = min(width, 1.01)
    low = scouts.values[max(first - 1, 0)] / margin
    high = scouts.values[min(last + 1, len(scouts.values) - 1)] * margin
    return float(low), float(high)


def _thinned(sums: Ratios) -> Ratios:
    """Returns a sum of few atoms, each at the mean of several: a choice of a grid."""
    firsts = np.arange(0, len(sums.values), math.ceil(len(sums.values) / _NUM_SCOUTS))
    masses = np.add.reduceat(sums.masses, firsts)
    totals = np.add.reduceat(sums.masses * sums.values, firsts)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(masses > 0, totals / masses, sums.values[firsts])
    return dataclasses.replace(sums, values=values, masses=masses)


def _add_on(
    left: Ratios, right: Ratios, edges: NDArray[np.float64], upper: bool
) -> Ratios:
    num_terms = left.num_terms + right.num_terms
    size = len(edges) + 1
    masses, means = np.zeros(size), np.zeros(size)
    grid = (math.log(edges[0]), math.log(edges[-1] / edges[0]) / (len(edges) - 1))
    right_values = np.append(right.values, 0.0)
    right_masses = np.append(right.masses, right.zero_mass)
    left_values = np.append(left.values, 0.0)
    left_masses = np.append(left.masses, left.zero_mass)
    rows = max(1, _CHUNK // len(right_values))
    for start in range(0, len(left_values), rows):
        block = slice(start, start + rows)
        # Of a sum and its copy, half of the pairs are enough.
        others = slice(start if left is right else 0, None)
        values = np.add.outer(left_values[block], right_values[others])
        weights = np.multiply.outer(left_masses[block], right_masses[others])
        if left is right:
            weights[:, rows:] *= 2
        values, weights = values.ravel(), weights.ravel()
        with np.errstate(divide="ignore"):
            cells = np.floor((np.log(values) - grid[0]) / grid[1]) + 1
        cells = np.clip(cells, 0, size - 1).astype(np.int64)
        masses += np.bincount(cells, weights, size)
        means += np.bincount(cells, weights * values, size)
    # The first cell received the pair of zeros, whose mass is known exactly.
    zero_mass = left.zero_mass * right.zero_mass
    masses[0] = max(masses[0] - zero_mass, 0.0)
    terms = (left.num_terms, right.num_terms)
    lost = (terms[0] * left.lost + terms[1] * right.lost) / num_terms
    return _enclose(
        masses,
        means,
        edges,
        upper,
        num_terms=num_terms,
        zero_mass=zero_mass,
        lost=lost,
    )


def relative_error(num_steps: int) -> float:
    """Returns a bound on the relative rounding error of masses and values.

    The error of one term is 1e-14 in the bulk and 1e-12 in the tails.  A sum of t terms
    multiplies t masses, few of them from the tails.
    """
    return 1e-9 + 1e-13 * num_steps


@functools.lru_cache(maxsize=2048)
def allocation(
    noise: float, num_steps: int, upper: bool, num_cells: int = NUM_CELLS
) -> Ratios:
    """Returns an enclosing distribution of the sum of ``num_steps`` likelihood ratios.

    A power of two is twice its half; any other number is its highest binary digit plus
    the rest.  All partial sums are cached, so neighbours cost one addition each.

    Args:
      noise: Noise multiplier, above 0.
      num_steps: t, number of terms.
      upper: True for an upper bound on delta, False for a lower one.
      num_cells: Number of grid cells.
    """
    if num_steps == 1:
        return single(noise, upper, num_cells)
    highest = 1 << (num_steps.bit_length() - 1)
    part = highest if highest < num_steps else highest // 2
    power = allocation(noise, part, upper, num_cells)
    rest = allocation(noise, num_steps - part, upper, num_cells)
    return add(rest, power, upper, num_cells)


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
    ratios = allocation(noise_multiplier, num_steps, upper, num_cells)
    losses = np.log(ratios.values / num_steps)
    kept = ratios.masses > 0
    masses, losses = ratios.masses[kept], losses[kept]
    error = relative_error(num_steps)
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
