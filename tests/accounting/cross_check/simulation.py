"""Simulates random allocation: delta of removing an example, with error bars.

Each example is in one uniformly random step of each of E epochs of t steps.  With R the
likelihood ratio of one epoch (``mean of exp((2 x_k - 1) / (2 s^2))``, x ~ N(0, s^2 I)),

    delta(epsilon) = E[(R_1 ... R_E - e^epsilon)+].

Small values are reached by importance sampling.  For an integer order a, R^a is a
mean over all a-tuples of steps, so that the density ``R^a / E[R^a]`` has samples: a
tuple with probability proportional to ``exp(number of pairs that agree / s^2)``, and
then normal values whose mean is the number of times that each step was drawn.  Under it

    delta(epsilon) = m^E E[(R - e^epsilon)+ / R^a],    m = E[R^a],  R = R_1 ... R_E,

where no value exceeds ``m^E e^(-(a-1) epsilon) (1 - 1/a)^(a-1) / a``, a share of the
Chernoff bound.  Hence an empirical Bernstein bound holds without further assumptions,
and the error is relative to delta.

Formal guarantees:
  - the estimate is unbiased, whatever the order.
  - the interval contains delta, except with probability at most ``ERROR_PROBABILITY``
    over ideal random numbers.
  - equal questions have equal answers: the seed is fixed, and part of the answer.

No privacy claim depends on this module.  Public: everything.

References:
  Feldman and Shenfeld (2025), arXiv:2502.08202, for integer moments of random
  allocation; Maurer and Pontil (2009), arXiv:0907.3740, Theorem 4, for the interval.
  Chua et al. (2025), arXiv:2412.16802, sample the largest value instead, which works
  for one epoch.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

#: Seed of every simulation; public.
SEED = 20_250_219
#: Probability that an interval does not contain delta.
ERROR_PROBABILITY = 1e-6
#: Normal values drawn in all, and at a time: a few seconds, some megabytes.
_NUM_VALUES = 80_000_000
_CHUNK = 1 << 21
_MOST_SAMPLES = 400_000
_MOST_ORDER = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAllocation:
    """Each example is in one uniformly random step of each of several epochs.

    Attributes:
      num_steps: Steps of an epoch.
      num_epochs: Independent epochs of the run.
      noise_multiplier: Noise standard deviation of a step over the clip norm.
    """

    num_steps: int
    num_epochs: int
    noise_multiplier: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A simulated delta of removing an example.

    Attributes:
      epsilon: Where delta was estimated.
      mean: Unbiased estimate of delta.
      low: Lower end of the interval, at least 0.
      high: Upper end of the interval.
      num_samples: Number of samples.
    """

    epsilon: float
    mean: float
    low: float
    high: float
    num_samples: int


