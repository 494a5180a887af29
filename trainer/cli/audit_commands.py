"""``dpsgd audit``: lower bounds on epsilon, by attacking the mechanism itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from accounting.cli import paths, shared_options
from accounting.cli.grouped import Grouped
from trainer.cli import plan_flags, setting_flags
from trainer.settings.requests import AuditSettings


@click.command(name="audit", cls=Grouped)
@click.argument("run", type=paths.PATH, required=False)
@plan_flags.options
@setting_flags.settings(AuditSettings)
@shared_options.epsilon("Instead of noise: the claim, which determines the noise.")
@shared_options.max_examples_per_user(
    "For a plan: the claim is for a user with at most this many examples."
)
@shared_options.as_json
@shared_options.plot("Draw the result, such as to a.png.")
@click.pass_context
def audit_command(
    ctx: click.Context,
    run: Path | None,
    as_json: bool,
    plot: Path | None,
    **flags: Any,
) -> None:
    """Attack a run's mechanism, and bound its epsilon from below.

    In each trial, one example (the canary) or its absence goes through the real sampler
    and the real noise, on worst-case data, and an optimal test guesses which.  The rate
    of correct guesses gives a lower bound on the mechanism's epsilon.  Every trial uses
    new keys; no data, batch or key of RUN is used, only its plan, noise and delta.

    If the privacy unit is a user, the canary has as many rows as the claim allows.

    The exit code is 1 if the claimed epsilon is refuted.

    \b
    Examples, for a run, and for a shuffle that claims Poisson's epsilon:
      dpsgd audit run
      dpsgd audit --sampler dynamic-shuffle --claim poisson --num-examples 10000 \\
          --batch-size 100 --epochs 1 --epsilon 1.5 --delta 1e-5 --plot audit.png
    """
    from trainer.cli import audit_body

    report = audit_body.report(run, flags, plot)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        report.show()
    if report.verdict.violated:
        ctx.exit(1)
