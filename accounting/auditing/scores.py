"""The scores of audits: log-likelihood ratios of canary and ghost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from accounting.auditing.audit_case import Observe, Score
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import dominating_pairs, user_pairs
from accounting.core.pld.dominating_pairs import Step
from accounting.core.samplers import poisson


def known_steps(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score where the example's steps are known.

    Arguments as for `Score.__call__`.
    """
    del means  # others contribute nothing
    # Step t starts at row ceil(t n / T).
    own = positions * plan.steps_per_epoch // plan.num_examples
    pair = dominating_pairs.remove_pair(1.0, noise_multiplier)
    total = np.zeros(())
    for step in range(plan.num_steps):
        takes_part = own == step % plan.steps_per_epoch
        if takes_part.any():
            total = total + np.where(takes_part, pair.loss(observe(step)), 0.0)
    return total


def _independent_steps(
    steps: Callable[[float, float], tuple[Step, ...]],
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score given the pair of a step with the canary first."""
    del positions, means  # every row is alike, and others contribute nothing
    ((_, pair),), *_ = steps(float(plan.sampling_probability), noise_multiplier)
    total = pair.loss(observe(0))
    for step in range(1, plan.num_steps):
        total += pair.loss(observe(step))
    return total


def hidden_group(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score of cyclic Poisson batches, whose groups are uniform.

    Arguments as for `Score.__call__`.
    """
    del positions, means  # every row is alike, and others contribute nothing
    assert plan.bands is not None
    pair = dominating_pairs.remove_pair(
        float(plan.sampling_probability), noise_multiplier
    )
    # A group without steps has the same outputs with and without the canary.
    groups = [np.zeros(()) for _ in range(plan.bands)]
    for step in range(plan.num_steps):
        group = step % plan.bands
        groups[group] = groups[group] + pair.loss(observe(step))
    return functools.reduce(np.logaddexp, groups) - math.log(plan.bands)


#: The score for one example of Poisson batches.
independent_steps: Score = functools.partial(_independent_steps, poisson.steps)


def user_steps(count: int) -> Score:
    """Returns the score for users with ``count`` examples of Poisson batches."""
    return functools.partial(
        _independent_steps, functools.partial(user_pairs.steps, count)
    )


def hidden_step(
    plan: DpSgdPlan,
    noise_multiplier: float,
    observe: Observe,
    positions: np.ndarray,
    means: tuple[float, float],
) -> np.ndarray:
    """Returns the score of shuffles and of balls and bins.

    The canary's step of an epoch is uniform; a persistent shuffle has one for all.
    Arguments as for `Score.__call__`.
    """
    del positions  # every row is alike
    per_epoch = plan.steps_per_epoch
    starts = range(0, plan.num_steps, per_epoch)
    together = plan.num_shuffles == 1
    groups = [list(starts)] if together else [[start] for start in starts]
    total = np.zeros(())
    for group in groups:
        # The sum over k epochs has k times the mean and the variance.
        sums = [
            np.sum([observe(start + step) for start in group], axis=0)
            for step in range(per_epoch)
        ]
        upper, lower = (
            _log_mean_ratio(sums, mean, len(group), noise_multiplier) for mean in means
        )
        total = total + upper - lower
    return total


def _log_mean_ratio(
    sums: list[np.ndarray], mean: float, epochs: int, noise_multiplier: float
) -> np.ndarray:
    """Returns ``ln sum_t exp((mean x_t - epochs mean^2 / 2) / s^2)``."""
    total = np.full(sums[0].shape, -np.inf)
    for observed in sums:
        exponent = (mean * observed - epochs * mean**2 / 2) / noise_multiplier**2
        np.logaddexp(total, exponent, out=total)
    return total