def estimate(
    allocation: RandomAllocation, epsilon: float, num_values: int | None = None
) -> Estimate:
    """Returns an estimate of delta at ``epsilon``.

    Args:
      allocation: Steps, epochs and noise multiplier; the noise is above 0.
      epsilon: At least 0.
      num_values: Normal values to draw in all: more give a smaller error.
    """
    order = _best_order(allocation, epsilon)
    tuples = _tuples(allocation.noise_multiplier, allocation.num_steps, order)
    per_sample = allocation.num_steps * allocation.num_epochs
    drawn = _NUM_VALUES if num_values is None else num_values
    count = int(np.clip(drawn // per_sample, 100, _MOST_SAMPLES))
    rng = np.random.default_rng(SEED)
    rows = max(1, _CHUNK // allocation.num_steps)
    losses = [
        _losses(rng, allocation, tuples, min(rows, count - start))
        for start in range(0, count, rows)
    ]
    excess = np.maximum(np.concatenate(losses) - epsilon, 0.0)
    # Values over the Chernoff bound, and then over the largest possible value.
    shares = -np.expm1(-excess) * np.exp(-(order - 1) * excess)
    share = (1 - 1 / order) ** (order - 1) / order
    largest = math.exp(_log_chernoff(allocation, order, epsilon)) * share
    return _bounded(shares / share, largest, epsilon)


def deviation(shares: NDArray[np.float64], error: float) -> float:
    """Returns by how much a mean may exceed its expectation: the Bernstein bound.

    Args:
      shares: Independent values in [0, 1].
      error: Probability that it exceeds it by more.
    """
    count, needed = len(shares), math.log(2 / error)
    width = math.sqrt(2 * float(shares.var(ddof=1)) * needed / count)
    return width + 7 * needed / (3 * (count - 1))


def _bounded(shares: NDArray[np.float64], largest: float, epsilon: float) -> Estimate:
    """Returns the estimate of values ``shares * largest``, with shares in [0, 1]."""
    count, mean = len(shares), float(shares.mean())
    # Each end of the interval fails with half of the error probability.
    width = deviation(shares, ERROR_PROBABILITY / 2)
    return Estimate(
        epsilon=epsilon,
        mean=mean * largest,
        low=max(0.0, mean - width) * largest,
        high=min(1.0, (mean + width) * largest),
        num_samples=count,
    )


@dataclasses.dataclass(frozen=True)
class _Tuples:
    """Tuples of steps with weights ``exp(pairs that agree / s^2)``.

    Attributes:
      order: a, length of a tuple.
      log_sums: Shape (a + 1, a + 1).  Entry [i, j]: logarithm of the sum of weights of
        all j-tuples of the steps without i of them, over j!.
      log_weights: Shape (a + 1,).  Entry b: logarithm of the weight of a step that was
        drawn b times, over b!.
    """

    order: int
    log_sums: NDArray[np.float64]
    log_weights: NDArray[np.float64]


def _best_order(allocation: RandomAllocation, epsilon: float) -> int:
    """Returns the order with the least Chernoff bound; it affects only the error."""
    return min(
        range(1, _MOST_ORDER + 1),
        key=lambda order: _log_chernoff(allocation, order, epsilon),
    )


def _log_chernoff(allocation: RandomAllocation, order: int, epsilon: float) -> float:
    log_sums = _sums(allocation.noise_multiplier, allocation.num_steps)
    log_moment = float(log_sums[order]) + math.lgamma(order + 1)
    log_moment -= order * math.log(allocation.num_steps)
    return allocation.num_epochs * log_moment - (order - 1) * epsilon


def _log_weights(noise: float, order: int) -> NDArray[np.float64]:
    counts = np.arange(order + 1)
    weights: NDArray[np.float64] = counts * (counts - 1) / (2 * noise**2)
    return weights - special.gammaln(counts + 1)


@functools.lru_cache(maxsize=16)
def _sums(noise: float, num_steps: int) -> NDArray[np.float64]:
    return _power(_log_weights(noise, _MOST_ORDER), num_steps)


def _tuples(noise: float, num_steps: int, order: int) -> _Tuples:
    log_weights = _log_weights(noise, order)
    left = [max(num_steps - used, 0) for used in range(order + 1)]
    sums = [_power(log_weights, steps) for steps in left]
    return _Tuples(order, np.array(sums), log_weights)


def _power(log_series: NDArray[np.float64], exponent: int) -> NDArray[np.float64]:
    """Returns the log-coefficients of a power of a series, given its own."""
    result = np.full(len(log_series), -np.inf)
    result[0] = 0.0
    base = log_series
    while exponent:
        if exponent & 1:
            result = _product(result, base)
        base = _product(base, base)
        exponent >>= 1
    return result


def _product(
    left: NDArray[np.float64], right: NDArray[np.float64]
) -> NDArray[np.float64]:
    places = np.subtract.outer(np.arange(len(left)), np.arange(len(left)))
    terms = np.where(places >= 0, left + right[places], -np.inf)
    product: NDArray[np.float64] = special.logsumexp(terms, axis=1)
    return product


def _losses(
    rng: np.random.Generator, allocation: RandomAllocation, tuples: _Tuples, count: int
) -> NDArray[np.float64]:
    """Returns ``ln R_1 + ... + ln R_E`` of ``count`` samples under the tilt."""
    noise, steps = allocation.noise_multiplier, allocation.num_steps
    total = np.zeros(count)
    for _ in range(allocation.num_epochs):
        # The steps are exchangeable, so the drawn ones may come first.
        drawn = _occupation(rng, tuples, count)[:, :steps]
        values = rng.standard_normal((count, steps))
        values *= 1 / noise
        values[:, : drawn.shape[1]] += drawn / noise**2
        values -= 0.5 / noise**2
        total += special.logsumexp(values, axis=1) - math.log(steps)
    return total


def _occupation(
    rng: np.random.Generator, tuples: _Tuples, count: int
) -> NDArray[np.int64]:
    """Returns how often each of the drawn steps is in a tuple, shape (count, a).

    The first step of the tuple is there b times in all with probability proportional to
    ``(weight of b) / (b - 1)! (sum over the other steps)``; the rest is a tuple of the
    other steps.
    """
    order = tuples.order
    left = np.full(count, order)
    found = np.zeros((count, order), np.int64)
    for used in range(order):
        for remaining in np.unique(left[left > 0]):
            rows = np.flatnonzero(left == remaining)
            times = np.arange(1, remaining + 1)
            logs = tuples.log_weights[times] + np.log(times)
            logs = logs + tuples.log_sums[used + 1, remaining - times]
            chances = np.exp(logs - special.logsumexp(logs))
            picked = rng.choice(times, size=len(rows), p=chances / chances.sum())
            found[rows, used] = picked
        left = left - found[:, used]
    return found
