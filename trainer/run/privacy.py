"""The privacy of a run, asked of ``accounting`` with what was executed.

What a run says of its own privacy comes from here.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accounting import accountant, deltas, statement
from accounting.plan import DpSgdPlan
from accounting.validation import InputError
from pipelines.batches.manifest import Manifest, pretty_json, write_atomically
from trainer.run.run_record import (
    PRIVACY_NAME,
    PRIVACY_TEXT_NAME,
    RunRecord,
    check_execution,
)
from trainer.settings import method_settings
from trainer.settings.method_settings import (
    MIXED_ITERATES,
    NON_PRIVATE,
    gradients_text,
)

if TYPE_CHECKING:
    from accounting.model_mix.theorem import Mixing

_NOT_PRIVATE = (
    "This run is not private: gradients were not clipped and no noise was added. "
    "No epsilon can be stated."
)
_NO_DELTA = (
    "No epsilon is stated, since no delta was given. "
    "`dpsgd account RUN --delta D` states one."
)


def mixing_of(
    method: str, described: Mapping[str, Any], l2_norm_clip: float | None
) -> Mixing | None:
    """Returns how a method mixes iterates; None if it does not.

    Args:
      method: A registered one.
      described: What ``MethodSettings.describe_method`` returns for it.
      l2_norm_clip: Bound on the L2 norm of one example's gradient.

    Raises:
      InputError: the method does not say how it is accounted for.
    """
    if method_settings.released_by(method) != MIXED_ITERATES:
        return None
    from accounting.model_mix.theorem import Mixing

    assert l2_norm_clip is not None  # checked by settings and record
    return Mixing(l2_norm_clip=l2_norm_clip, **described)


def check_sampler(method: str, plan: DpSgdPlan) -> None:
    """Accepts a plan for which the method's accounting is known.

    Args:
      method: A registered one.
      plan: Of its batches.

    Raises:
      InputError: another sampler.
    """
    if method_settings.get(method).releases == MIXED_ITERATES:
        from accounting.model_mix import theorem

        theorem.check_sampler(plan)


def noise_multiplier(
    plan: DpSgdPlan, *, epsilon: float, delta: float, mixing: Mixing | None = None
) -> float:
    """Returns a noise multiplier with which ``plan`` is (epsilon, delta)-private.

    Raises:
      InputError: nothing is proven for the plan's sampler, or no noise suffices.
    """
    if mixing is not None:
        from accounting.model_mix import theorem

        return theorem.noise_multiplier(
            plan, mixing, epsilon=epsilon, delta=delta
        ).guarantee
    return accountant.noise_multiplier(plan, epsilon=epsilon, delta=delta).guarantee


@functools.lru_cache
def plan_statement(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    l2_norm_clip: float | None,
    delta: float,
    gradients: str = statement.DP_SGD_GRADIENTS,
    mixing: Mixing | None = None,
    allow_large_delta: bool = False,
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
        mixing=mixing,
        allow_large_delta=allow_large_delta,
    )


def check_run(
    record: RunRecord,
    manifest: Manifest,
    *,
    delta: float | None,
    allow_large_delta: bool = False,
) -> tuple[float, float]:
    """Returns noise multiplier and delta of a private run that executed its plan.

    Args:
      record: What was executed.
      manifest: Of the batches.
      delta: The delta to state; the record's if None.
      allow_large_delta: Whether one that protects next to nothing is meant.

    Raises:
      InputError: the run is not private, not complete, or of other batches, or there
        is no delta.
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
    deltas.check(delta, allow_large=allow_large_delta)
    assert record.noise_multiplier is not None  # checked by the record
    return record.noise_multiplier, delta


def run_statement(
    record: RunRecord,
    manifest: Manifest,
    *,
    delta: float | None,
    allow_large_delta: bool = False,
) -> Any:
    """Returns the privacy statement of a run, with the arguments of ``check_run``.

    Raises:
      InputError: ``check_run`` refuses the run.
    """
    noise_multiplier, delta = check_run(
        record, manifest, delta=delta, allow_large_delta=allow_large_delta
    )
    return plan_statement(
        manifest.plan,
        noise_multiplier=noise_multiplier,
        l2_norm_clip=record.l2_norm_clip,
        delta=delta,
        gradients=gradients_text(record.method, record.method_settings),
        mixing=mixing_of_run(record),
        allow_large_delta=allow_large_delta,
    )


def write_statement(
    run: pathlib.Path,
    record: RunRecord,
    manifest: Manifest,
    *,
    allow_large_delta: bool = False,
) -> tuple[str, dict[str, Any]]:
    """Writes the privacy statement of a run into its folder, or why it has none.

    Args:
      run: The folder.
      record: What was executed.
      manifest: Of the batches.
      allow_large_delta: Whether a delta that protects next to nothing is meant.

    Returns:
      What was written: for people, and as JSON.

    Raises:
      InputError: ``check_run`` refuses the run.
    """
    if record.method == NON_PRIVATE:
        text = _NOT_PRIVATE
        fields: dict[str, Any] = {"private": False, "reason": text}
    elif record.target_delta is None:
        text, fields = _NO_DELTA, {"epsilon": None, "reason": _NO_DELTA}
    else:
        found = run_statement(
            record, manifest, delta=None, allow_large_delta=allow_large_delta
        )
        text, fields = found.to_text(), found.to_json()
    write_atomically(run / PRIVACY_NAME, pretty_json(fields))
    data = text.rstrip("\n").encode() + b"\n"
    write_atomically(run / PRIVACY_TEXT_NAME, data)
    return text, fields


def mixing_of_run(record: RunRecord) -> Mixing | None:
    """Returns how the iterates of a run were mixed, if ModelMix's theorem is about it.

    What else a run does to iterates may depend on coefficients that the theorem hides;
    then the bound of DP-SGD is left, for which they are randomness like any other.
    """
    name, aggregated = record.optimizer.get("name"), "train_over" in record.optimizer
    if name != "sgd" or aggregated:
        return None
    return mixing_of(record.method, record.method_settings, record.l2_norm_clip)
