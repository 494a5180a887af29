"""Plans in one line, and delta of them from both sides."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution

from accounting import lower_bounds
from accounting.core import accountant
from accounting.core.intervals import Bounds
from accounting.core.plan import DpSgdPlan


def make_plan(
    sampler: str,
    num_examples: int,
    batch_size: int,
    num_steps: int,
    *,
    epochs: int = 1,
    cap: int | None = None,
    bands: int | None = None,
) -> DpSgdPlan:
    """Returns a plan.

    Args:
      sampler: Name of a registered sampler.
      num_examples: n.
      batch_size: Expected examples of a step.
      num_steps: T.
      epochs: Rounds of ``num_steps / epochs`` steps each.
      cap: Most examples of a step, of truncated batches.
      bands: Groups of examples, of cyclic batches.
    """
    return DpSgdPlan(
        sampler=sampler,
        num_examples=num_examples,
        expected_batch_size=batch_size,
        num_steps=num_steps,
        num_epochs=epochs,
        truncated_batch_size=cap,
        bands=bands,
    )


def delta_bounds(
    plan: DpSgdPlan, *, noise_multiplier: float, epsilon: float, **unit: Any
) -> Bounds:
    """Returns bounds on delta of Poisson batches, truncated or not, from both sides.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      epsilon: At least 0.
      **unit: Relation and privacy unit, as of `accountant.delta`.
    """
    asked = {"noise_multiplier": noise_multiplier, "epsilon": epsilon, **unit}
    found = accountant.delta(plan, **asked)
    if found.lower is not None:
        return found
    lower = lower_bounds.delta_of(plan, **asked)
    return dataclasses.replace(found, lower=lower)


def composed(
    pair: tuple[np.ndarray, np.ndarray],
    num_steps: int,
    delta: float,
    interval: float = 1e-4,
) -> tuple[float, float]:
    """Returns dp_accounting's epsilon of steps of a pair, from below and from above.

    Args:
      pair: Masses of both members in the same cells, each of shape (cells,).
      num_steps: T.
      delta: In (0, 1).
      interval: Spacing of its grid of losses.
    """
    kept = (pair[0] > 1e-300) & (pair[1] > 1e-300)
    logs = [dict(enumerate(np.log(member[kept]))) for member in pair]
    below, above = (
        max(
            privacy_loss_distribution.from_two_probability_mass_functions(
                *members,
                pessimistic_estimate=upwards,
                value_discretization_interval=interval,
            )
            .self_compose(num_steps)
            .get_epsilon_for_delta(delta)
            for members in (logs, logs[::-1])
        )
        for upwards in (False, True)
    )
    return below, above
