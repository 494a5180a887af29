"""A lower bound on delta for T steps of two mixtures of Gaussians.

The likelihood ratio of T steps is a product of T independent ratios, and the
hockey-stick divergence is the expectation of a convex function of it.  Merging outcomes
into one at their mean ratio is post-processing and can only lower the divergence.
Products are formed by repeated squaring; after each product, the outcomes of every grid
cell are merged.  The error is of second order in the cell size and accumulates over the
squarings, not over the steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.core.pld.gaussian import normal_masses

_NUM_CELLS = 900
#: Largest mass of P or of Q outside a grid, per side: events outside are ignored.
_TAIL = 1e-20


@dataclasses.dataclass(frozen=True)
class MergedOutcomes:
    """Merged outcomes.

    Attributes:
      upper: Masses under P, shape (n,).
      lower: Masses under Q, shape (n,).
      losses: ``ln(P/Q)``, shape (n,).
    """

    upper: NDArray[np.float64]
    lower: NDArray[np.float64]
    losses: NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Component:
    """A Gaussian component of both mixtures; a component at 0 has the remaining weight.

    Attributes:
      mean: Mean in clip norms.
      upper: Weight in P.
      lower: Weight in Q.
    """

    mean: float
    upper: float
    lower: float


def removed(sampling_probability: float) -> tuple[Component, ...]:
    """Returns the pair of an example that is present in P and absent from Q."""
    return (Component(1.0, sampling_probability, 0.0),)


def replaced(sampling_probability: float) -> tuple[Component, ...]:
    """Returns the pair of an example that is replaced by its opposite."""
    rate = sampling_probability
    return Component(1.0, rate, 0.0), Component(-1.0, 0.0, rate)


def _single(components: tuple[Component, ...], noise: float) -> MergedOutcomes:
    """Returns the outcomes of one step: cells of x, with exact masses."""
    reach = -float(special.ndtri(_TAIL / 4)) * noise
    means = [0.0, *(one.mean for one in components)]
    ends = min(means) - reach, max(means) + reach
    points = np.linspace(*ends, 2 * _NUM_CELLS) / noise
    cells = np.array([normal_masses(points - mean / noise) for mean in means])
    centre, *shifted = cells[:, (cells > 1e-290).all(axis=0)]
    upper = (1 - sum(one.upper for one in components)) * centre
    lower = (1 - sum(one.lower for one in components)) * centre
    excess = np.zeros_like(centre)
    for one, masses in zip(components, shifted, strict=True):
        upper += one.upper * masses
        lower += one.lower * masses
        excess += (one.upper - one.lower) * (masses - centre)
    # From the difference of the masses, which rounding would hide at a small rate.
    small = np.log1p(np.maximum(excess / lower, -0.5))
    losses = np.where(excess < -0.5 * lower, np.log(upper / lower), small)
    return MergedOutcomes(lower * np.exp(losses), lower, losses)


@dataclasses.dataclass(frozen=True)
class _Cells:
    """A partition of losses: half of the cells are even, half are narrow in the bulk.

    Both a few large losses and many small ones can matter.  Any partition is valid.
    """

    low: float
    high: float
    center: float
    scale: float
    count: int

    def index(self, losses: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the cell of each loss, outside ``range(count)`` beyond an end."""
        crowded = np.arcsinh((losses - self.center) / self.scale)
        start, end = np.arcsinh(
            (np.array([self.low, self.high]) - self.center) / self.scale
        )
        even = (losses - self.low) / (self.high - self.low)
        share = 0.5 * even + 0.5 * (crowded - start) / (end - start)
        return np.floor(share * self.count)


