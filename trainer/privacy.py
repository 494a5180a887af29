"""The privacy of a run, asked of ``accounting`` with what was executed.

This is the only module of the trainer that calls the accountant.
"""

from __future__ import annotations

import functools
from typing import Any

from accounting import bounds, statement
from accounting.plan import DpSgdPlan
from accounting.validation import InputError
from pipelines.manifest import Manifest
from trainer.method_settings import NON_PRIVATE, gradients_text
from trainer.run_record import RunRecord, check_execution


def noise_multiplier(plan: DpSgdPlan, *, epsilon: float, delta: float) -> float:
    """Returns a noise multiplier with which ``plan`` is (epsilon, delta)-private.

    Raises:
      InputError: nothing is proven for the plan's sampler, or no noise suffices.
    """
    return bounds.noise_multiplier(plan, epsilon=epsilon, delta=delta).guarantee


@functools.lru_cache
def plan_statement(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    l2_norm_clip: float | None,
    delta: float,
    gradients: str = statement.DP_SGD_GRADIENTS,
) -> Any:
    """Returns the privacy statement of a run that executes ``plan``.

    Kept for each question: a run asks before its first step and after its last.
    """
    return statement.privacy_statement(
        plan,
        noise_multiplier=noise_multiplier,
        l2_norm_clip=l2_norm_clip,
        delta=delta,
        gradients=gradients,
    )


def run_statement(record: RunRecord, manifest: Manifest, *, delta: float | None) -> Any:
    """Returns the privacy statement of a run that executed its plan.

    Args:
      record: What was executed.
      manifest: Of the batches.
      delta: The delta to state; the record's if None.

    Raises:
      InputError: the run is not private, not complete, or of other batches.
    """
    if record.method == NON_PRIVATE:
        raise InputError(
            "Expected method='non-private' to be a private one: the run has no clip "
            "and no noise, and no epsilon is stated for it."
        )
    check_execution(record, manifest)
    delta = delta if delta is not None else record.target_delta
    if delta is None:
        raise InputError("Expected --delta; the run was trained without one.")
    assert record.noise_multiplier is not None  # checked by the record
    return plan_statement(
        manifest.plan,
        noise_multiplier=record.noise_multiplier,
        l2_norm_clip=record.l2_norm_clip,
        delta=delta,
        gradients=gradients_text(record.method, record.method_settings),
    )
