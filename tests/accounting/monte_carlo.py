"""Balls and bins by simulation: an independent check, never a claim.

An estimate comes with an upper confidence bound, which fails with the stated
probability: a certificate of another kind than a numerical bound, and looser.

References:
  Chua et al. (2025), arXiv:2412.16802, for the importance sampling and the bound.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from accounting import plan as plans
from accounting.numerics.root_finding import threshold
from accounting.plan import DpSgdPlan
from accounting.validation import InputError, check_float, check_int

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A simulated delta.

    Attributes:
      mean: Unbiased.
      standard_error: Of the mean.
      upper_confidence_bound: At least delta but for the error probability asked for.
    """

    mean: float
    standard_error: float
    upper_confidence_bound: float


def balls_and_bins_delta(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    epsilon: float,
    num_samples: int,
    seed: int,
    error_probability: float = 0.01,
) -> Estimate:
    """Returns an estimate of delta in the remove direction.

    One epoch by importance sampling on the event that some coordinate is large enough
    for a loss above epsilon; several epochs by plain sampling.  ``seed`` is public:
    nothing private is drawn.
    """
    if plan.sampler != plans.BALLS_AND_BINS:
        raise InputError(
            f"Expected sampler={plan.sampler!r} to be 'balls-and-bins' here."
        )
    check_int("num_samples", num_samples, at_least=2)
    check_float("noise_multiplier", noise_multiplier, above=0.0)
    rng = np.random.default_rng(seed)
    steps, scale = plan.steps_per_epoch, 1.0
    low = -math.inf
    if plan.num_epochs == 1:
        low = _threshold(noise_multiplier, steps, epsilon)
        scale = _probability_above(low, noise_multiplier, steps)
    values = []
    rows = max(1, _CHUNK // (steps * plan.num_epochs))
    for start in range(0, num_samples, rows):
        count = min(rows, num_samples - start)
        loss = np.zeros(count)
        for _ in range(plan.num_epochs):
            noise = _noise(rng, count, steps, noise_multiplier, low)
            loss += _loss(noise, noise_multiplier)
        values.append(-np.expm1(np.minimum(epsilon - loss, 0.0)))
    return _estimate(np.concatenate(values), scale, error_probability)


def _threshold(noise: float, steps: int, epsilon: float) -> float:
    # If all of x_1 - 1 and x_k are below it, the loss is below epsilon.
    gain = math.expm1(1 / noise**2) / steps if noise > 0.04 else math.inf
    return 0.5 + noise**2 * (epsilon - math.log1p(gain))


def _probability_above(low: float, noise: float, steps: int) -> float:
    from scipy import special

    return -math.expm1(steps * float(special.log_ndtr(low / noise)))


def _noise(
    rng: np.random.Generator, count: int, steps: int, noise: float, low: float
) -> NDArray[np.float64]:
    """Returns noise of each step, given that the largest is at least ``low``."""
    from scipy import special

    if low == -math.inf:
        return noise * rng.standard_normal((count, steps))
    # The largest by its inverse distribution function, the others below it.
    above = _probability_above(low, noise, steps)
    log_cdf = np.log1p(-above * rng.random(count)) / steps
    largest = special.ndtri_exp(log_cdf)
    draws = special.ndtri_exp(log_cdf[:, None] + np.log(rng.random((count, steps))))
    draws[np.arange(count), rng.integers(steps, size=count)] = largest
    return noise * draws


def _loss(noise_values: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    from scipy import special

    shifted = noise_values / noise**2
    shifted[:, 0] += 1 / noise**2
    steps = noise_values.shape[1]
    return special.logsumexp(shifted, axis=1) - math.log(steps) - 0.5 / noise**2


def _estimate(
    values: NDArray[np.float64], scale: float, error_probability: float
) -> Estimate:
    mean, count = float(values.mean()), len(values)
    needed = -math.log(error_probability) / count
    # The least p with KL(Ber(mean), Ber(p)) >= ln(1/error) / N, from above.
    _, more = threshold(
        lambda more: needed - _divergence(mean, mean + more),
        1 - mean,
        relative=1e-9,
        most=1.0,
    )
    return Estimate(
        mean=scale * mean,
        standard_error=scale * float(values.std()) / math.sqrt(count),
        upper_confidence_bound=scale * min(mean + more, 1.0),
    )


def _divergence(mean: float, other: float) -> float:
    if other >= 1.0:
        return math.inf if mean < 1.0 else 0.0
    value = (1 - mean) * math.log((1 - mean) / (1 - other)) if mean < 1.0 else 0.0
    return value + (mean * math.log(mean / other) if mean > 0.0 else 0.0)
