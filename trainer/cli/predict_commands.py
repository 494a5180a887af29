"""``dpsgd predict``."""

from __future__ import annotations

import json
from typing import Any

import click

from accounting.cli import paths, shared_options
from accounting.cli.grouped import Grouped
from trainer.cli import setting_flags
from trainer.report.progress import Terminal
from trainer.settings.requests import PredictSettings


@click.command(name="predict", cls=Grouped)
@click.argument("run", type=paths.PATH)
@setting_flags.settings(PredictSettings)
@shared_options.as_json
def predict_command(as_json: bool, **flags: Any) -> None:
    """Predict every row of a table with a finished run.

    Of classes, column `predicted` has the predicted one, by the names of the schema.
    Predictions cost no privacy: they are computed from the released weights.

    \b
    Examples, for a prepared and a raw table, and with intervals from kept iterates:
      dpsgd predict run --input data/test --out predictions.parquet
      dpsgd predict run --input new.csv --out scores.csv --carry customer
      dpsgd predict averaged-run --input data/test --out intervals.parquet \\
          --uncertainty 0.95
    """
    from trainer.prediction.predict import check, predict_checked

    found = setting_flags.take(flags, PredictSettings)
    checked = check(PredictSettings(**found, run=flags["run"]))
    with Terminal("predicting", unit=checked.rows.unit) as reporter:
        reporter.say("loading TensorFlow")
        summary = predict_checked(checked, reporter)
    if as_json:
        click.echo(json.dumps(summary.to_json(), indent=2))
        return
    click.echo(
        f"{summary.num_rows:,} predictions by {summary.average}, columns "
        f"{', '.join(summary.columns)}, in {summary.out}"
    )
