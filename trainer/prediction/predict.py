"""``predict``: predictions of a finished run for every row of a table.

    summary = predict("run", "data/test", "predictions.parquet", average="ema")

The output has one row per row of the table, in the same order.  Its columns are the
carried ones, the predicted class (see ``named_classes``), and those of the exported
model (see ``serving``) or, for averages of outputs:

    opa    the mean over the kept iterates: probability, probabilities of all classes,
           or outputs by name; with intervals also stddev over the iterates, low and
           high (see ``uncertainty``)
    omv    vote_share, the share of votes for label 1 or for each class; the predicted
           class is that of most kept iterates

Formal guarantees:
  - Every error that the files' metadata shows is raised before TensorFlow is loaded.
  - The output appears complete or not at all, and replaces nothing.
  - Memory depends neither on the number of rows nor on that of kept iterates.
  - No error quotes a row.

Predictions are functions of released weights and of the rows: they cost no privacy of
the training examples.  The privacy statement does not protect the rows of the table.

Public: settings and number of rows.  Sensitive: rows, and predictions as their owner
decides.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.core.batches.columns import row_bytes
from trainer.prediction.named_classes import named
from trainer.prediction.request import PredictRequest, check
from trainer.prediction.table_file import TableFile
from trainer.report.arrow_tables import as_table
from trainer.report.progress import Reporter, Silent
from trainer.settings.predict_settings import PredictSettings

#: Largest number and bytes of the rows that are read, predicted and written at a time.
_CHUNK_ROWS = 1 << 16
_CHUNK_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictSummary:
    """Summary of the predictions.

    Attributes:
      out: The file.
      num_rows: Number of rows, that of the table.
      columns: Names of the columns.
      average: Name of the weights that predict.
      uncertainty: Level of the intervals; None for none.
    """

    out: pathlib.Path
    num_rows: int
    columns: tuple[str, ...]
    average: str
    uncertainty: float | None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        return {**dataclasses.asdict(self), "out": str(self.out)}


def predict(
    run: str | os.PathLike[str],
    table: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    average: str | None = None,
    aggregate: str | None = None,
    uncertainty: float | None = None,
    carry: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> PredictSummary:
    """Writes the predictions of a finished run for every row of a table.

    Args:
      run: Folder of the run.
      table: File, folder or glob: Parquet with the columns of the batches, or a raw
        table (CSV, TSV, Parquet), which is read by the schema of the training examples.
        No label is needed.
      out: New file: Parquet, or CSV if its name ends in ".csv".
      average: "last", "ema", "uta", "custom", "past_ema", "upa", "past_custom", "opa"
        or "omv", if the run has it.  None for "opa" with intervals, else "last".
      aggregate: Instead, "module:function" from the kept iterates to weights: see
        ``trainer.averaging.custom_aggregate``.
      uncertainty: Level of the intervals, in (0, 1); None for none.
      carry: Columns of the table to copy to the output, such as an id.
      reporter: Receives progress; None for none.

    Raises:
      InputError: name, value, bound, remedy.
    """
    settings = PredictSettings(
        run=pathlib.Path(run),
        table=pathlib.Path(table),
        out=pathlib.Path(out),
        average=average,
        aggregate=aggregate,
        uncertainty=uncertainty,
        carry=tuple(carry),
    )
    return predict_checked(check(settings), reporter or Silent())


def predict_checked(request: PredictRequest, reporter: Reporter) -> PredictSummary:
    """Does what ``predict`` does, for a request that is already checked.

    Args:
      request: From ``request.check``.
      reporter: Receives progress.
    """
    # Here, because TensorFlow takes seconds to load: the checks precede it.
    from trainer.prediction.exported_model import load

    predict_rows, chosen = load(request.chosen), request.chosen
    reporter.start(request.rows.total, done=0)
    with TableFile(request.out) as file:
        for inputs, carried, done in request.rows.parts(_chunk_rows(request)):
            file.write(_beside(carried, named(predict_rows(inputs), chosen)))
            reporter.advance(done)
    reporter.stop()
    return PredictSummary(
        out=request.out,
        num_rows=file.num_rows,
        columns=file.columns,
        average=chosen.average,
        uncertainty=chosen.level,
    )


def _chunk_rows(request: PredictRequest) -> int:
    size = max(1, row_bytes(request.chosen.serving.inputs))
    return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // size))


def _beside(carried: pa.Table, predictions: dict[str, np.ndarray]) -> pa.Table:
    """Returns the carried columns followed by the predictions."""
    found = as_table(predictions)
    columns = [*carried.columns, *found.columns]
    return pa.table(columns, [*carried.column_names, *found.column_names])
