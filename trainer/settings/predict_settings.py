"""Settings of ``dpsgd predict``; see ``trainer.prediction``."""

from __future__ import annotations

import dataclasses
import pathlib

from trainer.settings.aggregation_settings import OMV, OPA, WEIGHT_AVERAGES
from trainer.settings.comparison_settings import LAST
from trainer.settings.setting import REQUIRED, setting

#: The last iterate, and all averages that may predict.
AVERAGES = (LAST, *WEIGHT_AVERAGES, OPA, OMV)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictSettings:
    """What to predict, and by which weights of a run.  All public.

    Attributes:
      run: Folder of the run.
      table: File, folder or quoted glob, prepared like the batches.  If these were made
        with a schema, also a raw table (CSV, TSV, Parquet).  A label is not needed.
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

    run: pathlib.Path
    table: pathlib.Path = setting(REQUIRED, flag="input")
    out: pathlib.Path = setting(REQUIRED)
    average: str | None = setting(None, choices=AVERAGES)
    aggregate: str | None = setting(None, metavar="MODULE:FUNCTION")
    uncertainty: float | None = setting(None, metavar="LEVEL")
    carry: tuple[str, ...] = setting((), metavar="COLUMN")
