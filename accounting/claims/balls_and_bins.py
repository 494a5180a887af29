"""Balls and bins: each example is in one uniformly random step of each epoch.

The assignment is drawn anew in each epoch.  Under the zero-out relation, one epoch of t
steps is tightly dominated by ``P = mean over k of N(e_k, s^2 I_t)`` against
``Q = N(0, s^2 I_t)`` and by its reverse; epochs are independent.  Both directions are
bounded from above and from below, numerically and without sampling: `random_allocation`
encloses the likelihood ratio of one epoch, and `privacy_profile` composes the epochs.

Under add-or-remove the pair is the same.  Proof: the number of steps is the plan's, for
both data sets.  Every example draws its steps by itself, from the same law whatever the
other examples are.  So without x the others have the steps that they have beside its
ghost, in law, and the ghost contributes zero: both data sets without x release the
same.  (After a shuffle, or in the order of the data, one example less moves others to
other steps.)

Formal guarantees:
  - ``lower <= upper``, and the true value lies between them.
  - ``upper`` never exceeds the bound that reveals the steps of the example.

References:
  Chua et al. (2025), arXiv:2412.16802, for the pair and the events of the simple lower
  bound; Feldman and Shenfeld (2025, 2026), arXiv:2502.08202 and arXiv:2602.17284.
"""

from __future__ import annotations

import dataclasses

from accounting import lower_bounds
from accounting.claims import random_allocation, shuffle
from accounting.claims.random_allocation import Direction
from accounting.core import sampler_registry
from accounting.core.intervals import Bounds, NoiseBounds, below, least
from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE, REPLACE_SPECIAL
from accounting.core.numerics import TOLERANCE, log_ratio, smallest_noise_in_two
from accounting.core.plan import DpSgdPlan
from accounting.core.samplers import deterministic
from accounting.lower_bounds import (
    largest_insufficient_noise,
    lower_epsilon,
)

METHOD = "balls and bins, numerical (Chua et al. 2025; Feldman and Shenfeld 2026)"
CLOSED_METHOD = shuffle.UPPER_METHOD
#: Mean of an example's step with the example, and with its ghost.
_MEANS = (1.0, 0.0)
#: At less noise, closed forms are used: the logarithm of a likelihood ratio has a range
#: of hundreds, and all positive ratios together may have less mass than is kept.
_LEAST_NOISE = 0.06
#: More noise counts as this much, which is never more private: ratios have no digits.
_MOST_NOISE = 1e8


def directions(
    plan: DpSgdPlan,
    noise_multiplier: float,
    upper: bool,
    num_cells: int = random_allocation.NUM_CELLS,
) -> tuple[Direction, Direction]:
    """Returns the losses of one epoch in the remove and in the add direction.

    Args:
      plan: A plan of balls and bins.
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
      upper: True for an upper bound on delta, False for a lower one.
      num_cells: Number of grid cells of the likelihood ratios.
    """
    noise = min(noise_multiplier, _MOST_NOISE)
    return random_allocation.directions(noise, plan.steps_per_epoch, upper, num_cells)


def _lower_delta(direction: Direction, count: int, epsilon: float) -> float:
    margin = 1 - count * direction.relative_error
    if margin <= 0:
        return 0.0
    if count == 1:
        # Values have the same relative error as masses: use a slightly larger epsilon.
        return direction.delta(epsilon + direction.relative_error) * margin
    return margin * lower_bounds.lower_delta_of_sum(direction.atoms, count, epsilon)


def _is_numerical(plan: DpSgdPlan, noise_multiplier: float) -> bool:
    return plan.steps_per_epoch > 1 and noise_multiplier >= _LEAST_NOISE


def upper_delta(
    plan: DpSgdPlan,
    noise_multiplier: float,
    epsilon: float,
    num_cells: int = random_allocation.NUM_CELLS,
) -> Bounds:
    """Returns an upper bound on delta at ``epsilon``.

    Args:
      plan: A plan of balls and bins.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      epsilon: At least 0.
      num_cells: Number of grid cells of the likelihood ratios, as for `directions`.
    """
    options = [
        (deterministic.delta(plan, noise_multiplier, epsilon).guarantee, CLOSED_METHOD)
    ]
    if _is_numerical(plan, noise_multiplier):
        both = directions(plan, noise_multiplier, True, num_cells)
        value = max(
            random_allocation.upper_delta(one, plan.num_epochs, epsilon) for one in both
        )
        options.insert(0, (value, METHOD))
    return least(*options)