def _merge(outcomes: MergedOutcomes, cells: _Cells) -> MergedOutcomes:
    index = cells.index(outcomes.losses)
    # Ignoring the events outside leaves a lower bound.
    inside = (index >= 0) & (index < cells.count)
    places = index[inside].astype(np.int64)
    count, losses = cells.count, outcomes.losses[inside]
    upper, lower, middle = np.zeros(count), np.zeros(count), np.zeros(count)
    upper += np.bincount(places, outcomes.upper[inside], count)
    lower += np.bincount(places, outcomes.lower[inside], count)
    middle += np.bincount(places, outcomes.upper[inside] * losses, count)
    kept = (upper > 1e-290) & (lower > 1e-290)
    upper, lower, middle = upper[kept], lower[kept], middle[kept] / upper[kept]
    # Relative to a loss in the cell, which preserves the digits of small losses.
    correction = np.log(upper / (lower * np.exp(middle)))
    return MergedOutcomes(upper, lower, middle + correction)


def _product(left: MergedOutcomes, right: MergedOutcomes) -> MergedOutcomes:
    pairs = MergedOutcomes(
        np.multiply.outer(left.upper, right.upper).ravel(),
        np.multiply.outer(left.lower, right.lower).ravel(),
        np.add.outer(left.losses, right.losses).ravel(),
    )
    kept = np.flatnonzero((pairs.upper > _TAIL / 1e3) | (pairs.lower > _TAIL / 1e3))
    if not len(kept):
        # No event is left: the lower bound is 0.
        nothing = np.zeros(0)
        return MergedOutcomes(nothing, nothing, nothing)
    losses = pairs.losses[kept]
    low, high = float(losses.min()), float(losses.max())
    center = sum(float(one.upper @ one.losses) for one in (left, right))
    variance = sum(
        float(one.upper @ (one.losses - one.upper @ one.losses) ** 2)
        for one in (left, right)
    )
    scale = max(math.sqrt(variance), 1e-3 * (high - low) / _NUM_CELLS, 1e-290)
    reach = max(high - low, scale)
    cells = _Cells(low - 1e-9 * reach, high + 1e-9 * reach, center, scale, _NUM_CELLS)
    return _merge(pairs, cells)


@functools.lru_cache(maxsize=8)
def outcomes(
    components: tuple[Component, ...], noise_multiplier: float, num_steps: int
) -> MergedOutcomes:
    """Returns merged outcomes of ``num_steps`` steps.

    Args:
      components: Components of the pair of one step.
      noise_multiplier: Above 0.
      num_steps: T.
    """
    power = _single(components, noise_multiplier)
    total = None
    while True:
        if num_steps & 1:
            total = power if total is None else _product(total, power)
        num_steps >>= 1
        if num_steps == 0:
            assert total is not None
            return total
        power = _product(power, power)


def lower_delta(
    sampling_probability: float, noise_multiplier: float, num_steps: int, epsilon: float
) -> float:
    """Returns a lower bound on delta of one example, over both directions.

    Args:
      sampling_probability: q, in (0, 1).
      noise_multiplier: Above 0.
      num_steps: T.
      epsilon: At least 0.
    """
    components = removed(sampling_probability)
    return lower_delta_of(components, noise_multiplier, num_steps, epsilon)


def lower_delta_of(
    components: tuple[Component, ...],
    noise_multiplier: float,
    num_steps: int,
    epsilon: float,
) -> float:
    """Returns a lower bound on delta of any two mixtures, over both directions.

    Args:
      components: Components of the pair of one step.
      noise_multiplier: Above 0.
      num_steps: T.
      epsilon: At least 0.
    """
    merged = outcomes(components, noise_multiplier, num_steps)
    # Rounding error per step: at most 1e-13 of every mass and 1e-14 of every loss.
    margin = 1 - 1e-9 - 1e-13 * num_steps
    shifted = epsilon + 1e-14 * num_steps
    remove = -np.expm1(np.minimum(shifted - merged.losses, 0.0)) @ merged.upper
    add = -np.expm1(np.minimum(shifted + merged.losses, 0.0)) @ merged.lower
    return max(0.0, margin * max(float(remove), float(add)))
