"""The report of ``dpsgd audit``, as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from accounting.auditing import audit
from accounting.auditing.audit import Verdict
from accounting.core.intervals import delta_text, lower_text, upper_text
from accounting.core.plan import DpSgdPlan
from trainer.report.report import Report, Table
from trainer.settings.audit_settings import AuditSettings

MEANING = (
    "A lower bound is a fact about this mechanism on its worst-case data; no better "
    "proof can go below it. Its absence proves nothing: privacy comes from the "
    "accountant's upper bound, and an audit looks for faults in code or claim."
)


_SEVERAL_ROWS = "several rows of one person"
#: Faults that an audit cannot see, whatever the number of trials.
CANNOT_SEE = (
    "faults of training: clipping, padding, physical batches, lazy noise, optimizers "
    "and models",
    "faults of the batch job: files, engines, several machines",
    "examples whose steps depend on other examples, since there is one canary",
    "keys that others know or that two runs share, and a weak random generator",
    "what leaves by other ways than weights: files, messages, logs, timing",
    _SEVERAL_ROWS,
)


def cannot_see(*, of_users: bool) -> tuple[str, ...]:
    """Returns the faults that an audit cannot see.

    Args:
      of_users: Whether canaries are users with all of their rows.
    """
    return tuple(
        fault for fault in CANNOT_SEE if not (of_users and fault == _SEVERAL_ROWS)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport(Report):
    """The report of one audit.

    Attributes:
      verdict: The findings.
    """

    verdict: Verdict


def report(
    settings: AuditSettings,
    verdict: Verdict,
    *,
    notes: Sequence[str],
    unseen: Sequence[str],
) -> AuditReport:
    """Returns the report of one audit.

    Args:
      settings: Settings of the audit.
      verdict: The findings.
      notes: Notes on scaling.
      unseen: Faults that this audit cannot see.
    """
    title = f"{settings.plan.sampler} batches"
    above = _above(title, settings.plan, verdict)
    return AuditReport(
        title=title,
        above=[*above, *(f"scale: {one}" for one in notes)],
        tables=[_trials(verdict)],
        notes=[
            f"verdict: {verdict.text}",
            "An audit cannot see:",
            *(f"  - {fault}" for fault in unseen),
            MEANING,
        ],
        fields={
            "audited": settings.plan.to_json(),
            "confidence": settings.confidence,
            "notes": list(notes),
            "meaning": MEANING,
            "cannot_see": list(unseen),
            **verdict.to_json(),
        },
        verdict=verdict,
    )


def _above(title: str, plan: DpSgdPlan, verdict: Verdict) -> list[str]:
    claim = verdict.claim
    return [
        f"{title}: n={plan.num_examples:,}, b={plan.expected_batch_size:,}, "
        f"T={plan.num_steps:,}, {plan.epochs_in_words}, noise multiplier "
        f"{claim.noise_multiplier:.6g}",
        f"claimed, by the accounting of {claim.plan.sampler}: epsilon <= "
        f"{upper_text(claim.epsilon)} at delta {claim.delta!r}",
    ]


def _trials(verdict: Verdict) -> Table:
    sure = [audit.percent(found.confidence) for found in verdict.findings]
    return Table(
        title=f"{verdict.trials:,} trials",
        headings=["found, with confidence", *sure, "claimed"],
        rows=_rows(verdict),
    )


def _rows(verdict: Verdict) -> list[list[str]]:
    claim, findings = verdict.claim, verdict.findings
    last = findings[-1]
    return [
        [
            f"epsilon at delta {claim.delta!r}",
            *(f">= {lower_text(found.epsilon_lower_bound)}" for found in findings),
            f"<= {upper_text(claim.epsilon)}",
        ],
        [
            f"delta at epsilon {last.other_epsilon!r}",
            *(f">= {delta_text(one.other_delta, math.floor)}" for one in findings),
            f"<= {delta_text(last.other_delta_claimed, math.ceil)}",
        ],
    ]
