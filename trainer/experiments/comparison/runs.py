"""Batches and runs of an experiment in a folder, each made once.

    OUT/batches/BATCHES-seed0/            batches, which runs share
    OUT/runs/NAME-seed0/                  one training run per trial
    OUT/runs/NAME-seed0.settings.json     the request of that run

Batches are made in a separate process, so that Beam and TensorFlow do not share one.

Formal guarantees:
  - Finished batches and runs are not made again; an unfinished run continues where it
    was.
  - Finished batches are used only if they have the requested plan, rows of the same
    table, and a key of their own.
  - A finished run is used only if it was made with the settings and folders of the
    trial.
  - What is stated of a run is computed from its record, as by ``dpsgd account``.

Public: what the runs publish.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_choice
from pipelines.batches.folder import (
    MANIFEST_NAME,
    read_checksums,
    read_manifest,
)
from pipelines.batches.stored import stored
from pipelines.files import separate_process
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.storage import write_atomically
from pipelines.inputs.parquet_blocks import Dataset, list_blocks, list_row_groups
from pipelines.inputs.source_table import SourceTable, table_of
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from trainer.core.run.run_record import read_run
from trainer.experiments.comparison.case import Trial
from trainer.model.evaluation import check_files
from trainer.model.metrics import METRICS, name_of
from trainer.model.user_code import load_function
from trainer.model.user_rows import columns_of_row
from trainer.report.metrics_files import read_metrics
from trainer.report.run_files import METRICS_NAME
from trainer.run import privacy
from trainer.run.preflight import (
    Request,
    check_files_of,
    check_views,
    is_finished,
    with_loss,
)
from trainer.settings.comparison_settings import (
    AUTO_METRIC,
    ComparisonSettings,
    Experiment,
)
from trainer.settings.train_settings import AUTO_LOSS, TrainSettings

#: Called with each line of progress.
Say = Callable[[str], None]


def silent(line: str) -> None:
    """Ignores a line of progress."""
    del line


class Runs:
    """Makes batches and runs in the folder ``out``.

    Args:
      experiment: Data, folders, and everything else that all runs share.
      say: Called with each line of progress.
    """

    def __init__(self, experiment: Experiment, say: Say) -> None:
        self._experiment, self._say = experiment, say
        self._keys: dict[str, str] = {}

    def make_batches(self, name: str, settings: BatchSettings, plan: DpSgdPlan) -> None:
        """Makes batches, unless they exist.

        Args:
          name: Name of their folder.
          settings: How to sample.
          plan: The plan that the batches must have.

        Raises:
          InputError: the batches are refused, have another plan or other rows, or are
            those of another folder.
        """
        folder = self._batches(name)
        if not (folder / MANIFEST_NAME).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._say(f"batches: {name}")
            source = self._experiment.source
            separate_process.call(MAKE_BATCHES, source, str(folder), settings)
        table = SourceTable.from_json(read_checksums(folder).table)
        if read_manifest(folder).plan != plan or table != self._table:
            raise InputError(
                f"Expected the batches in {folder} to have the requested plan, and "
                f"rows of {self._experiment.source} as it is now; they have others. "
                "Give the same command, or another --out."
            )
        if (other := self._keys.setdefault(stored(folder).key_name(), name)) != name:
            raise InputError(
                f"Expected the batches in {folder} to have a key of their own; it is "
                f"that of {other}, and the epsilons of runs on both do not add. Remove "
                "one of them, and give the same command."
            )

    @functools.cached_property
    def _table(self) -> SourceTable:
        return table_of(list_row_groups(self._experiment.source))

    def _batches(self, name: str) -> pathlib.Path:
        return self._experiment.out / "batches" / name

    def run(self, trial: Trial) -> dict[str, Any]:
        """Trains a trial in this process, unless it is done; see `result`.

        Raises:
          InputError: the trainer refuses it, or it was made with other settings.
        """
        request = self.unfinished(trial)
        if request is not None:
            self._say(f"training: {trial.name}")
            train_here(request)
        return self.result(trial)

    def unfinished(self, trial: Trial) -> Request | None:
        """Returns the request of a run that is not finished; None if it is.

        Raises:
          InputError: the run was made or begun with other settings.
        """
        request = self.request(trial)
        return request if is_unfinished(request) else None

    def result(self, trial: Trial) -> dict[str, Any]:
        """Returns the "metrics" of a finished run, and the "privacy" of its record.

        Raises:
          InputError: a file is missing or was edited.
        """
        run = self.request(trial).run
        record, manifest = read_run(run)
        large = trial.settings.allow_large_delta
        _, said = privacy.stated(run, record, manifest, allow_large_delta=large)
        return {"metrics": read_metrics(run / METRICS_NAME), "privacy": said}

    def request(self, trial: Trial) -> Request:
        """Returns the request of a trial to the trainer.

        Raises:
          InputError: a folder is not on this machine.
        """
        experiment = self._experiment
        return Request(
            settings=trial.settings,
            batches=self._batches(trial.batches),
            held_out=experiment.held_out,
            run=experiment.out / "runs" / trial.name,
            batches_used_before=True,  # by other trials: an experiment, not a release
            checkpoint_every=experiment.checkpoint_every,
        )


def settings_path(run: pathlib.Path) -> pathlib.Path:
    """Returns the file that holds the request of a run."""
    return run.with_name(f"{run.name}.settings.json")


def describe(request: Request) -> dict[str, Any]:
    """Returns a request as a JSON-serialisable dict."""
    fields: dict[str, Any] = json.loads(
        json.dumps(dataclasses.asdict(request), default=str)
    )
    return fields


def is_unfinished(request: Request) -> bool:
    """Whether a run is left to train.

    Raises:
      InputError: the run was made or begun with other settings.
    """
    _check_same(request)
    return not is_finished(request.run)


def _check_same(request: Request) -> None:
    """Refuses a run that was made for another request."""
    path, asked = settings_path(request.run), describe(request)
    known = path.exists()
    if known and read_json(path) != asked:
        raise InputError(
            f"Expected {request.run} to have the settings given now; {path.name} "
            "beside it has others. Give the same settings, or another --out."
        )
    if not known and is_finished(request.run):
        raise InputError(
            f"Expected {path} to hold the settings of the finished run beside it. "
            "Restore it, or give another --out."
        )


def note(request: Request) -> None:
    """Writes the request of a run, before the run begins."""
    path = settings_path(request.run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, pretty_json(describe(request)))


def train_here(request: Request) -> None:
    """Writes the request, and trains in this process."""
    note(request)
    # Imported here: it loads TensorFlow.
    from trainer.train import train

    train(request)


def training_data(experiment: ComparisonSettings) -> Dataset:
    """Returns the training examples, which the held-out ones must match.

    Training would refuse others, but only after the batches are made.

    Raises:
      InputError: the training examples are refused, or the held-out files are of other
        columns or types, or among the training examples.
    """
    dataset = list_blocks(experiment.source)
    columns = columns_of_row(dataset.columns, dataset.description)
    footers = dataset.footers.values()
    check_files(experiment.held_out, columns, dataset.description, footers)
    for settings in experiment.trained:
        check_views(settings, columns)
    return dataset


def settled(experiment: ComparisonSettings) -> ComparisonSettings:
    """Returns a comparison whose "auto" loss and metric are replaced by the label's.

    Raises:
      InputError: there is no such metric or no training data, or a folder is not on
        this machine.
    """
    _check(experiment)
    if all(each.loss != AUTO_LOSS for each in experiment.trained):
        return _with_metric(experiment)
    dataset = list_blocks(experiment.source).description
    trained = tuple(with_loss(each, dataset) for each in experiment.trained)
    found = _with_metric(dataclasses.replace(experiment, trained=trained))
    _check(found)
    return found


def _with_metric(experiment: ComparisonSettings) -> ComparisonSettings:
    if experiment.metric != AUTO_METRIC:
        return experiment
    (first, *_) = experiment.trained
    return dataclasses.replace(experiment, metric=METRICS[first.task][0])


def _check(experiment: ComparisonSettings) -> None:
    for settings in experiment.trained:
        Runs(experiment, silent).request(Trial(name="", batches="", settings=settings))
        check_files_of(settings)
        check_choice("metric", experiment.metric, (*_metrics(settings), AUTO_METRIC))


def _metrics(settings: TrainSettings) -> tuple[str, ...]:
    """Returns the names of the metrics that a run will have."""
    known = METRICS[settings.task]
    if settings.loss == AUTO_LOSS:  # depends on the data
        known = tuple(dict.fromkeys(itertools.chain(*METRICS.values())))
    if settings.metric is None:
        return known
    # The name of a user's metric is known once it is loaded.
    return (*known, name_of(load_function(settings.metric, "metric")))
