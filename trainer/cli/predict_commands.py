"""``dpsgd predict``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from accounting.cli import shared_options
from accounting.cli.grouped import Grouped
from trainer.cli import run_flags
from trainer.prediction import chosen_model, predict, request
from trainer.report.progress import Terminal


@click.command(name="predict", cls=Grouped)
@click.argument("run", type=run_flags.RUN)
@click.option(
    "--input",
    "table",
    type=click.Path(path_type=Path),
    required=True,
    help="File, folder or quoted glob, prepared like the batches.  If these were made "
    "with a schema, also a raw table (CSV, TSV, Parquet).  A label is not needed.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="New file, with one row for each row of --input, in order: CSV if its name "
    "ends in .csv, else Parquet.",
)
@click.option(
    "--average",
    type=click.Choice(chosen_model.AVERAGES),
    help="Weights to predict with: last; ema, uta or custom, averaged while training; "
    "past_ema, upa, past_custom, opa or omv, of kept iterates.  [default: last; opa "
    "with --uncertainty]",
)
@click.option(
    "--aggregate",
    metavar="MODULE:FUNCTION",
    help="Predict with your own aggregate, a function from kept iterates (lists of "
    "NumPy arrays, oldest first) to weights.",
)
@click.option(
    "--uncertainty",
    type=float,
    metavar="LEVEL",
    help="Also write intervals of this level, such as 0.95, from kept iterates: how "
    "much a prediction varies with the noise.",
)
@click.option(
    "--carry",
    multiple=True,
    metavar="COLUMN",
    help="Column of --input to copy to --out, such as an id; may be repeated.",
)
@shared_options.as_json
def predict_command(
    run: Path,
    table: Path,
    out: Path,
    average: str | None,
    aggregate: str | None,
    uncertainty: float | None,
    carry: tuple[str, ...],
    as_json: bool,
) -> None:
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
    checked = request.check(
        run=run,
        table=table,
        out=out,
        average=average,
        aggregate=aggregate,
        uncertainty=uncertainty,
        carried=carry,
    )
    with Terminal("predicting", unit=checked.rows.unit) as reporter:
        reporter.say("loading TensorFlow")
        summary = predict.predict_checked(checked, reporter)
    if as_json:
        click.echo(json.dumps(summary.to_json(), indent=2))
        return
    click.echo(
        f"{summary.num_rows:,} predictions by {summary.average}, columns "
        f"{', '.join(summary.columns)}, in {summary.out}"
    )
