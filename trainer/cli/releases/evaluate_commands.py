"""``dpsgd evaluate``."""

from __future__ import annotations

import json
from typing import Any

import click

from accounting.cli import paths, shared_options
from accounting.cli.grouped import Grouped
from trainer.cli import run_flags
from trainer.cli.metrics_text import metrics_text
from trainer.report.progress import Terminal
from trainer.settings.aggregation_settings import WEIGHT_AVERAGES


@click.command(name="evaluate", cls=Grouped)
@click.argument("run", type=paths.PATH)
@run_flags.batches(
    help="Folder of the batches of RUN: files that they were sampled from are refused "
    "as --input.",
)
@click.option(
    "--input",
    "table",
    type=paths.PATH,
    required=True,
    help="Held-out rows: Parquet (a folder, a file or a quoted glob) with the columns "
    "of the batches, such as a split of `dpsgd prepare`.  None may be a training row.",
)
@shared_options.epsilon(
    "Of the metrics, for one held-out row or user.  [default: that of RUN]"
)
@shared_options.delta("Of RUN and metrics.  [default: that of RUN]")
@click.option(
    "--average",
    type=click.Choice(("last", *WEIGHT_AVERAGES)),
    help="Weights to evaluate: see `dpsgd predict`.  [default: last]",
)
@click.option(
    "--largest-loss",
    type=float,
    metavar="LOSS",
    help="Count larger losses as this one, which must not be chosen by the rows.  "
    "[default: 4 for two classes; of a regression the squared range of its labels]",
)
@shared_options.as_json
def evaluate_command(as_json: bool, **flags: Any) -> None:
    """Evaluate a run on held-out rows, with an epsilon for them.

    AUC, log loss, accuracy and calibration, or squared and absolute error of a number,
    come from one Gaussian release, with intervals that include its noise.  Held-out
    rows are others than training rows, so model and metrics together have the larger
    epsilon of both, not the sum.  If RUN is about users, those of held-out rows are
    bounded by `dpsgd prepare`, too.

    Train RUN without --eval: its metrics are published without protection.

    \b
    Example:
      dpsgd train --batches batches --out run --epsilon 3 --delta 1e-7
      dpsgd evaluate run --batches batches --input data/test --epsilon 1
    """
    from trainer.releases import evaluate

    request = evaluate.check(**flags)
    with Terminal("evaluating", unit="row") as reporter:
        reporter.say("loading TensorFlow")
        metrics = evaluate.evaluate_checked(request, reporter)
    if as_json:
        click.echo(json.dumps(metrics, indent=2))
        return
    click.echo(metrics_text(metrics))
    click.echo(metrics["evaluation"]["claim"])
