"""Shuffled batches: a proven upper bound, and a lower bound on any epsilon.

A shuffle, independent of the data, assigns every example to one step of each epoch.  If
the shuffle is revealed, each use of an example is one Gaussian mechanism, so the upper
bound of deterministic batches holds.  `null_clones` proves another bound, for a fresh
shuffle in every epoch and for one that is repeated, and the smaller one is used.  Only
the number of shuffles counts: in one epoch both samplers have the same bounds.  The
bound of Poisson subsampling does not hold: where it is smaller, the lower bounds below
refute it.

Lower bounds come from a data set in which all other gradients are opposite to that of
the differing example.  In one epoch of T steps, in units of the clip norm and relative
to the other examples,

    P = mean over t of N(2 e_t, s^2 I),     Q = mean over t of N(e_t, s^2 I).

The events ``max_t x_t > c``, whose probabilities are closed forms, give
``delta >= P(event) - e^epsilon Q(event)`` for every c.  For a shuffle that is repeated
in E epochs, replace s by ``s / sqrt(E)``.  For a fresh shuffle in every epoch, the
maxima of the epochs are independent: each is discretised into intervals, and the
likelihood ratios are composed numerically, rounded down.

References:
  Chua et al. (2024), arXiv:2411.04205, Theorems 3.5 (persistent) and 3.8 (dynamic);
  Chua et al. (2024), arXiv:2403.17673, for the events.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accounting import lower_bounds
from accounting.claims import null_clones
from accounting.core import sampler_registry
from accounting.core.intervals import Bounds, NoiseBounds, below, least
from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE, REPLACE_SPECIAL
from accounting.core.numerics import TOLERANCE, log_ratio
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import dominating_pairs
from accounting.core.pld.dominating_pairs import Atoms
from accounting.core.samplers import deterministic
from accounting.lower_bounds import (
    largest_insufficient_noise,
    lower_epsilon,
)

UPPER_METHOD = "each use of an example is a Gaussian mechanism: the order is revealed"
CLONES_METHOD = "null clones of the example's step (accounting.claims.null_clones)"
PERSISTENT_METHOD = "persistent shuffling (Chua et al. 2024, Theorem 3.5)"
DYNAMIC_METHOD = "dynamic shuffling (Chua et al. 2024, Theorem 3.8)"
#: Mean of the differing example's step under P, and under Q.
MEANS = (2.0, 1.0)
#: Relative error of probabilities, which is subtracted from lower bounds.
_RELATIVE_ERROR = 1e-12


def largest_log_cdf(
    points: NDArray[np.float64], mean: float, noise: float, steps: int
) -> NDArray[np.float64]:
    """Returns ``ln Pr[max_t x_t <= point]`` for independent normal x_t.

    Args:
      points: Points at which the distribution function is evaluated, shape (n,).
      mean: Mean of one x_t; the others have mean 0.
      noise: Standard deviation of each x_t.
      steps: Number of x_t.
    """
    shifted = special.log_ndtr((points - mean) / noise)
    return shifted + (steps - 1) * special.log_ndtr(points / noise)


def event_delta(
    noise: float, steps: int, epsilon: float, means: tuple[float, float]
) -> float:
    """Returns the largest ``P(event) - e^epsilon Q(event)`` found, rounded down.

    Args:
      noise: Noise standard deviation in clip norms, above 0.
      steps: Number of steps of one epoch.
      epsilon: At least 0.
      means: Mean of the differing example's step under P, and under Q.
    """
    low, high = -10 * noise, means[0] + 40 * noise
    best = 0.0
    for _ in range(6):
        points = np.linspace(low, high, 501)
        upper = -np.expm1(largest_log_cdf(points, means[0], noise, steps))
        lower = -np.expm1(largest_log_cdf(points, means[1], noise, steps))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            scaled = np.exp(np.minimum(epsilon + np.log(lower), 700.0))
        values = upper * (1 - _RELATIVE_ERROR) - scaled * (1 + _RELATIVE_ERROR)
        # With an underflowed Q, 0 times e^epsilon would be no bound.
        values = np.where(lower > 1e-290, values, 0.0)
        largest = int(np.argmax(values))
        best = max(best, float(values[largest]))
        low, high = points[max(largest - 1, 0)], points[min(largest + 1, 500)]
    return best


def composed_delta(
    noise: float,
    steps: int,
    num_epochs: int,
    epsilon: float,
    means: tuple[float, float],
) -> float:
    """Returns a lower bound on delta of independent epochs.

    Args:
      noise: Noise standard deviation in clip norms, above 0.
      steps: Number of steps of one epoch.
      num_epochs: Number of epochs.
      epsilon: At least 0.
      means: Mean of the differing example's step under P, and under Q.
    """
    masses, losses = _slices(noise, steps, num_epochs, means)
    if not len(masses):
        return 0.0
    # The reduction of the losses exceeds the relative error of the ratio of two masses.
    loss = Atoms(masses, losses - 1e-9)
    return lower_bounds.lower_delta_of_sum(loss, num_epochs, epsilon) * (1 - 1e-8)


def _slices(
    noise: float, steps: int, num_epochs: int, means: tuple[float, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns masses under P and losses of intervals of the maximum of one epoch.

    Discretising the maximum is post-processing, so any intervals give a lower bound.
    """
    tail = math.exp(-45.0) / num_epochs
    low = noise * float(special.ndtri_exp(math.log(tail) / steps))
    high = means[0] - noise * float(special.ndtri(tail / steps))
    count = int(min(max((high - low) / (2e-3 * noise**2), 2000), 50_000))
    points = np.concatenate(([-np.inf], np.linspace(low, high, count), [np.inf]))
    masses = []
    for mean in means:
        log_cdf = largest_log_cdf(points, mean, noise, steps)
        # Differences of the smaller tail, which do not cancel.
        below, above = np.diff(np.exp(log_cdf)), -np.diff(-np.expm1(log_cdf))
        masses.append(np.where(log_cdf[1:] < -0.7, below, above))
    upper, lower = masses
    kept = (upper > 1e-40) & (lower > 1e-40)
    # Ignoring events outside the kept intervals leaves a lower bound.
    return upper[kept], np.log(upper[kept] / lower[kept])


