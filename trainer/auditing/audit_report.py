"""The report of ``dpsgd audit``, as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from accounting.auditing import audit
from accounting.auditing.audit import Verdict
from accounting.auditing.joint_tests import JointVerdict, Judged
from accounting.auditing.residuals import Check
from accounting.core.intervals import delta_text, lower_text, upper_text
from accounting.core.plan import DpSgdPlan
from trainer.report.report import Report, Table
from trainer.settings.audit_settings import MECHANISM, TRAINER

MEANING = (
    "A lower bound is a fact about this mechanism on its worst-case data; no better "
    "proof can go below it. Its absence proves nothing: privacy comes from the "
    "accountant's upper bound, and an audit looks for faults in code or claim."
)


_SEVERAL_ROWS = "several rows of one person"
#: Faults that an audit of each level cannot see, whatever the number of trials.
CANNOT_SEE = {
    MECHANISM: (
        "faults of training: clipping, padding, physical batches, lazy noise, "
        "optimizers and models; --level trainer looks at some of them",
        "faults of the batch job: files, engines, several machines",
        "examples whose steps depend on other examples, since there is one canary",
        "keys that others know or that two runs share, and a weak random generator",
        "what leaves by other ways than weights: files, messages, logs, timing",
        _SEVERAL_ROWS,
    ),
    TRAINER: (
        "faults that only other models, losses, optimizers, methods, averages or code "
        "of yours meet: linear models are trained by dp-sgd with plain SGD",
        "faults that only long, large or resumed runs meet, or other engines and "
        "several machines",
        "faults rarer than one in the number of trials, or smaller than the spread of "
        "what is found",
        "batches that were sampled in another way, where trials are too few to tell",
        "keys that others know or that two runs share, and a weak random generator",
        "what leaves by other ways than weights: files, messages, logs, timing",
        "what the rounding of floating point gives away",
        _SEVERAL_ROWS,
    ),
}


def cannot_see(level: str, *, of_users: bool) -> tuple[str, ...]:
    """Returns the faults that an audit cannot see.

    Args:
      level: One of ``LEVELS``.
      of_users: Whether canaries are users with all of their rows.
    """
    return tuple(
        fault
        for fault in CANNOT_SEE[level]
        if not (of_users and fault == _SEVERAL_ROWS)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport(Report):
    """The report of one audit.

    Attributes:
      verdict: The findings.
    """

    verdict: JointVerdict


def report(
    level: str,
    audited: DpSgdPlan,
    verdict: JointVerdict,
    *,
    notes: Sequence[str],
    unseen: Sequence[str],
) -> AuditReport:
    """Returns the report of one audit.

    Args:
      level: "mechanism" or "trainer".
      audited: Plan by which the batches are really made.
      verdict: The findings.
      notes: Notes on scaling.
      unseen: Faults that this audit cannot see.
    """
    judged = [one for one in verdict.judged if one.checks]
    title = f"{audited.sampler} batches, {level} level"
    trials = [
        _trials(
            one.verdict,
            "" if one.name == level else f", {one.name} noise",
        )
        for one in verdict.judged
        if one.verdict is not None
    ]
    return AuditReport(
        title=title,
        above=[*_above(title, audited, verdict), *(f"scale: {one}" for one in notes)],
        tables=[*trials, *([_checks(judged, verdict)] if judged else [])],
        notes=[
            f"verdict: {verdict.text}",
            "An audit of this kind cannot see:",
            *(f"  - {fault}" for fault in unseen),
            MEANING,
        ],
        fields={
            "level": level,
            "audited": audited.to_json(),
            "notes": list(notes),
            "meaning": MEANING,
            "cannot_see": list(unseen),
            **verdict.to_json(),
        },
        verdict=verdict,
    )


def _above(title: str, plan: DpSgdPlan, verdict: JointVerdict) -> list[str]:
    claim = verdict.claim
    return [
        f"{title}: n={plan.num_examples:,}, b={plan.expected_batch_size:,}, "
        f"T={plan.num_steps:,}, {plan.epochs_in_words}, noise multiplier "
        f"{claim.noise_multiplier:.6g}",
        f"claimed, by the accounting of {claim.plan.sampler}: epsilon <= "
        f"{upper_text(claim.epsilon)} at delta {claim.delta!r}",
    ]


def _trials(verdict: Verdict, kind: str) -> Table:
    sure = [audit.percent(found.confidence) for found in verdict.findings]
    return Table(
        title=f"{verdict.trials:,} trials{kind}",
        headings=["found, with confidence", *sure, "claimed"],
        rows=_rows(verdict),
    )


def _checks(judged: Sequence[Judged], verdict: JointVerdict) -> Table:
    rows = []
    # Further runs of a kind repeat the names of its checks.
    for name in dict.fromkeys(check.name for check in judged[0].checks):
        cells = [_cell(_worst(one, name), one.contradicted) for one in judged]
        rows.append([name, *cells, f"{_worst(judged[0], name).expected:g}"])
    return Table(
        title="releases, less what their batches hold",
        headings=[
            "farthest from what is claimed",
            *(one.name for one in judged),
            "claimed",
        ],
        rows=rows,
        notes=[
            "Noise in units of the claimed deviation, canaries in clip norms. ! = "
            f"refuted; {audit.percent(verdict.confidence)} is for all trials and "
            "checks together."
        ],
    )


def _worst(judged: Judged, name: str) -> Check:
    found = [check for check in judged.checks if check.name == name]
    return min(found, key=lambda check: check.p_value)


def _cell(check: Check, contradicted: Sequence[Check]) -> str:
    return f"{'! ' if check in contradicted else ''}{check.worst:.3g}"


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
