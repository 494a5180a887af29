"""Plans in one line, and delta of them from both sides."""

from __future__ import annotations

import dataclasses
from typing import Any

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
