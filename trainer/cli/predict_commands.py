"""``dpsgd predict``."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from accounting.cli.options import Json, LocalPath
from accounting.core.settings import REQUIRED, choice
from trainer.report.progress import Terminal
from trainer.settings.requests import AVERAGES, PredictSettings


def predict(
    run: LocalPath,
    /,
    *,
    table: Annotated[LocalPath, Parameter(name="--input", group=REQUIRED)],
    out: Annotated[LocalPath, Parameter(group=REQUIRED)],
    average: Annotated[str | None, choice("average", *AVERAGES)] = None,
    aggregate: Annotated[str | None, Parameter(metavar="MODULE:FUNCTION")] = None,
    uncertainty: Annotated[float | None, Parameter(metavar="LEVEL")] = None,
    carry: Annotated[tuple[str, ...], Parameter(metavar="COLUMN")] = (),
    as_json: Json = False,
) -> None:
    """Predict every row of a table with a finished run.

    Of classes, column `predicted` has the predicted one, by the names of the schema.
    Predictions cost no privacy: they are computed from the released weights.

    For example, for a prepared and a raw table, and with intervals:
      dpsgd predict run --input data/test --out predictions.parquet
      dpsgd predict run --input new.csv --out scores.csv --carry customer
      dpsgd predict averaged-run --input data/test --out intervals.parquet \\
          --uncertainty 0.95

    Args:
      run: Folder of the run.
      table: File, folder or quoted glob, prepared like the batches.  If these were made
        with a schema, also a raw table (CSV, TSV, JSON lines, Parquet).  A label is not
        needed.
      out: New file, with one row for each row of --input, in order: CSV if its name
        ends in .csv, else Parquet.
      average: Weights to predict with: last; ema, uta or custom, averaged while
        training; past_ema, upa, past_custom, opa or omv, of kept iterates.  [default:
        last; opa with --uncertainty]
      aggregate: Predict with your own aggregate, a function from kept iterates (lists
        of NumPy arrays, oldest first) to weights.
      uncertainty: Also write intervals of this level, such as 0.95, from kept iterates:
        how much a prediction varies with the noise.
      carry: Column of --input to copy to --out, such as an id; may be repeated.
    """
    from trainer.prediction.predict import check, predict_checked

    settings = PredictSettings(
        run=run,
        table=table,
        out=out,
        average=average,
        aggregate=aggregate,
        uncertainty=uncertainty,
        carry=carry,
    )
    checked = check(settings)
    with Terminal("predicting", unit=checked.rows.unit) as reporter:
        reporter.say("loading TensorFlow")
        summary = predict_checked(checked, reporter)
    if as_json:
        print(json.dumps(summary.to_json(), indent=2))
        return
    print(
        f"{summary.num_rows:,} predictions by {summary.average}, columns "
        f"{', '.join(summary.columns)}, in {summary.out}"
    )
