"""The files that a run may write into its folder, beside its record."""

from __future__ import annotations

import itertools
import pathlib

from accounting.core.validation import InputError
from pipelines.batches.folder import CERTIFICATE_NAME, MANIFEST_NAME, PRIVATE_NAME
from trainer.core.run.run_record import RECORD_NAME, RunRecord, read_run
from trainer.settings.aggregation_settings import WEIGHT_AVERAGES

CURVE_NAME = "curve.json"
CURVE_PLOT_NAME = "curve.png"
METRICS_NAME = "metrics.json"
PRIVACY_NAME = "privacy.json"
PRIVACY_TEXT_NAME = "privacy.txt"
KERAS_MODEL_NAME = "model.keras"
SAVED_MODEL_NAME = "saved_model"
SERVING_NAME = "serving.json"
ITERATES_NAME = "iterates"
UNCERTAINTY_NAME = "uncertainty.parquet"


def exported_names(average: str | None = None) -> tuple[str, str]:
    """Returns the names of the exported forms of the last iterate, or of an average.

    Example:
      >>> exported_names("ema")
      ('ema_model.keras', 'ema_saved_model')
    """
    prefix = f"{average}_" if average else ""
    return prefix + KERAS_MODEL_NAME, prefix + SAVED_MODEL_NAME


#: All files that a run may write into its folder.
RUN_NAMES = (
    RECORD_NAME, MANIFEST_NAME, PRIVATE_NAME, CURVE_NAME, CURVE_PLOT_NAME,
    METRICS_NAME, PRIVACY_NAME, PRIVACY_TEXT_NAME, ITERATES_NAME, UNCERTAINTY_NAME,
    SERVING_NAME, CERTIFICATE_NAME, *exported_names(),
    *itertools.chain.from_iterable(map(exported_names, WEIGHT_AVERAGES)),
)  # fmt: skip


def read_finished(run: pathlib.Path) -> RunRecord:
    """Returns the record of a finished run, or of one that stopped early.

    Raises:
      InputError: there is no record, or the run is incomplete.
    """
    record = read_run(run)[0]
    if not (record.complete or (record.fits and record.fits[-1]["ended"])):
        raise InputError(
            f"Expected {run} to hold a finished run; it stopped after step "
            f"{record.num_steps_executed}. Give its command again to end it."
        )
    return record
