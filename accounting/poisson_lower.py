"""A lower bound for Poisson subsampling: how much of an upper bound is slack.

The likelihood ratio of T steps is a product of T independent ratios, and the hockey-stick
divergence is the expectation of a convex function of it.  Merging outcomes of a step,
or of several, into one at their mean ratio is post-processing and can only lower the
divergence.  Products are formed by repeated squaring with, after each, the outcomes of
every cell of a grid merged: the error is of second order in the cell size and adds up
over the doublings, not over the steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUM_CELLS = 1000
_NUM_SCOUTS = 150
#: What a grid may leave out of P and of Q on either side: events outside are ignored.
_TAIL = 1e-20


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Merged outcomes: masses under P and Q, and losses ``ln(P/Q)``."""

    upper: NDArray[np.float64]
    lower: NDArray[np.float64]
    losses: NDArray[np.float64]


def _single(sampling_probability: float, noise: float) -> Outcomes:
    """Returns outcomes of one step: x cut into cells, with exact masses."""
    from scipy import special

    from accounting.allocation import normal_masses

    reach = -float(special.ndtri(_TAIL / 4)) * noise
    points = np.linspace(-reach, 1 + reach, 2 * _NUM_CELLS) / noise
    lower = normal_masses(points)
    shifted = normal_masses(points - 1 / noise)
    kept = (lower > 1e-290) & (shifted > 1e-290)
    lower, shifted = lower[kept], shifted[kept]
    # As one plus a small difference, which a small rate would drown.
    losses = np.log1p(sampling_probability * (shifted / lower - 1))
    return Outcomes(lower * np.exp(losses), lower, losses)


def _merge(
    upper: NDArray[np.float64],
    lower: NDArray[np.float64],
    losses: NDArray[np.float64],
    low: float,
    width: float,
    num_cells: int,
) -> Outcomes:
    cells = np.floor((losses - low) / width)
    inside = (cells >= 0) & (cells < num_cells)
    index = cells[inside].astype(np.int64)
    merged_upper = np.bincount(index, upper[inside], num_cells)
    merged_lower = np.bincount(index, lower[inside], num_cells)
    kept = (merged_upper > 1e-290) & (merged_lower > 1e-290)
    merged_upper, merged_lower = merged_upper[kept], merged_lower[kept]
    # Relative to the middle of the cell, so that small losses keep their digits.
    middle = low + width * (np.flatnonzero(kept) + 0.5)
    ratio = merged_upper / (merged_lower * np.exp(middle))
    return Outcomes(merged_upper, merged_lower, middle + np.log(ratio))


def _product(left: Outcomes, right: Outcomes) -> Outcomes:
    upper = np.multiply.outer(left.upper, right.upper).ravel()
    lower = np.multiply.outer(left.lower, right.lower).ravel()
    losses = np.add.outer(left.losses, right.losses).ravel()
    low, high = float(losses.min()), float(losses.max()) + 1e-300
    width = max((high - low) / _NUM_SCOUTS * (1 + 1e-12), 1e-300)
    scouts = _merge(upper, lower, losses, low, width, _NUM_SCOUTS + 1)
    heavy = np.flatnonzero((scouts.upper > _TAIL) | (scouts.lower > _TAIL))
    low = float(scouts.losses[heavy[0]]) - width
    high = float(scouts.losses[heavy[-1]]) + width
    return _merge(upper, lower, losses, low, (high - low) / _NUM_CELLS, _NUM_CELLS)


@functools.lru_cache(maxsize=8)
def outcomes(
    sampling_probability: float, noise_multiplier: float, num_steps: int
) -> Outcomes:
    """Returns merged outcomes of ``num_steps`` steps."""
    power = _single(sampling_probability, noise_multiplier)
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
    """Returns a lower bound on delta, over both directions."""
    merged = outcomes(sampling_probability, noise_multiplier, num_steps)
    # Rounding: at most 1e-13 of every mass and 1e-14 of every loss, per step.
    margin = 1 - 1e-9 - 1e-13 * num_steps
    shifted = epsilon + 1e-14 * num_steps
    remove = -np.expm1(np.minimum(shifted - merged.losses, 0.0)) @ merged.upper
    add = -np.expm1(np.minimum(shifted + merged.losses, 0.0)) @ merged.lower
    return max(0.0, margin * max(float(remove), float(add)))
