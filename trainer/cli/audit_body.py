"""The work of ``dpsgd audit``.

Public: everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accounting.auditing import audit_plot
from accounting.cli import shared_options
from accounting.core import accountant
from accounting.core.validation import InputError
from accounting.plots import check_path
from pipelines.files.progress_bars import Bars
from trainer.auditing import COUNTED, AuditReport, audit, settings_of_run
from trainer.cli import plan_flags
from trainer.settings.requests import AuditSettings, claimed_plan
from trainer.settings.setting import declared

#: Flags on how to audit, for a run or a plan.
_HOW = tuple(declared(AuditSettings))


def report(run: Path | None, flags: dict[str, Any], plot: Path | None) -> AuditReport:
    """Audits, with progress bars.

    Args:
      run: A folder that ``dpsgd train`` wrote; None for the plan of the flags.
      flags: Flags of the command.
      plot: Where to draw the result; None to draw nothing.

    Raises:
      InputError: the request is refused, before any trial.
    """
    if plot is not None:
        check_path(plot)
    settings = _of_plan(flags) if run is None else _of_run(run, flags)
    shared_options.warn(settings.delta, settings.plan.num_examples)
    with Bars([COUNTED]) as bars:
        found = audit(settings, progress=bars.update)
    if plot is not None:
        audit_plot.draw(found.verdict, found.title, plot)
    return found


def _of_run(run: Path, flags: dict[str, Any]) -> AuditSettings:
    record, manifest = plan_flags.read_run(run, flags, allowed=_HOW)
    names = ("delta", "allow_large_delta", *_HOW)
    return settings_of_run(record, manifest, **{name: flags[name] for name in names})


def _of_plan(flags: dict[str, Any]) -> AuditSettings:
    needed = ("sampler", "num_examples", "batch_size", "delta")
    plan_flags.check_complete(flags, needed, command="audit")
    if (flags["noise_multiplier"] is None) == (flags["epsilon"] is None):
        raise InputError("Expected exactly one of --noise-multiplier and --epsilon.")
    plan = plan_flags.plan(flags)
    noise, count = flags["noise_multiplier"], flags["max_examples_per_user"]
    count = 1 if count is None else count
    if noise is None:
        noise = accountant.noise_multiplier(
            claimed_plan(plan, flags["claim"]),
            epsilon=flags["epsilon"],
            delta=flags["delta"],
            max_examples_per_user=count,
        ).guarantee
    how = {name: flags[name] for name in _HOW}
    return AuditSettings(
        plan=plan,
        noise_multiplier=noise,
        delta=flags["delta"],
        max_examples_per_user=count,
        bounded=flags["max_examples_per_user"] is not None,
        **how,
    )
