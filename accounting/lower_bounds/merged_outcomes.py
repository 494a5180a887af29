"""A lower bound on delta for T steps of two mixtures of Gaussians.

The outcomes of a step are merged into cells, whose masses under both mixtures are
exact.  That is post-processing and can only lower the hockey-stick divergence, which is
the mean of a convex function of the likelihood ratio; the error is of second order in
the width of the cells.  `composition.lower_delta` composes the steps, and subtracts
every error of that.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting.core.pld import user_pairs
from accounting.core.pld.gaussian import normal_masses
from accounting.core.pld.loss_distribution import Atoms
from accounting.lower_bounds import composition

#: Width of a cell, in standard deviations of the noise.
_WIDTH = 0.01
#: Largest mass of P or of Q outside the cells, per side: events outside are ignored.
_TAIL = 1e-20
#: More than the rounding error of a sum of weights.
_UNIT = 1e-14
#: Weight of components that are left out: far below any delta.
_LEAST_WEIGHT = 1e-30


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


def rows(sampling_probability: float, count: int) -> tuple[Component, ...]:
    """Returns the pair of rows that are present in P and absent from Q.

    Args:
      sampling_probability: q, in (0, 1).
      count: Number of the rows.
    """
    _, *weights = user_pairs.weights(count, sampling_probability)
    return tuple(Component(n, weight, 0.0) for n, weight in enumerate(weights, 1))


def replaced(sampling_probability: float) -> tuple[Component, ...]:
    """Returns the pair of an example that is replaced by its opposite."""
    rate = sampling_probability
    return Component(1.0, rate, 0.0), Component(-1.0, 0.0, rate)


@functools.lru_cache(maxsize=8)
def merged(components: tuple[Component, ...], noise: float) -> tuple[Atoms, Atoms]:
    """Returns the losses of P against Q, and of Q against P, of merged outcomes.

    Args:
      components: Components of the pair of one step.
      noise: Noise standard deviation over the clip norm, above 0.
    """
    # What is less probable counts as the component at 0, which lowers both divergences.
    components = tuple(
        one for one in components if one.upper + one.lower > _LEAST_WEIGHT
    )
    reach = -float(special.ndtri(_TAIL / 4))
    means = np.array([0.0, *(one.mean for one in components)]) / noise
    ends = float(means.min()) - reach, float(means.max()) + reach
    points = np.linspace(*ends, math.ceil((ends[1] - ends[0]) / _WIDTH) + 1)
    cells = np.array([normal_masses(points - mean) for mean in means])
    usual = (cells > 1e-290).all(axis=0)
    centre, *shifted = cells[:, usual]
    sides = [one.upper for one in components], [one.lower for one in components]
    upper, lower = (_rest(weights) * centre for weights in sides)
    excess = np.zeros_like(centre)
    for one, masses in zip(components, shifted, strict=True):
        upper += one.upper * masses
        lower += one.lower * masses
        excess += (one.upper - one.lower) * (masses - centre)
    # From the difference of the masses, which rounding would hide at a small rate.
    small = np.log1p(np.maximum(excess / lower, -0.5))
    losses = np.where(excess < -0.5 * lower, np.log(upper / lower), small)
    far = [_log_mixture(points, means, weights)[~usual] for weights in sides]
    difference, error = far[0] - far[1], 1e-14 * (np.abs(far[0]) + np.abs(far[1]))
    return (
        Atoms(
            np.concatenate((lower * np.exp(losses), np.exp(far[0]))),
            np.concatenate((losses, difference - error)),
        ),
        Atoms(
            np.concatenate((lower, np.exp(far[1]))),
            np.concatenate((-losses, -difference - error)),
        ),
    )


def _rest(weights: list[float]) -> float:
    """Returns the weight of the component at 0, rounded up where it is all rounding."""
    return max(1 - sum(weights), _UNIT)


def _log_mixture(
    points: NDArray[np.float64], means: NDArray[np.float64], weights: list[float]
) -> NDArray[np.float64]:
    """Returns logarithms of masses between points, where masses may underflow.

    Args:
      points: Increasing, shape (n,).
      means: Of the components, in deviations, the first one at 0.
      weights: Of the other components.
    """
    found = []
    for mean, weight in zip(means, [_rest(weights), *weights], strict=True):
        if weight > 0.0:
            # On the side of the mean where the mass is no difference from 1.
            low, high = points[:-1] - mean, points[1:] - mean
            mirrored = low + high > 0
            low, high = np.where(mirrored, -high, low), np.where(mirrored, -low, high)
            end, start = special.log_ndtr(high), special.log_ndtr(low)
            found.append(math.log(weight) + end + np.log(-np.expm1(start - end)))
    return np.asarray(special.logsumexp(found, axis=0))


def lower_delta(
    components: tuple[Component, ...],
    noise_multiplier: float,
    num_steps: int,
    epsilon: float,
) -> float:
    """Returns a lower bound on delta, over both directions.

    Args:
      components: Components of the pair of one step.
      noise_multiplier: Above 0.
      num_steps: T.
      epsilon: At least 0.
    """
    # Rounding error per step: at most 1e-13 of every mass and 1e-14 of every loss.
    margin = 1 - 1e-9 - 1e-13 * num_steps
    shifted = epsilon + 1e-14 * num_steps
    both = merged(components, noise_multiplier)
    found = (composition.lower_delta(one, num_steps, shifted) for one in both)
    return max(0.0, margin * max(found))
