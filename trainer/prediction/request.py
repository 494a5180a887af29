"""A request to ``predict``, checked before TensorFlow is loaded.

Formal guarantees:
  - ``check`` writes nothing.
  - The request that it returns can be executed: the run is finished and has the
    requested weights, the table has the columns of its model, prepared or raw, and the
    output does not exist.

The table needs no label.  It may hold training examples: predictions are functions of
the released weights.

Public: everything but the rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence

from accounting.core.validation import InputError
from pipelines.batches.folder import MANIFEST_NAME
from pipelines.core.batches.manifest import Manifest
from pipelines.files.json_files import read_json
from pipelines.files.output_file import check_new
from trainer.averaging.uncertainty import column_names
from trainer.prediction import named_classes
from trainer.prediction.chosen_model import VOTE_SHARE, ChosenModel, choose
from trainer.prediction.table_file import check_name
from trainer.prediction.tables import Rows, open_rows
from trainer.run.preflight import check_local
from trainer.settings.aggregation_settings import OMV
from trainer.settings.predict_settings import PredictSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictRequest:
    """A request that can be executed.

    Attributes:
      chosen: The model.
      rows: Rows of the table.
      out: New file.
    """

    chosen: ChosenModel
    rows: Rows
    out: pathlib.Path


def check(settings: PredictSettings) -> PredictRequest:
    """Returns the checked request.

    Raises:
      InputError: name, value, bound, remedy.
    """
    run, out, carried = settings.run, settings.out, settings.carry
    check_local(run=run, input=settings.table, out=out)
    chosen = choose(
        run,
        average=settings.average,
        aggregate=settings.aggregate,
        uncertainty=settings.uncertainty,
    )
    check_new(out)
    _check_carried(carried, prediction_names(chosen))
    # Without the label, which the table need not have.
    manifest = Manifest.from_json(read_json(run / MANIFEST_NAME))
    manifest = dataclasses.replace(manifest, columns=chosen.serving.inputs)
    rows = open_rows(settings.table, manifest, carried)
    check_name(out, rows.carried_types)
    return PredictRequest(chosen=chosen, rows=rows, out=out)


def prediction_names(chosen: ChosenModel) -> tuple[str, ...]:
    """Returns the columns of the predictions of a model."""
    signature = chosen.serving
    found: Sequence[str] = signature.outputs
    if chosen.average == OMV:
        found = (VOTE_SHARE,)
    elif chosen.level is not None:
        several = column_names(signature.outputs).values()
        found = tuple(itertools.chain.from_iterable(several))
    return named_classes.column_names(found, signature.task, chosen.classes)


def _check_carried(carried: Sequence[str], names: Sequence[str]) -> None:
    for name in carried:
        if name in names or carried.count(name) > 1:
            raise InputError(
                f"Expected column {name} of --carry once, and not to be called as a "
                f"prediction: {', '.join(names)}. Omit it, or rename it in the "
                "table."
            )