def lower_delta(plan: DpSgdPlan, noise_multiplier: float, epsilon: float) -> float:
    """Returns a lower bound on delta at ``epsilon``.

    Args:
      plan: A plan of shuffled batches.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      epsilon: At least 0.
    """
    if noise_multiplier == 0.0:
        return 1.0
    steps, epochs = plan.steps_per_epoch, plan.num_epochs
    effective = noise_multiplier / math.sqrt(epochs)
    if steps == 1:
        return dominating_pairs.gaussian_delta(effective, epsilon, upper=False)
    if plan.num_shuffles == 1:
        return event_delta(effective, steps, epsilon, MEANS)
    # More epochs are never more private: a single epoch gives a bound, too.
    return max(
        event_delta(noise_multiplier, steps, epsilon, MEANS),
        composed_delta(noise_multiplier, steps, epochs, epsilon, MEANS),
    )


def _visits(plan: DpSgdPlan) -> int:
    """Returns the largest number of epochs that follow the same order."""
    return -(-plan.num_epochs // plan.num_shuffles)


def _clones(plan: DpSgdPlan, noise_multiplier: float) -> null_clones.Shuffles | None:
    """Returns the plan for `null_clones`; None if the theorem does not cover it."""
    found = null_clones.Shuffles(
        steps=plan.steps_per_epoch,
        orders=plan.num_shuffles,
        examples=plan.num_examples,
        noise=noise_multiplier / math.sqrt(_visits(plan)) * (1 - 1e-15),
    )
    return found if null_clones.applies(found) else None


def _delta(
    plan: DpSgdPlan, noise_multiplier: float, epsilon: float, *, lower_method: str
) -> Bounds:
    revealed = deterministic.delta(plan, noise_multiplier, epsilon).guarantee
    options = [(revealed, UPPER_METHOD)]
    if (run := _clones(plan, noise_multiplier)) is not None:
        options.append((null_clones.delta(run, epsilon), CLONES_METHOD))
    found = least(*options)
    lower = lower_delta(plan, noise_multiplier, epsilon)
    return dataclasses.replace(
        found, lower=below(lower, found.guarantee), lower_method=lower_method
    )


def _upper_epsilon(plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
    revealed = deterministic.epsilon(plan, noise_multiplier, delta).guarantee
    options = [(revealed, UPPER_METHOD)]
    if (run := _clones(plan, noise_multiplier)) is not None:
        options.append((null_clones.epsilon(run, delta, revealed), CLONES_METHOD))
    return least(*options)


def _epsilon(
    plan: DpSgdPlan, noise_multiplier: float, delta: float, *, lower_method: str
) -> Bounds:
    found = _upper_epsilon(plan, noise_multiplier, delta)
    lower = lower_epsilon(
        lambda point: lower_delta(plan, noise_multiplier, point), found.guarantee, delta
    )
    return dataclasses.replace(found, lower=lower, lower_method=lower_method)


def _noise_multiplier(
    plan: DpSgdPlan, epsilon: float, delta: float, *, lower_method: str
) -> NoiseBounds:
    revealed = deterministic.noise_multiplier(plan, epsilon, delta).guarantee
    options = [(revealed, UPPER_METHOD)]
    if (run := _clones(plan, revealed)) is not None:
        hidden = null_clones.noise_multiplier(run, epsilon, delta)
        hidden *= math.sqrt(_visits(plan)) * (1 + 1e-14)
        options.append((hidden, CLONES_METHOD))
    sufficient, method = min(options)
    # Epsilon is computed with another h; it must not exceed the target.
    stride = TOLERANCE / 4
    while (
        method == CLONES_METHOD
        and _upper_epsilon(plan, sufficient, delta).guarantee > epsilon
    ):
        sufficient, stride = sufficient * (1 + stride), 2 * stride
    return NoiseBounds(
        sufficient=sufficient,
        necessary=necessary_noise(plan, epsilon, delta, sufficient),
        method=method,
        necessary_method=lower_method,
    )


def necessary_noise(
    plan: DpSgdPlan, epsilon: float, delta: float, sufficient: float
) -> float:
    """Returns a necessary noise multiplier, from `lower_delta`.

    Args:
      plan: A plan of shuffled batches.
      epsilon: At least 0.
      delta: In (0, 1).
      sufficient: A sufficient noise multiplier.
    """
    found = largest_insufficient_noise(
        lambda noise: log_ratio(lower_delta(plan, noise, epsilon), delta),
        sufficient / 1.1,
    )
    return min(found, sufficient)


_DISCRETIZATION = (
    "for the upper bound, sums of likelihood ratios spread on geometric grids; for the "
    "lower, slices of the largest coordinate with losses rounded down; epochs by a "
    "tilted Fourier transform"
)


def _sampler(lower_method: str, sampling: str) -> sampler_registry.Sampler:
    return sampler_registry.Sampler(
        epsilon=functools.partial(_epsilon, lower_method=lower_method),
        delta=functools.partial(_delta, lower_method=lower_method),
        noise_multiplier=functools.partial(
            _noise_multiplier, lower_method=lower_method
        ),
        closed_form=False,
        relations=(REPLACE_SPECIAL,),
        refusals={ADD_OR_REMOVE_ONE: deterministic.MOVES_OTHERS},
        # With the order revealed.
        gaussian_dp=deterministic.gaussian_dp,
        wording=sampler_registry.Wording(
            sampling=sampling, discretization=_DISCRETIZATION
        ),
        claims={CLONES_METHOD: "null clones"},
    )


PERSISTENT = _sampler(
    PERSISTENT_METHOD,
    sampling="batches of one shuffle, repeated in every epoch",
)
DYNAMIC = _sampler(
    DYNAMIC_METHOD,
    sampling="batches of a fresh shuffle in every epoch",
)
