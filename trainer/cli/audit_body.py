"""The work of ``dpsgd audit``.

Public: everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accounting.auditing import audit_plot
from accounting.cli.options import warn
from accounting.core import accountant
from accounting.core.validation import InputError
from accounting.plots import check_path
from pipelines.files.progress_bars import Bars
from trainer.auditing import COUNTED, AuditReport, audit, settings_of_run
from trainer.cli.run_or_plan import RunOrPlan
from trainer.report.run_files import read_finished
from trainer.settings.requests import AuditSettings, claimed_plan


def report(settings: AuditSettings, plot: Path | None) -> AuditReport:
    """Audits, with progress bars.

    Args:
      settings: The audit.
      plot: Where to draw the result; None to draw nothing.

    Raises:
      InputError: the request is refused, before any trial.
    """
    if plot is not None:
        check_path(plot)
    warn(settings.delta, settings.plan.num_examples)
    with Bars([COUNTED]) as bars:
        found = audit(settings, progress=bars.update)
    if plot is not None:
        audit_plot.draw(found.verdict, found.title, plot)
    return found


def of_run(run: Path, asked: RunOrPlan, how: dict[str, Any]) -> AuditSettings:
    """Returns the audit of a run.

    Args:
      run: A folder that ``dpsgd train`` wrote.
      asked: Options of the command.
      how: Further arguments of `AuditSettings`.

    Raises:
      InputError: the run or a value is refused.
    """
    record, manifest = read_finished(run)
    return settings_of_run(
        record,
        manifest,
        delta=asked.delta,
        allow_large_delta=asked.allow_large_delta,
        **how,
    )


def of_plan(
    asked: RunOrPlan, how: dict[str, Any], epsilon: float | None, most: int | None
) -> AuditSettings:
    """Returns the audit of a plan.

    Args:
      asked: Options of the command.
      how: Further arguments of `AuditSettings`.
      epsilon: The claim, in place of noise.
      most: Largest number of examples of a user; None for rows.

    Raises:
      InputError: an option is missing, or a value is refused.
    """
    needed = ("sampler", "num_examples", "batch_size", "delta")
    asked.check_complete(needed, command="audit")
    if (asked.noise_multiplier is None) == (epsilon is None):
        raise InputError("Expected exactly one of --noise-multiplier and --epsilon.")
    plan, noise = asked.plan(), asked.noise_multiplier
    count = 1 if most is None else most
    assert asked.delta is not None
    if noise is None:
        assert epsilon is not None
        noise = accountant.noise_multiplier(
            claimed_plan(plan, how["claim"]),
            epsilon=epsilon,
            delta=asked.delta,
            max_examples_per_user=count,
        ).guarantee
    return AuditSettings(
        plan=plan,
        noise_multiplier=noise,
        delta=asked.delta,
        max_examples_per_user=count,
        bounded=most is not None,
        **how,
    )
