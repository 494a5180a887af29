"""``dpsgd audit``: how large epsilon is at least, by attacking the mechanism itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from accounting.cli import registered, shared_options
from trainer.cli import plan_flags
from trainer.settings.audit_settings import LEVELS, MECHANISM, TRAINER, TRIALS


@click.command(name="audit")
@plan_flags.options
@click.option(
    "--claim",
    type=registered.SAMPLER,
    help="Hold it against the epsilon of this sampler at the same noise.  Default: of "
    "the sampler itself.",
)
@shared_options.epsilon("Instead: the noise this claim needs.")
@shared_options.max_examples_per_user(
    "Of a plan: the claim is of a user, who has at most so many examples.  A run knows."
)
@click.option(
    "--canary-rows",
    type=int,
    help="Examples of the canary user.  With more than the claim allows, it shows what "
    "the claim is worth if nobody bounds users.  Default: as many as it allows.",
)
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default=MECHANISM,
    show_default=True,
    help="mechanism: sampler and noise, all steps, on the worst data.  trainer: small "
    "runs of `batches` and `train` from end to end.",
)
@click.option(
    "--trials",
    type=int,
    help=f"In all.  Default: {TRIALS[MECHANISM]:,}, or of trainer "
    f"{TRIALS[TRAINER]:,}, its least: 4,096 in each run.",
)
@click.option(
    "--confidence",
    type=float,
    default=0.999,
    show_default=True,
    help="Of the verdict: that a true claim is not called violated.",
)
@shared_options.as_json
@shared_options.plot("Draw it, e.g. a.png.")
@click.pass_context
def audit_command(
    ctx: click.Context,
    run: Path | None,
    as_json: bool,
    plot: Path | None,
    **flags: Any,
) -> None:
    """Attack a run's mechanism, and bound its epsilon from below.

    Many times over, one example (the canary) or a ghost goes through the real sampler
    and the real noise, on the data that is worst for it, and an optimal test guesses
    which it was.  From how often the guesses are right follows an epsilon that the
    mechanism has at least.  Keys are new in every trial; no data, batch or key of RUN
    is used, only its plan, noise and delta.

    Where the unit is a user, the canary is one with as many rows as the claim allows;
    at the trainer level `dpsgd bound` has to leave so many.

    At the trainer level, dense and lazy noise are judged separately.  The contributions
    of each batch are also subtracted from the released weights; what remains must be
    the claimed noise.

    The exit code is 1 if the claimed epsilon is refuted, or if what runs is not the
    mechanism that it was proven for.

    \b
    Example, of a run, and of a shuffle that is sold under Poisson's epsilon:
      dpsgd audit run
      dpsgd audit --sampler dynamic-shuffle --claim poisson --num-examples 10000 \\
          --batch-size 100 --epochs 1 --epsilon 1.5 --delta 1e-5 --plot audit.png
    """
    from trainer.cli import audit_body

    report = audit_body.report(run, flags, plot)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        report.print()
    if report.verdict.violated:
        ctx.exit(1)
