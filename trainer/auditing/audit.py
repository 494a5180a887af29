"""An audit of a plan and its noise, or of a run: a lower bound on epsilon.

Example:
  >>> from accounting.core.plan import DpSgdPlan
  >>> plan = DpSgdPlan(sampler="poisson", num_examples=400, expected_batch_size=20,
  ...                  num_steps=20)
  >>> settings = AuditSettings(plan=plan, noise_multiplier=1.0, delta=1e-5, trials=200,
  ...                          confidence=1 - 1e-9)
  >>> audit(settings).verdict.violated
  False
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accounting.auditing import audit as claims
from accounting.auditing import joint_tests
from accounting.auditing.audit import Claim
from accounting.auditing.joint_tests import JointVerdict
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from pipelines.core.users.bounded import ROWS, USERS, Bounded
from trainer.auditing import audit_mechanism, audit_training
from trainer.auditing.audit_report import AuditReport, cannot_see, report
from trainer.core.run.run_record import RunRecord
from trainer.run import privacy
from trainer.settings import methods
from trainer.settings.audit_settings import MECHANISM, TRAINER, AuditSettings
from trainer.settings.method_settings import NON_PRIVATE

#: Unit of progress at each level.
COUNTED = {MECHANISM: "trials", TRAINER: "runs"}
#: Called with the unit of progress, the number done, and the total.
Progress = Callable[[str, int, int], None]


def audit(settings: AuditSettings, progress: Progress = lambda *_: None) -> AuditReport:
    """Attacks a mechanism in many trials, and returns the findings.

    Args:
      settings: Settings of the audit.
      progress: As ``Progress``.

    Raises:
      InputError: there is nothing to audit, or a small run was refused.
    """
    look = _audit_mechanism if settings.level == MECHANISM else _audit_trainer
    verdict, notes = look(settings, progress)
    return report(
        settings.level,
        settings.plan,
        verdict,
        notes=notes,
        unseen=cannot_see(settings.level, of_users=settings.is_of_users),
    )


def settings_of_run(
    record: RunRecord,
    manifest: Manifest,
    *,
    delta: float | None = None,
    allow_large_delta: bool = False,
    **others: Any,
) -> AuditSettings:
    """Returns the settings of an audit of a finished run.

    Arguments as for `run_statement`, and further fields of ``AuditSettings``.

    Raises:
      InputError: the run is not private, or its releases are not those of DP-SGD alone.
    """
    audited = methods.with_dp_sgd_accounting()
    if record.method not in (*audited, NON_PRIVATE):
        raise InputError(
            f"Expected method={record.method!r} to be one of {', '.join(audited)}: "
            "only what DP-SGD releases is audited."
        )
    if record.selection:
        raise InputError(
            "Expected one run; this one is the best of several, and its epsilon is "
            "that of a choice among all, which no trial of one run attacks. Name no "
            "RUN, and give its plan and noise by flags: that is the claim of each."
        )
    noise, delta = privacy.check_run(
        record, manifest, delta=delta, allow_large_delta=allow_large_delta
    )
    assert record.l2_norm_clip is not None  # of a private run
    bounded = Bounded.of(manifest.dataset)
    if bounded is not None:
        others["bounded"] = True
        others["neighboring_relation"] = privacy.relation_of(manifest.plan, bounded)
        others["max_examples_per_user"] = bounded.examples_per_user
        if bounded.has_users:
            others["rows_per_record"] = bounded.max_examples_per_user
    return AuditSettings(
        plan=manifest.plan,
        noise_multiplier=noise,
        l2_norm_clip=record.l2_norm_clip,
        delta=delta,
        views=record.model.get("views", 1),
        **others,
    )


def _claim(settings: AuditSettings, plan: DpSgdPlan, count: int) -> Claim:
    """Returns what is claimed of ``plan`` for users with ``count`` examples."""
    claimed = settings.claimed(plan)
    relation = settings.neighboring_relation if claimed == plan else REPLACE_SPECIAL
    return claims.claim(
        claimed, settings.noise_multiplier, settings.delta, count, relation
    )


def _audit_mechanism(
    settings: AuditSettings, progress: Progress
) -> tuple[JointVerdict, list[str]]:
    noise, trials = settings.noise_multiplier, settings.num_trials
    claim = _claim(settings, settings.plan, settings.max_examples_per_user)
    case = audit_mechanism.worst_case(settings.plan, settings.num_canary_rows)
    done = 0

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        progress(COUNTED[MECHANISM], done, trials)

    scores = [
        audit_mechanism.simulate(case, noise, count, real=real, advance=advance)
        for real, count in ((True, trials // 2), (False, trials - trials // 2))
    ]
    evidence = joint_tests.Evidence(
        name=MECHANISM, real=scores[0], ghost=scores[1], slack=case.slack
    )
    verdict = joint_tests.judge(claim, [evidence], confidence=settings.confidence)
    notes = [case.scaled or "nothing is scaled: all steps, examples, noise"]
    rows = settings.rows_per_record or case.canary_rows
    count = settings.max_examples_per_user
    return verdict, [*notes, *_of_users(rows, settings, count)]


def _of_users(rows: int, settings: AuditSettings, count: int) -> list[str]:
    """Returns notes on canaries of ``rows`` rows; the claim allows ``count``."""
    if not settings.is_of_users:
        return []
    if settings.rows_per_record is not None:
        return [f"canaries are users, whose examples hold up to {rows:,} row(s)"]
    return [
        f"canaries are users with {rows:,} row(s); the claim is of users with at most "
        f"{count:,}"
    ]


def _audit_trainer(
    settings: AuditSettings, progress: Progress
) -> tuple[JointVerdict, list[str]]:
    noise, delta = settings.noise_multiplier, settings.delta
    # Before any run is made, which the claim will be for.
    claims.check(noise, delta)
    sampled, rows, count = _small_users(settings)
    views = min(settings.views, audit_training.MOST_ROWS)
    kinds = audit_training.small_runs(
        settings.plan, noise, settings.l2_norm_clip, sampled, rows, views=views
    )
    runs = audit_training.runs(kinds, settings.num_trials)
    outcomes = []
    for number, run in enumerate(runs, start=1):
        outcomes.append(audit_training.carry_out(run))
        progress(COUNTED[TRAINER], number, len(runs))
    plan = next(found.plan for found in outcomes if found.run.has_trials)
    verdict = joint_tests.judge(
        _claim(settings, plan, count),
        audit_training.evidence(outcomes),
        confidence=settings.confidence,
    )
    few = next(found.plan for found in outcomes if not found.run.has_trials)
    note = (
        f"{len(runs)} small runs of dp-sgd, same sampler, noise and clip norm: "
        f"n={plan.num_examples:,}, b={plan.expected_batch_size:,}, "
        f"T={plan.num_steps:,}, of dense and of lazy noise; the claim is that of these "
        f"runs. Few: n={few.num_examples:,}, b={few.expected_batch_size:,}, "
        f"T={few.num_steps:,}, for checks alone, dense with gradients one by one"
    )
    equal = [f"each example has {views} equal views"] * (views > 1)
    return verdict, [note, *equal, *_of_users(rows, settings, count)]


def _small_users(settings: AuditSettings) -> tuple[str | None, int, int]:
    """Returns what small runs sample, rows per user, and k of the claim."""
    if not settings.is_of_users:
        return None, 1, 1
    most = audit_training.MOST_ROWS
    if settings.rows_per_record is not None:
        return USERS, min(settings.rows_per_record, most), 1
    count = min(settings.max_examples_per_user, most)
    # If both are cut, the canary keeps its excess over the claim.
    more = settings.num_canary_rows - settings.max_examples_per_user
    return ROWS, max(1, count + more), count
