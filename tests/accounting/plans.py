"""Plans in one line."""

from __future__ import annotations

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
