"""Lower bounds on delta and epsilon of Poisson and truncated Poisson batches.

They take a second, prove no privacy, and show how tight the guarantees are.

*Truncated batches*: take a data set whose other gradients are zero, so that dropping
another row has no effect.  A step's sum is N(J, s^2), where J is the number of the
user's rows that are sampled and kept.  If i of them are sampled beside m other rows,
J = i, or a hypergeometric number if i + m > B.  Steps are independent.  The
probabilities of J > 0 are rounded down by one common factor, and improbable draws count
as keeping no row.  So J becomes stochastically smaller, which lowers both hockey-stick
divergences, by the theorem of `dominating_pairs`.

*Composition* of T steps of two mixtures of Gaussians.  The outcomes of a step are
merged into cells, whose masses under both mixtures are exact.  That is post-processing
and can only lower the hockey-stick divergence, which is the mean of a convex function
of the likelihood ratio; the error is of second order in the width of the cells.
`lower_delta_of_sum` composes the steps as `inversion` does, and subtracts every error
of the inversion.

*Smoothing* adds ``E[h(S - x)]`` with ``h(y) = E[(1 - e^-(y + Z))+] - (1 - e^-y)+``, the
time value of an option: the integral over u up to v of half the normal density of mean
-u/2 and variance u at y.  That is ``e^(-y / 2 - u / 8)`` times the density n_u of mean
0.  The integral of ``n_u / 2`` is at most ``v n_v``, so h is at most ``v e^(v / 8)``
times the density of Z at -y, and smoothing adds at most ``v e^(v / 8)`` times the
density of S + Z at x.  *Wrapping* is bounded by Chernoff's bound.  `of_sum` subtracts
both.

Example:
  >>> plan = DpSgdPlan(
  ...     sampler="poisson", num_examples=60_000, expected_batch_size=600,
  ...     num_steps=1000, num_epochs=10)
  >>> found = epsilon(plan, noise_multiplier=1.1, delta=1e-5)
  >>> round(found.lower, 2), round(found.guarantee, 2)
  (1.52, 1.52)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from accounting.core import accountant, sampler_registry
from accounting.core.intervals import Bounds
from accounting.core.neighboring_relation import REPLACE_ONE, REPLACE_SPECIAL
from accounting.core.numerics import (
    LEAST_NOISE,
    MOST_NOISE,
    TOLERANCE,
    log_ratio,
    threshold,
)
from accounting.core.plan import POISSON, TRUNCATED_POISSON, DpSgdPlan
from accounting.core.pld import dominating_pairs, inversion
from accounting.core.pld.dominating_pairs import Atoms, normal_masses
from accounting.core.pld.inversion import Contour, LaplaceSum
from accounting.core.pld.privacy_profile import FINE, inverted
from accounting.core.samplers.poisson import OF_EXAMPLE, OF_REPLACED, of_user

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
    _, *weights = dominating_pairs.weights(count, sampling_probability)
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
      means: Means of the components, in deviations of the noise; the first is 0.
      weights: Weights of the other components.
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
    found = (lower_delta_of_sum(one, num_steps, shifted) for one in both)
    return max(0.0, margin * max(found))


# -- the sum of the losses of all steps ------------------------------------------------


def lower_delta_of_sum(loss: Atoms, num_steps: int, epsilon: float) -> float:
    """Returns a lower bound on delta of a sum of independent losses.

    Args:
      loss: Finite loss of one step, dominated by the exact one.
      num_steps: T.
      epsilon: At least 0.
    """
    focus = inversion.focus(loss, num_steps, epsilon)
    low, high = focus.ends
    # Small losses are omitted.  Large ones are split as if any sum with one of them
    # exceeded epsilon; the probability that one does not is subtracted.
    split = loss.clipped(-math.inf, high)
    kept = split.losses >= low
    left_out = float(split.masses[~kept].sum())
    infinite = split.infinite_mass
    below = Atoms(split.masses[kept], split.losses[kept], infinite + left_out)
    total = inverted(focus, FINE, lambda cost, fineness: below)
    wrapping = wrapped(below, num_steps, total.contour, epsilon)
    ever = -math.expm1(num_steps * math.log1p(-infinite)) * (1 - left_out) ** num_steps
    not_above = num_steps * infinite * _falls(below, num_steps - 1, epsilon - high)
    certain = ever * (2 - total.slack) - not_above
    return max(0.0, of_sum(total, epsilon, wrapping) + certain)


def _falls(loss: Atoms, num_steps: int, most: float) -> float:
    """Returns a Chernoff bound on the probability that a sum is at most ``most``."""
    deviation = math.sqrt(max(num_steps, 1) * loss.cumulants(0.0)[2])
    rates = [factor / max(deviation, 1e-100) for factor in (0.5, 1.0, 2.0, 4.0, 8.0)]
    exponents = [num_steps * loss.tilted(-rate)[1] + rate * most for rate in rates]
    return math.exp(min(*exponents, 0.0))


def of_sum(total: LaplaceSum, epsilon: float, wrapping: float) -> float:
    """Returns a lower bound on delta, if the exact loss dominates that of the sum.

    Args:
      total: The sum.
      epsilon: At least 0.
      wrapping: Bound on the wrapping error, as returned by `wrapped`.
    """
    variance = total.contour.variance
    density = max(total.density(epsilon), 0.0) + total.density_error
    added = variance * math.exp(variance / 8) * density
    mean = total.mean(epsilon) - total.error - added - wrapping
    if mean <= 0.0:
        return 0.0
    exponent = total.log_chernoff(epsilon) + math.log(mean)
    return math.exp(min(exponent, 0.0)) * (2 - total.slack)


def wrapped(loss: Atoms, num_steps: int, contour: Contour, epsilon: float) -> float:
    """Returns a bound on the wrapping error: all terms of k != 0.

    It is relative to Chernoff's bound, as `LaplaceSum.mean` is.
    ``E_r[e^(-r X) (1 - e^-X)+]`` is at most ``E_r[e^(h X)]`` for any h >= -r, here with
    X = S - epsilon - k W.

    Args:
      loss: Loss of one step.
      num_steps: T.
      contour: Contour of the inversion; r and W matter.
      epsilon: At least 0.
    """
    order, period = contour.order, contour.period
    log_moment, _, variance = loss.cumulants(order)
    scale = 1 / max(math.sqrt(num_steps * variance), 1e-100)

    def share(rate: float) -> float:
        moment = num_steps * (loss.tilted(order + rate)[1] - log_moment)
        exponent = moment - rate * epsilon - abs(rate) * period
        return math.exp(min(exponent, 700.0)) / -math.expm1(-abs(rate) * period)

    rates = (scale * np.geomspace(0.2, 60.0, 25)).tolist()
    above = min(share(rate) for rate in rates)
    return above + min(share(-min(rate, order)) for rate in (*rates, order))


#: Largest epsilon that a search tries.
_LARGEST_EPSILON = 2.0**60


def largest_insufficient_noise(
    log_excess: Callable[[float], float],
    guess: float,
    *,
    stride: float = 1.5,
) -> float:
    """Returns the largest noise multiplier with ``log_excess > 0``, rounded down.

    If ``log_excess`` is of a lower bound on delta, no noise multiplier up to the one
    returned meets the target, since less noise is never more private.

    Args:
      log_excess: Noise multiplier -> ``ln(delta / target)``; it need not be exactly
        monotone.
      guess: Noise multiplier at which the search starts.
      stride: First factor by which the search moves away from ``guess``.

    Returns:
      0 if the target is met without noise.
    """
    return threshold(
        log_excess, guess,
        relative=TOLERANCE, stride=stride, least=LEAST_NOISE, most=MOST_NOISE,
    )[0]  # fmt: skip


def lower_epsilon(lower: Callable[[float], float], upper: float, delta: float) -> float:
    """Returns the largest epsilon with ``lower(epsilon) > delta``, rounded down, or 0.

    Args:
      lower: Epsilon -> a lower bound on delta.
      upper: An upper bound on epsilon at ``delta``, where the search starts; may be
        infinite.
      delta: In (0, 1).
    """
    low, high = threshold(
        lambda epsilon: log_ratio(lower(epsilon), delta),
        upper if math.isfinite(upper) else 1.0,
        relative=1e-5,
        most=_LARGEST_EPSILON,
    )
    # ``lower`` was evaluated at the lower end and exceeds delta there.
    return high if math.isinf(high) else low


METHOD = "merged outcomes of the Poisson-subsampled Gaussian"
REPLACE_METHOD = "merged outcomes of the Poisson-subsampled pair of opposites"
USER_METHOD = "merged outcomes of the mixture of Gaussians for a user's rows"
#: Relative error of the probabilities, by which they are reduced.
_ROUNDING = 1e-9
#: Numbers of other rows beyond this many deviations count as keeping no row.
_DEVIATIONS = 12
#: So does a number of the user's own rows that is less probable than this.
_LEAST_CHANCE = 1e-30


def delta_of(
    plan: DpSgdPlan, noise_multiplier: float, epsilon: float, **unit: Any
) -> float:
    """Returns a lower bound on delta of Poisson batches, truncated or not.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      epsilon: At least 0.
      **unit: Relation and privacy unit, as for `accountant.delta`.

    Raises:
      InputError: the batches are not Poisson batches, truncated or not.
    """
    found, least_noise, _ = _pair(plan, **unit)
    if noise_multiplier == 0.0:
        # Participation is visible.
        never = plan.num_steps * math.log1p(-sum(one.upper for one in found))
        return -math.expm1(never) * (1 - 1e-9)
    if noise_multiplier < least_noise or not any(one.upper for one in found):
        return 0.0
    return lower_delta(found, noise_multiplier, plan.num_steps, epsilon)


def _pair(
    plan: DpSgdPlan,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> tuple[tuple[Component, ...], float, str]:
    """Returns the pair of one step, the least noise of its bound, and its theorem."""
    count = max_examples_per_user
    of_batches = OF_EXAMPLE if count == 1 else of_user(count)
    method = METHOD if count == 1 else USER_METHOD
    if plan.sampler == TRUNCATED_POISSON:
        found = kept_rows(plan, count)
        one, several = " at the probability of being kept", ", as many as are kept"
        method += one if count == 1 else several
    elif plan.sampler != POISSON:
        sampler_registry.refuse(
            plan.sampler, "a lower bound", "Ask the accountant for the upper one."
        )
    elif neighboring_relation == REPLACE_ONE:
        found, of_batches, method = replaced(rate(plan)), OF_REPLACED, REPLACE_METHOD
    else:
        found = rows(rate(plan), count)
    return found, of_batches.least_noise, method


def rate(plan: DpSgdPlan) -> float:
    """Returns the sampling probability, rounded down, which is more private.

    The probabilities of keeping rows rise with it.
    """
    return math.nextafter(float(plan.sampling_probability), 0.0)


@functools.lru_cache(maxsize=8)
def kept_rows(plan: DpSgdPlan, count: int) -> tuple[Component, ...]:
    """Returns the pair of one step.

    Args:
      plan: A plan with a cap B.
      count: k, number of rows of the user; at most ``plan.num_examples``.
    """
    size = plan.truncated_batch_size
    assert size is not None
    probability = rate(plan)
    others = max(plan.num_examples - count, 0)
    mean = others * probability
    reach = _DEVIATIONS * math.sqrt(mean) + _DEVIATIONS**2
    sampled = np.arange(max(0, int(mean - reach)), min(others, int(mean + reach)) + 1)
    chances = stats.binom.pmf(sampled, others, probability)
    kept = np.zeros(count + 1)
    for own in range(1, count + 1):
        own_chance = float(stats.binom.pmf(own, count, probability))
        if own_chance < _LEAST_CHANCE:
            continue
        fits = sampled + own <= size
        kept[own] += own_chance * float(chances[fits].sum())
        for number in range(1, own + 1):
            share = stats.hypergeom.pmf(number, sampled[~fits] + own, own, size)
            kept[number] += own_chance * float(chances[~fits] @ share)
    return tuple(
        Component(float(number), float(kept[number]) * (1 - _ROUNDING), 0.0)
        for number in range(1, count + 1)
    )


def epsilon(
    plan: DpSgdPlan, *, noise_multiplier: float, delta: float, **unit: Any
) -> Bounds:
    """Returns the accountant's bounds on epsilon, with a lower one if it has none.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: In (0, 1).
      **unit: Relation and privacy unit, as for `accountant.epsilon`.

    Raises:
      InputError: as for the accountant, or the sampler has no lower bounds.
    """
    asked = {"noise_multiplier": noise_multiplier, **unit}
    found = accountant.epsilon(plan, delta=delta, **asked)
    if found.lower is not None:
        return found
    method = _pair(plan, **unit)[2]
    lower = lower_epsilon(
        lambda point: delta_of(plan, epsilon=point, **asked), found.guarantee, delta
    )
    return dataclasses.replace(found, lower=lower, lower_method=method)