def lower_delta(
    plan: DpSgdPlan,
    noise_multiplier: float,
    epsilon: float,
    num_cells: int = random_allocation.NUM_CELLS,
) -> float:
    """Returns a lower bound on delta at ``epsilon``.

    Args:
      plan: A plan of balls and bins.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      epsilon: At least 0.
      num_cells: Number of grid cells of the likelihood ratios, as for `directions`.
    """
    steps, epochs = plan.steps_per_epoch, plan.num_epochs
    if steps == 1 or noise_multiplier == 0.0:
        return deterministic.delta(plan, noise_multiplier, epsilon).lower or 0.0
    options = [0.0]
    if epochs == 1:
        options.append(shuffle.event_delta(noise_multiplier, steps, epsilon, _MEANS))
    if _is_numerical(plan, noise_multiplier) and noise_multiplier <= _MOST_NOISE:
        both = directions(plan, noise_multiplier, False, num_cells)
        options += [_lower_delta(one, epochs, epsilon) for one in both]
    return max(options)


def delta(plan: DpSgdPlan, noise_multiplier: float, epsilon: float) -> Bounds:
    """Returns bounds on delta at ``epsilon``.

    Args:
      plan: A plan of balls and bins.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      epsilon: At least 0.
    """
    found = upper_delta(plan, noise_multiplier, epsilon)
    lower = below(lower_delta(plan, noise_multiplier, epsilon), found.guarantee)
    return dataclasses.replace(found, lower=lower, lower_method=METHOD)


def epsilon(plan: DpSgdPlan, noise_multiplier: float, delta: float) -> Bounds:
    """Returns bounds on epsilon at ``delta``.

    Args:
      plan: A plan of balls and bins.
      noise_multiplier: Noise standard deviation over the clip norm, at least 0.
      delta: In (0, 1).
    """
    closed = deterministic.epsilon(plan, noise_multiplier, delta).guarantee
    options = [(closed, CLOSED_METHOD)]
    if _is_numerical(plan, noise_multiplier):
        both = directions(plan, noise_multiplier, True)
        value = max(
            random_allocation.upper_epsilon(one, plan.num_epochs, delta) for one in both
        )
        options.insert(0, (value, METHOD))
    found = least(*options)
    lower = lower_epsilon(
        lambda point: lower_delta(plan, noise_multiplier, point),
        found.guarantee,
        delta,
    )
    return dataclasses.replace(found, lower=lower, lower_method=METHOD)


def noise_multiplier(plan: DpSgdPlan, epsilon: float, delta: float) -> NoiseBounds:
    """Returns bounds on the noise multiplier that ``(epsilon, delta)`` needs.

    Args:
      plan: A plan of balls and bins.
      epsilon: At least 0.
      delta: In (0, 1).
    """
    exact = deterministic.noise_multiplier(plan, epsilon, delta)
    closed = exact.guarantee
    if plan.steps_per_epoch == 1:
        return dataclasses.replace(exact, method=CLOSED_METHOD)
    sufficient = smallest_noise_in_two(
        lambda noise, cells: upper_delta(plan, noise, epsilon, int(cells)).guarantee,
        target=delta,
        guess=closed / 2,
        coarse=random_allocation.COARSE_CELLS,
        fine=random_allocation.NUM_CELLS,
    )
    sufficient = min(sufficient, closed)
    # The bounds nearly meet: the next number to try is usually the answer.
    necessary = sufficient * (1 - TOLERANCE)
    if lower_delta(plan, necessary, epsilon) <= delta:
        necessary = largest_insufficient_noise(
            lambda noise: log_ratio(lower_delta(plan, noise, epsilon), delta),
            sufficient / 1.0005,
            stride=1.001,
        )
    return NoiseBounds(
        sufficient=sufficient,
        necessary=min(necessary, sufficient),
        method=METHOD,
        necessary_method=METHOD,
    )


_WORDING = sampler_registry.Wording(
    sampling="balls and bins, each example in one uniformly random step of each epoch",
    discretization=(
        "sums of likelihood ratios spread or merged on geometric grids; epochs by a "
        "tilted Fourier transform"
    ),
)
_ZERO_OUT = sampler_registry.Sampler(
    epsilon=epsilon,
    delta=delta,
    noise_multiplier=noise_multiplier,
    closed_form=False,
    relations=(REPLACE_SPECIAL, ADD_OR_REMOVE_ONE),
    wording=_WORDING,
    claims={METHOD: "random allocation"},
)
SAMPLER = dataclasses.replace(
    _ZERO_OUT,
    under={
        ADD_OR_REMOVE_ONE: dataclasses.replace(
            _ZERO_OUT,
            wording=dataclasses.replace(
                _WORDING,
                num_examples="num_examples is an approximation that is public and "
                "independent of the data: it fixes the number of steps alone",
            ),
        )
    },
)
