"""``make_private``: a Keras model that trains privately on data in memory, or Parquet.

    model = make_private(network, {"x": x, "label": y}, batch_size=256, epochs=3,
                         epsilon=3)

The batch job of `dpsgd batches` samples the batches of the whole run, in a process of
its own.  Batches hold rows, so they lie in the private folder of the run:

    RUN/private/data.parquet   the columns, if they were in memory
    RUN/private/batches/       the batches
    RUN/private/made_of.json   digests of data and settings, which they are made of

Before anything is written, all settings are checked, and the columns to be those that
the model takes.
Batches are made once.  A call with the same data and settings finishes the batches, or
takes them as they are; a call with others is refused, as models may wait for them.
Until the model trains, nothing outside of RUN/private depends on a row.

Public: sizes, columns and settings.  Sensitive: the files above.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from accounting.core.plan import AUTO_BANDS, CYCLIC, TRUNCATED_POISSON
from accounting.core.validation import InputError, check_float
from dpsgd.fit_stages import default_delta, sizes
from pipelines.batches.folder import MANIFEST_NAME, PRIVATE_NAME
from pipelines.core.batches.manifest import Manifest
from pipelines.core.files.locks import locked
from pipelines.files import processes, storage
from pipelines.files.outputs import make_private_folder
from pipelines.files.storage import pretty_json, read_json
from pipelines.inputs.parquet_blocks import list_blocks, seems_user_column
from pipelines.job.batch_settings import MAKE_BATCHES, BatchSettings
from pipelines.job.job_folder import JOB_NAME
from pipelines.job.sizing import make_layout
from pipelines.tables import prepared_files
from trainer import keras_model, models
from trainer.claims import launch
from trainer.gradients.model_check import check_inputs
from trainer.keras_model import PrivateModel
from trainer.model.metrics import LABEL
from trainer.model.trainable_model import TrainableModel
from trainer.model.user_code import one_line_errors
from trainer.run import preflight
from trainer.settings.requests import check_local
from trainer.settings.train_settings import TrainSettings

#: Most memory that noise of earlier steps takes, of bands that are chosen here.
_MOST_MEMORY = 2 << 30


def make_private(
    model: Any,
    data: Any = None,
    *,
    batches: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    sampler: str = TRUNCATED_POISSON,
    bands: int | str = AUTO_BANDS,
    run: str | os.PathLike[str] = "run",
    epsilon: float | None = None,
    delta: float | None = None,
    **training: Any,
) -> PrivateModel:
    """Returns a Keras model that trains privately on ``data``, or on ``batches``.

    A row of the data is what is protected.  ``fit`` then takes no data:

        model = make_private(network, {"x": x, "label": y}, epsilon=3)
        model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
        model.fit(validation_data=(x_of_others, y_of_others))
        print(model.privacy_statement().to_text())

    Args:
      model: A Keras model whose inputs are named like columns of the data, or a
        ``tf.Module`` to call on a dict of columns; its weights are trained in place.  A
        single input needs no name.
      data: A pandas DataFrame of numbers, a pyarrow Table, a dict of arrays of shape
        (rows, ...), or the path of Parquet files; with a column ``label``.
      batches: Folder that ``dpsgd batches`` wrote, in place of data.
      batch_size: Expected rows of a step; that of `dpsgd fit` if None.
      epochs: Rounds of rows / batch_size steps; those of `dpsgd fit` if None.
      sampler: How rows are assigned to steps, as in ``BatchSettings``.
      bands: Bands of correlated noise; 1 for independent noise.  "auto": that of the
        batches in the folder of the run, or, for a target epsilon, the number by the
        rule of `accounting.bands`; 1 where sampler, method or rows of users
        need it.  A large model gets fewer: their noise stays below 2 GiB.
      run: Folder of the run: new, or that of the same call before, which goes on.
      epsilon: Target for the whole plan, which determines the noise.
      delta: Delta of the target and of the statement; for data, if None, the largest
        power of ten that is at most 0.1 / rows.
      **training: As of ``trainer.keras_model.make_private``: ``noise_multiplier`` in
        place of epsilon, ``l2_norm_clip``, ``clip_quantile``, ``method`` and its own
        settings, ``views``, ``augment``, and more.

    Raises:
      InputError: an argument is refused.
    """
    if (data is None) == (batches is None):
        raise InputError(
            "Expected either data or batches, a folder that `dpsgd batches` wrote; got "
            f"{'neither' if data is None else 'both'}."
        )
    source: Any = batches
    if batches is None:
        run = pathlib.Path(run)
        check_local(run=run)
        _check_alone()
        if epsilon is not None:
            check_float("epsilon", epsilon, above=0)
        preflight.check_run_folder(run)
        rows = _Rows(data, run)
        count = rows.dataset.num_examples
        usual_size, usual_epochs = sizes(count)
        settings = BatchSettings(
            expected_batch_size=usual_size if batch_size is None else batch_size,
            num_epochs=usual_epochs if epochs is None else epochs,
            sampler=sampler,
            bands=1 if bands == AUTO_BANDS else bands,  # type: ignore[arg-type]
            # Not the target itself: another one may be tried on the same batches.
            epsilon=max(BatchSettings.epsilon, epsilon or 0),
        )
        if delta is None and (epsilon or training.get("noise_multiplier")):
            delta = default_delta(count)
        source = functools.partial(
            rows.sampled, settings, model, chooses_bands=bands == AUTO_BANDS
        )
    elif (batch_size, epochs, sampler, bands) != (
        None, None, TRUNCATED_POISSON, AUTO_BANDS,
    ):  # fmt: skip
        raise InputError(
            "Expected no batch_size, epochs, sampler and bands with batches, which "
            "have them."
        )
    return keras_model.make_private(
        model, batches=source, run=run, epsilon=epsilon, delta=delta, **training
    )


def _num_parameters(model: Any) -> int:
    """Returns the number of trainable parameters, as far as they are built."""
    variables = getattr(model, "trainable_variables", ())
    return sum(math.prod(variable.shape) for variable in variables)


class _Rows:
    """The rows of a run, and its batches.

    Args:
      data: As in ``make_private``.
      run: Folder of the run.

    Attributes:
      dataset: Columns and number of the rows.
    """

    def __init__(self, data: Any, run: pathlib.Path) -> None:
        self._run, self._private = run, run / PRIVATE_NAME
        self._columns: dict[str, np.ndarray] | None = None
        if isinstance(data, str | os.PathLike):
            self._source = os.fspath(data)
            self.dataset = list_blocks(self._source)
            self._digest = self.dataset.digest
        else:
            self._source = str(self._private / "data.parquet")
            self._columns = prepared_files.columns_of(data)
            label = self._columns.get(LABEL)
            if label is not None and label.shape[1:] == (1,):  # as Keras takes it, too
                self._columns[LABEL] = label.ravel()
            self.dataset = prepared_files.described(self._columns, self._source)
            self._digest = prepared_files.digest(self._columns)
        name = None if self.dataset.bounded else seems_user_column(self.dataset.columns)
        if name is not None:
            warnings.warn(
                f"Column {name} seems to name users; the model protects single rows. "
                f"To protect all rows of a user, use `dpsgd prepare --user {name}`.",
                stacklevel=3,
            )

    @property
    def _batches(self) -> pathlib.Path:
        return self._private / "batches"

    def _permit_bands(self, settings: BatchSettings, training: TrainSettings) -> bool:
        """Whether noise of bands is proven for sampler, method, noise and rows."""
        bounded = self.dataset.bounded
        return (
            settings.sampler in CYCLIC
            and preflight.needs_independent_noise(training) is None
            and (bounded is None or bounded.max_examples_per_user == 1)
        )

    def _with_bands(
        self, settings: BatchSettings, training: TrainSettings, model: Any
    ) -> BatchSettings:
        """Returns settings with the bands of batches that are there, or by the rule."""
        if self._record.exists():
            bands = read_json(self._record).get("bands", 1)
            return dataclasses.replace(settings, bands=bands)
        if training.target_epsilon is None:
            return settings
        return settings.with_best_bands(
            self.dataset.num_examples,
            epsilon=training.target_epsilon,
            most=1 + _MOST_MEMORY // (8 * max(1, _num_parameters(model))),
            of_runs=training.of_runs,
        )[0]

    def sampled(
        self,
        settings: BatchSettings,
        model: Any,
        training: TrainSettings,
        *,
        chooses_bands: bool,
    ) -> pathlib.Path:
        """Returns the folder of the batches, which it makes unless they are there.

        Args:
          settings: How to sample.
          model: As in ``make_private``.
          training: Settings of the run.
          chooses_bands: Whether the bands are chosen here.

        Raises:
          InputError: the model takes other columns, the settings do not suit the
            batches, or the folder holds other batches.
        """
        if chooses_bands and self._permit_bands(settings, training):
            settings = self._with_bands(settings, training, model)
        plan = settings.plan(self.dataset.num_examples)
        planned = make_layout(plan, self.dataset).manifest(self.dataset.description)
        preflight.check_settings(training, planned)
        _check_columns(model, planned)
        made_of = {
            "data": self._digest, "bands": plan.bands or 1,
            "settings": planned.fingerprint,
        }  # fmt: skip
        self._check_made_of(made_of)
        is_begun = (self._batches / PRIVATE_NAME / JOB_NAME).exists()
        if (self._batches / MANIFEST_NAME).exists() and not is_begun:
            return self._batches
        self._run.mkdir(parents=True, exist_ok=True)
        make_private_folder(self._private)
        with locked(self._private, self._run):
            self._check_made_of(made_of)  # of another process in the meantime
            storage.write_atomically(self._record, pretty_json(made_of), mode=0o600)
            if self._columns is not None and not os.path.exists(self._source):
                prepared_files.write_columns(pathlib.Path(self._source), self._columns)
            processes.call(MAKE_BATCHES, self._source, str(self._batches), settings)
        return self._batches

    @property
    def _record(self) -> pathlib.Path:
        return self._private / "made_of.json"

    def _check_made_of(self, made_of: Mapping[str, Any]) -> None:
        """Refuses the folder of a run whose batches are of something else."""
        found = read_json(self._record) if self._record.exists() else made_of
        for name, value in made_of.items():
            if found.get(name) != value:
                raise InputError(
                    f"Expected the {name} of which the batches in run={self._run} were "
                    "sampled; these are others. Give the same, or another run=."
                )


def _check_alone() -> None:
    """Refuses several workers, each of which would sample its own batches."""
    _, count = launch.announced(os.environ)
    if count > 1:
        raise InputError(
            f"Expected one process to sample the batches of data, not {count}. Make "
            "them before, by `dpsgd batches`, and give batches=."
        )


def _check_columns(model: Any, planned: Manifest) -> None:
    """Refuses columns that the model does not take, as ``compile`` would."""
    with one_line_errors("the model"):
        network = models.as_functional(model, planned)
    trainable = TrainableModel(network=network, description={}, columns=planned.columns)
    check_inputs(trainable, planned)
