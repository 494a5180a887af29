"""The weights of a finished run that predict, chosen before TensorFlow is loaded.

`choose` refuses a run that is unfinished, or has no such weights.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import pathlib

from accounting.core.validation import InputError, check_choice, check_float
from pipelines.batches.folder import MANIFEST_NAME
from pipelines.core.batches.manifest import Manifest
from pipelines.files.storage import read_json
from trainer.model import rows
from trainer.model.metrics import OTHER
from trainer.model.rows import Target
from trainer.report import run_files
from trainer.report.run_files import (
    ITERATES_NAME,
    Serving,
    exported_names,
    read_finished,
)
from trainer.settings.requests import AVERAGES, LAST
from trainer.settings.train_settings import (
    OMV,
    OPA,
    PAST_EMA,
    UPA,
    WEIGHT_AVERAGES,
)

#: Column of a majority vote, beside the class that it predicts.
VOTE_SHARE = "vote_share"
#: Column of the predicted class.
PREDICTED = "predicted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenModel:
    """A model that can predict.

    Attributes:
      run: Folder of the run.
      average: One of ``AVERAGES``.
      level: Level of the intervals, in (0, 1); None for none.
      serving: Signature of the model.
      iterates: Files of the kept iterates, oldest first.
      keep_decay: Decay of their moving average; None without kept iterates.
      target: What is predicted; None if nothing says so.
    """

    run: pathlib.Path
    average: str
    level: float | None
    serving: Serving
    iterates: tuple[pathlib.Path, ...]
    keep_decay: float | None
    target: Target | None = None

    @property
    def is_exported(self) -> bool:
        """Whether ``model`` has the requested weights."""
        return _exported(self.run, self.average).is_dir()

    @property
    def model(self) -> pathlib.Path:
        """The SavedModel: that of the average if it was exported, else the last."""
        return _exported(self.run, self.average if self.is_exported else LAST)


def choose(
    run: pathlib.Path,
    *,
    average: str | None = None,
    uncertainty: float | None = None,
) -> ChosenModel:
    """Returns the weights that predict.

    Args:
      run: Folder of the run.
      average: One of `requests.AVERAGES` that the run has; None for the last weights,
        or the mean prediction where there are intervals.
      uncertainty: Level of intervals, in (0, 1); None for no intervals.

    Raises:
      InputError: the run is unfinished, or has no such weights.
    """
    if uncertainty is not None:
        check_float("uncertainty", uncertainty, above=0, below=1)
    chosen = average or (LAST if uncertainty is None else OPA)
    check_choice("average", chosen, AVERAGES)
    record, _ = read_finished(run)
    signature = run_files.read_serving(run)
    iterates = tuple(sorted((run / ITERATES_NAME).glob("step-*.npz")))
    possible = _possible(run, signature, has_iterates=bool(iterates))
    if chosen not in possible:
        raise InputError(
            f"Expected average={chosen!r} to be one that {run} has: "
            f"{', '.join(possible)}. Others need --ema-decay, --tail or --keep-last of "
            "`dpsgd train`; omv also needs a loss of classes."
        )
    if uncertainty is not None:
        _check_intervals(chosen, uncertainty, len(iterates))
    predicted = rows.target_of(Manifest.from_json(read_json(run / MANIFEST_NAME)))
    return ChosenModel(
        run=run,
        average=chosen,
        level=uncertainty,
        serving=signature,
        iterates=iterates,
        keep_decay=record.optimizer.get("keep_decay"),
        target=predicted,
    )


def _exported(run: pathlib.Path, average: str) -> pathlib.Path:
    return run / exported_names(None if average == LAST else average)[1]


def _possible(
    run: pathlib.Path, signature: Serving, *, has_iterates: bool
) -> list[str]:
    """Returns the averages that the run exported or has the iterates for."""
    names = LAST, *WEIGHT_AVERAGES
    exported = [name for name in names if _exported(run, name).is_dir()]
    if LAST not in exported:
        raise InputError(
            f"Expected the exported model {_exported(run, LAST)} to exist. Restore it, "
            "or train again."
        )
    if not has_iterates:
        return exported
    of_outputs = [OPA] if signature.task == OTHER else [OPA, OMV]
    more = (name for name in (PAST_EMA, UPA) if name not in exported)
    return [*exported, *more, *of_outputs]


def _check_intervals(average: str, level: float, num_iterates: int) -> None:
    if average != OPA:
        raise InputError(
            f"Expected no average={average!r} beside uncertainty={level}: intervals "
            "are for the mean prediction of kept iterates. Give --average opa."
        )
    if num_iterates < 2:
        raise InputError(
            f"Expected at least two kept iterates for uncertainty={level}; the run has "
            f"{num_iterates}. Omit --uncertainty, or train with --keep-last 2 or more."
        )
