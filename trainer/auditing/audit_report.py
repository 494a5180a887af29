"""The report of ``dpsgd audit``, as text and as JSON."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from accounting.auditing import audit, noise_bounds
from accounting.auditing.audit import Verdict
from accounting.auditing.joint_tests import JointVerdict, Judged
from accounting.auditing.noise_bounds import EffectiveNoise
from accounting.auditing.residuals import Check
from accounting.intervals import lower_text, upper_text
from accounting.plan import DpSgdPlan
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
class Report:
    """One audit.

    Attributes:
      level: "mechanism" or "trainer".
      audited: Plan by which the batches are really made.
      verdict: The findings.
      notes: Notes on scaling.
      cannot_see: Faults that this audit cannot see.
    """

    level: str
    audited: DpSgdPlan
    verdict: JointVerdict
    notes: Sequence[str]
    cannot_see: Sequence[str]

    @property
    def title(self) -> str:
        """What was audited, in words."""
        return f"{self.audited.sampler} batches, {self.level} level"

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        fields = self.verdict.to_json()
        for run, judged in zip(fields["runs"], self.verdict.judged, strict=True):
            if judged.verdict is not None:
                run["if_batches_are_as_claimed"] = self._noise_fields(judged.verdict)
        return {
            "level": self.level,
            "audited": self.audited.to_json(),
            "notes": list(self.notes),
            "meaning": MEANING,
            "cannot_see": list(self.cannot_see),
            **fields,
            "if_batches_are_as_claimed": self._noise_fields(self.verdict.closest),
        }

    def print(self) -> None:
        """Prints the report."""
        plan, claim = self.audited, self.verdict.claim
        click.echo(
            f"{self.title}: n={plan.num_examples:,}, b={plan.expected_batch_size:,}, "
            f"T={plan.num_steps:,}, {plan.epochs_in_words}, noise multiplier "
            f"{claim.noise_multiplier:.6g}\n"
            f"claimed, by the accounting of {claim.plan.sampler}: epsilon <= "
            f"{upper_text(claim.epsilon)} at delta {claim.delta!r}"
        )
        for note in self.notes:
            click.echo(f"scale: {note}")
        for judged in self.verdict.judged:
            if judged.verdict is not None:
                self._print_trials(judged.name, judged.verdict)
        self._print_footnotes()
        if any(judged.checks for judged in self.verdict.judged):
            self._print_checks()
        click.echo(f"verdict: {self.verdict.text}")
        click.echo("An audit of this kind cannot see:")
        for fault in self.cannot_see:
            click.echo(f"  - {fault}")
        click.echo(MEANING)

    @functools.cached_property
    def _honest(self) -> bool:
        # Only if batches are made as claimed does a bound on epsilon bound the noise.
        return self.verdict.claim.plan.sampler == self.audited.sampler

    def _noise(self, verdict: Verdict) -> list[EffectiveNoise]:
        if not self._honest:
            return []
        return noise_bounds.effective_noise(verdict.claim, verdict.findings)

    def _noise_fields(self, verdict: Verdict) -> list[dict[str, Any]]:
        return [dataclasses.asdict(found) for found in self._noise(verdict)]

    def _print_trials(self, name: str, verdict: Verdict) -> None:
        kind = "" if name == self.level else f", {name} noise"
        table = Table(title=f"{verdict.trials:,} trials{kind}")
        table.add_column("found, with confidence", no_wrap=True)
        for found in verdict.findings:
            table.add_column(audit.percent(found.confidence), justify="right")
        table.add_column("claimed", justify="right")
        for row in _rows(verdict, self._noise(verdict)):
            table.add_row(*row)
        Console().print(table)

    def _print_footnotes(self) -> None:
        click.echo("The verdict is of the first two lines, which assume nothing.")
        if self._honest:
            click.echo(
                "*  if batches are made as claimed, and only the noise may differ; "
                "epsilon is the accountant's for that noise"
            )
        click.echo(
            "** if errors trade off as those of two Gaussians, as they do for "
            "deterministic batches alone"
        )

    def _print_checks(self) -> None:
        judged = [one for one in self.verdict.judged if one.checks]
        table = Table(title="releases, less what their batches hold")
        table.add_column("farthest from what is claimed")
        for one in judged:
            table.add_column(one.name, justify="right")
        table.add_column("claimed", justify="right")
        # Further runs of a kind repeat the names of its checks.
        for name in dict.fromkeys(check.name for check in judged[0].checks):
            expected = _worst(judged[0], name).expected
            cells = [_cell(_worst(one, name), one.contradicted) for one in judged]
            table.add_row(name, *cells, f"{expected:g}")
        Console().print(table)
        sure = audit.percent(self.verdict.confidence)
        click.echo(
            f"Noise in units of the claimed deviation, canaries in clip norms. ! = "
            f"refuted; {sure} is for all trials and checks together."
        )


def _worst(judged: Judged, name: str) -> Check:
    found = [check for check in judged.checks if check.name == name]
    return min(found, key=lambda check: check.p_value)


def _cell(check: Check, contradicted: Sequence[Check]) -> str:
    return f"{'! ' if check in contradicted else ''}{check.worst:.3g}"


def _rows(verdict: Verdict, effective: list[EffectiveNoise]) -> list[list[str]]:
    claim, findings = verdict.claim, verdict.findings
    last = findings[-1]
    rows = [
        [
            f"epsilon at delta {claim.delta:.3g}",
            *(f">= {lower_text(found.epsilon_lower_bound)}" for found in findings),
            f"<= {upper_text(claim.epsilon)}",
        ],
        [
            f"delta at epsilon {last.other_epsilon:.4f}",
            *(f">= {found.other_delta:.3g}" for found in findings),
            f"<= {last.other_delta_claimed:.3g}",
        ],
    ]
    if effective:
        noises = [found.noise_multiplier for found in effective]
        rows += [
            [
                "noise multiplier *",
                *("unknown" if x is None else f"<= {upper_text(x)}" for x in noises),
                f"{claim.noise_multiplier:.4f}",
            ],
            [
                "epsilon *",
                *(f">= {lower_text(found.epsilon)}" for found in effective),
                f"<= {upper_text(claim.epsilon)}",
            ],
        ]
    gaussian = [f">= {lower_text(found.gaussian_epsilon)}" for found in findings]
    return [*rows, ["epsilon **", *gaussian, ""]]
