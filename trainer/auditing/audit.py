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
from accounting.auditing.audit import Claim, Verdict
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Manifest
from pipelines.core.users.bounded import Bounded
from trainer.auditing import audit_mechanism
from trainer.auditing.audit_report import AuditReport, cannot_see, report
from trainer.core.run.run_record import RunRecord
from trainer.run import privacy
from trainer.settings import methods
from trainer.settings.audit_settings import AuditSettings
from trainer.settings.method_settings import NON_PRIVATE

#: Unit of progress.
COUNTED = "trials"
#: Called with the unit of progress, the number done, and the total.
Progress = Callable[[str, int, int], None]


def audit(settings: AuditSettings, progress: Progress = lambda *_: None) -> AuditReport:
    """Attacks a mechanism in many trials, and returns the findings.

    Args:
      settings: Settings of the audit.
      progress: As ``Progress``.

    Raises:
      InputError: there is nothing to audit.
    """
    verdict, notes = _attack(settings, progress)
    unseen = cannot_see(of_users=settings.is_of_users)
    return report(settings, verdict, notes=notes, unseen=unseen)


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
        delta=delta,
        **others,
    )


def _claim(settings: AuditSettings) -> Claim:
    """Returns what is claimed of the audited plan."""
    claimed = settings.claimed
    relation = settings.neighboring_relation
    return claims.claim(
        claimed,
        settings.noise_multiplier,
        settings.delta,
        settings.max_examples_per_user,
        relation if claimed == settings.plan else REPLACE_SPECIAL,
    )


def _attack(settings: AuditSettings, progress: Progress) -> tuple[Verdict, list[str]]:
    """Returns the verdict of all trials, and notes on scaling."""
    noise, trials = settings.noise_multiplier, settings.num_trials
    claim = _claim(settings)
    case = audit_mechanism.worst_case(settings.plan, settings.num_canary_rows)
    done = 0

    def advance(amount: int) -> None:
        nonlocal done
        done += amount
        progress(COUNTED, done, trials)

    real, ghost = (
        audit_mechanism.simulate(case, noise, count, real=real, advance=advance)
        for real, count in ((True, trials // 2), (False, trials - trials // 2))
    )
    verdict = claims.judge(
        claim, real, ghost, confidence=settings.confidence, slack=case.slack
    )
    notes = [case.scaled or "nothing is scaled: all steps, examples, noise"]
    return verdict, [*notes, *_of_users(settings, case.canary_rows)]


def _of_users(settings: AuditSettings, rows: int) -> list[str]:
    """Returns notes on canaries of ``rows`` rows."""
    if not settings.is_of_users:
        return []
    if settings.rows_per_record is not None:
        rows = settings.rows_per_record
        return [f"canaries are users, whose examples hold up to {rows:,} row(s)"]
    return [
        f"canaries are users with {rows:,} row(s); the claim is of users with at most "
        f"{settings.max_examples_per_user:,}"
    ]
