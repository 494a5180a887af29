"""``make_private``: a Keras model whose ``fit`` is DP-SGD on batches of the pipeline.

    model = make_private(network, batches="batches", run="run", epsilon=3, delta=1e-6)
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), ["AUC"])
    model.fit(epochs=2, validation_data=(x, y), callbacks=[...])
    print(model.privacy_statement().to_text())

``fit`` has its own loop (``trainer.training_loop``), which calls Keras's callbacks.  A
``train_step`` in Keras's loop could receive any data set, repeated, truncated or
shuffled, and would see single physical batches, while noise is added per step.  There
is no other trainer: ``dpsgd train`` builds a model of this class, and calls its
``fit``.

An epoch is ``num_examples / expected_batch_size`` steps of the plan, to the nearest
integer.  Every call of ``fit`` trains for ``epochs - initial_epoch`` epochs from the
current step on or, without ``epochs``, to the end of the plan, for which the noise was
chosen.  A batch, for callbacks, is a step of the plan.  TensorBoard's callback needs
the package ``tensorboard``.

To go on after the process was killed, run the same code again: the model opens the
folder at its last checkpoint, calls of ``fit`` that had ended return at once, and the
one that had not goes on to its end, with weights and optimizer of the checkpoint,
whatever code did before it.  Callbacks begin anew; what they keep in Python is lost.
A run that an error has ended goes on in no process.

What ``fit`` keeps to:
  - Every step of the plan is consumed at most once and in order, however often ``fit``
    is called.
  - A state is committed before anything else sees it: validation, callbacks at the end
    of an epoch, files, and the code after ``fit``, also after Ctrl-C.  (Code that reads
    weights within a step is not covered.)
  - A private run marks its batches before its first noise is drawn, and is refused if
    another run has marked them: see ``pipelines.batches.first_use``.
  - No run begins at weights that another run of the process trained on the same rows.
  - No loss or metric of training examples is computed, and no error quotes an example.
  - A run that stopped early has a statement, with the epsilon of the whole plan.

Public: weights and logs.  Sensitive: the rest.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from accounting.core.plan import steps_per_epoch
from accounting.core.validation import InputError, check_int
from pipelines.batches.folder import read_certificate, read_manifest
from pipelines.files.storage import StrPath
from pipelines.tables import prepared_files
from trainer import models
from trainer.claims import launch
from trainer.claims.lazy_noise import is_plain_sgd
from trainer.core.run.redact_errors import redact_errors
from trainer.core.tf_compat import keras, raw_variable, tf
from trainer.export import check_export, export, own_numbers, save_tensorflow
from trainer.fitting import (
    Epoch,
    add_validation_point,
    check_callbacks,
    numbers_of,
    plan_epochs,
)
from trainer.model import weights as initial_weights_files
from trainer.model.layers import as_keras
from trainer.model.losses import loss_of_keras
from trainer.model.trainable_model import (
    TrainableModel,
    Views,
    named_inputs,
    nested_inputs,
)
from trainer.model.user_code import one_line_errors
from trainer.report.progress import Silent
from trainer.run import preflight, privacy
from trainer.run.optimizers import optimizer_of_keras
from trainer.settings.methods import DP_SGD
from trainer.settings.requests import check_batches, check_local
from trainer.settings.train_settings import AggregationSettings, TrainSettings
from trainer.training_loop import Training

_RUN_STAYS = (
    "Give a folder here, such as 'run', and copy it once the run is complete; `dpsgd "
    "train --out` takes a store."
)
#: Fields of ``TrainSettings`` that are not by name in ``make_private``.
_MORE = {"embedding_noise", *(f.name for f in dataclasses.fields(AggregationSettings))}

#: Arguments of Keras's ``compile`` that have one value here.
_SET_HERE = [("jit_compile", False), ("auto_scale_loss", False)]

#: Arguments of Keras's ``fit`` that the plan determines.
_OF_THE_PLAN = {
    "batch_size": "the plan has the batch size: give it to `dpsgd batches`",
    "shuffle": "the sampler has drawn the order: omit it",
    "validation_split": "the batches are of all rows: give validation_data",
    "class_weight": "give compile a loss that weights the classes",
    "sample_weight": "give compile a loss that weights the examples",
}


def _changed(method: Any, given: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that have another value than in Keras's method, or here."""
    known = inspect.signature(method).parameters
    return [
        name
        for name, value in given.items()
        if not (name in known and np.ndim(value) == 0 and value == known[name].default)
        and (name, value) not in _SET_HERE
    ]


def _views(settings: TrainSettings, augment: Any) -> Views:
    name = getattr(augment, "name", getattr(augment, "__name__", "augment"))
    return Views(
        number=settings.views,
        augment=augment,
        name=name if augment is not None else None,
    )


def make_private(
    model: Any,
    *,
    batches: StrPath | Callable[[TrainSettings], StrPath],
    run: str | os.PathLike[str],
    l2_norm_clip: float | Literal["auto"] | None = None,
    clip_quantile: float | None = None,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    of_runs: int = 1,
    allow_large_delta: bool = False,
    method: str = DP_SGD,
    views: int = 1,
    augment: Any = None,
    initial_weights: str | os.PathLike[str] | None = None,
    initial_weights_are_public: bool = False,
    batches_used_before: bool = False,
    checkpoint_every: int | None = None,
    **more: Any,
) -> PrivateModel:
    """Returns a Keras model that trains privately on ``batches``.

    Args:
      model: A Keras model whose inputs are named like columns of the batches, or a
        ``tf.Module`` to call on a dict of columns; its weights are trained in place.
      batches: Folder that ``dpsgd batches`` wrote, here or in a store (``s3://``); or a
        function that makes it, and is called once the settings are checked.
      run: Folder of the run, new or of this run, unfinished.
      l2_norm_clip: Bound on the L2 norm of one example's gradient; "auto", the
        default, follows a quantile of the norms, at the same epsilon.
      clip_quantile: Share of the norms that the automatic clip exceeds; 0.9 if None.
      noise_multiplier: Noise standard deviation over ``l2_norm_clip``; give this or
        ``epsilon``.
      epsilon: Target for the whole plan, which determines the noise; needs ``delta``.
      delta: Delta of the target and of the statement.
      of_runs: Number of runs of this plan on this table, each on batches of its own,
        that have the target together; declared before the first.
      allow_large_delta: Whether to accept a delta that protects next to nothing.
      method: "dp-sgd", "bam", "dp-sat", "model-mix", "non-private", or another that is
        registered.
      views: Views per example, made by ``augment``, whose mean loss is used.
      augment: A function (columns of one example, seed) -> columns of one view.
      initial_weights: File of weights to start at, which record and statement then
        name; those of ``model`` if None.
      initial_weights_are_public: Declares that file public; required with it.
      batches_used_before: Accepts batches that another private run has used.  Nothing
        is proven for both runs together, and the privacy statement says so.
      checkpoint_every: Steps between checkpoints, besides those at the end of each
        epoch; one per minute if None.
      **more: The method's own settings, such as ``bam_radius=0.02``; averages of the
        iterates, such as ``ema_decay=0.999`` (see ``AggregationSettings``);
        ``embedding_noise``.

    Raises:
      InputError: an argument is refused.
    """
    model = as_keras(model)
    if isinstance(model, PrivateModel):
        raise InputError(
            "Expected a plain Keras model; this one is private already. Give its "
            ".network."
        )
    settings = TrainSettings(
        method=method,
        target_epsilon=epsilon,
        target_delta=delta,
        of_runs=of_runs,
        allow_large_delta=allow_large_delta,
        noise_multiplier=noise_multiplier,
        l2_norm_clip=l2_norm_clip,
        clip_quantile=clip_quantile,
        initial_weights=(
            None if initial_weights is None else os.fspath(initial_weights)
        ),
        initial_weights_are_public=initial_weights_are_public,
        method_settings={n: value for n, value in more.items() if n not in _MORE},
        views=views,
        optimizer="sgd",  # until compile
        **{name: value for name, value in more.items() if name in _MORE},
    )
    if augment is not None and not callable(augment):
        raise InputError("Expected augment to be a function (columns, seed).")
    of_example = _views(settings, augment)
    return _made(
        model,
        settings,
        batches(settings) if callable(batches) else batches,
        pathlib.Path(run),
        views=of_example,
        batches_used_before=batches_used_before,
        checkpoint_every=checkpoint_every,
    )


def _made(
    model: Any,
    settings: TrainSettings,
    batches: StrPath,
    run: pathlib.Path,
    *,
    views: Views,
    batches_used_before: bool,
    checkpoint_every: int | None,
) -> PrivateModel:
    """Does what ``make_private`` does, with settings."""
    check_batches(batches)
    check_local(_RUN_STAYS, run=run)
    manifest = read_manifest(batches)
    preflight.check_files(batches, manifest)
    preflight.check_settings(settings, manifest)
    resumes = preflight.check_run_folder(run)
    preflight.check_unused(batches, run, settings, shared=batches_used_before)
    with one_line_errors("the model"):
        network = models.as_functional(model, manifest)
    variables = [*map(raw_variable, network.trainable_variables)]
    started_at = initial_weights_files.start_at(settings.initial_weights, variables)
    workers = launch.of_this_process()
    training = Training(
        settings=settings,
        manifest=manifest,
        noise_multiplier=preflight.noise_multiplier_of(settings, manifest),
        batches=batches,
        run=run,
        workers=workers,
        reporter=_Printing() if workers.is_chief else Silent(),
        checkpoint_every=checkpoint_every,
        batches_used_before=batches_used_before,
    )
    return PrivateModel(
        network,
        training,
        views=views,
        started_at=started_at,
        resumes=resumes,
    )


def _has_columns(data: Any) -> bool:
    """Whether data is a dict of columns, an Arrow table or a DataFrame."""
    return isinstance(data, Mapping | pa.Table) or hasattr(data, "columns")


def _columns_of(data: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the columns of data; refuses data without one of ``names``."""
    columns = prepared_files.columns_of(data)
    for name in names:
        if name not in columns:
            raise InputError(
                f"Expected data with a column {name!r}; it has "
                f"{', '.join(sorted(columns))}. Add it, or give arrays as Keras does."
            )
    return {name: columns[name] for name in names}


class _Printing(Silent):
    """Prints the lines that a user of ``make_private`` must not miss."""

    def say(self, text: str) -> None:
        """Prints one line."""
        print(text)


class PrivateModel(keras.Model):
    """A private model; ``network`` is the plain model with its weights.

    ``save`` and ``save_weights`` write ``network``, which loads without this package.
    """

    def __init__(
        self,
        network: Any,
        training: Training,
        *,
        views: Views,
        started_at: Mapping[str, Any] | None = None,
        resumes: bool = False,
        held: contextlib.ExitStack | None = None,
    ) -> None:
        super().__init__(name=network.name)
        self.network = network
        self._training, self._session = training, training.session
        self._workers = training.session.workers
        self._started_at, self._views, self._resumes = started_at, views, resumes
        # The model of one view, for evaluation, export and prediction.
        self._manifest = training.session.manifest
        #: What holds the lock of the folder.  If None, each ``fit`` does, and the one
        #: that takes the last step ends the run.
        self._held = held
        self._num_fits = 0
        #: Calls of ``fit`` that this process has begun.
        self._num_begun_here = 0
        # Not named _trainable, an attribute of Keras's.
        self._checked_model: TrainableModel | None = None
        self.build(None)

    # -- Keras's methods -----------------------------------------------------------

    @property
    def layers(self) -> list[Any]:
        """The layers of the network."""
        return [*self.network.layers]

    @property
    def inputs(self) -> list[Any]:
        """The inputs of the network."""
        return [*self.network.inputs]

    @property
    def outputs(self) -> list[Any]:
        """The outputs of the network."""
        return [*self.network.outputs]

    def summary(self, *args: Any, **more: Any) -> None:
        """Prints the layers of the network; see `keras.Model.summary`."""
        self.network.summary(*args, **more)

    def build(self, input_shape: Any) -> None:
        """Does nothing: the network is built."""
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the outputs of the network.

        Args:
          inputs: A tensor (batch, ...), or a dict of them by column.
          training: As in Keras; in ``fit`` only dropout depends on it.
        """
        if isinstance(inputs, Mapping):
            inputs = nested_inputs(self.network, inputs)
        return self.network(inputs, training=training)

    def save(self, *args: Any, **more: Any) -> None:
        """Saves the plain network; see `keras.Model.save`."""
        with own_numbers():
            self.network.save(*args, **more)

    def export(self, filepath: Any = None) -> None:
        """Writes a SavedModel that takes named columns and returns predictions.

        Args:
          filepath: New folder of the SavedModel.  If None, everything that ``dpsgd
            train`` exports goes into the folder of the run, for ``dpsgd predict``.

        Raises:
          InputError: the model was not compiled, the run has not begun, or a name in
            the SavedModel would tell how many rows the batches had.
        """
        model, session = self._compiled(), self._session
        if filepath is not None:
            save_tensorflow(model, self._manifest, os.fspath(filepath))
        elif session.is_open:
            if not self._workers.is_chief:
                return
            session.check_folder()
            export(model, self._manifest, session.run)
            for name in self._training.averages:
                with self._training.averages.swapped(name):
                    export(model, self._manifest, session.run, average=name)
        else:
            raise InputError("Expected fit before export to the folder of the run.")

    def save_weights(self, *args: Any, **more: Any) -> None:
        """Saves the weights of the plain network; see `keras.Model.save_weights`."""
        self.network.save_weights(*args, **more)

    def load_weights(self, *args: Any, **more: Any) -> Any:
        """Loads weights of the plain network; see `keras.Model.load_weights`."""
        return self.network.load_weights(*args, **more)

    def train_on_batch(self, *args: Any, **more: Any) -> None:
        """Raises InputError: only ``fit`` trains, with steps of the plan."""
        raise InputError("Expected fit; train_on_batch would train without privacy.")

    train_step = train_on_batch  # of Keras's own loops

    #: Keras's own, of which no error quotes an example.
    _evaluate = redact_errors(keras.Model.evaluate, tf.errors.OpError)
    _predict = redact_errors(keras.Model.predict, tf.errors.OpError)
    test_on_batch = redact_errors(keras.Model.test_on_batch, tf.errors.OpError)
    predict_on_batch = redact_errors(keras.Model.predict_on_batch, tf.errors.OpError)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **more: Any) -> Any:
        """Returns the loss and metrics; see `keras.Model.evaluate`.

        Args:
          x: As in Keras; without ``y`` also columns as those of ``validation_data``.
          y: As in Keras.
          *args: Keras's other arguments.
          **more: Keras's other arguments.
        """
        if y is None and _has_columns(x):
            x, y = self._pair_of(x)
        return self._evaluate(x, y, *args, **more)

    def predict(self, x: Any, *args: Any, **more: Any) -> Any:
        """Returns the outputs; see `keras.Model.predict`.

        Args:
          x: As in Keras, or a DataFrame or an Arrow table with the inputs as columns.
          *args: Keras's other arguments.
          **more: Keras's other arguments.
        """
        if _has_columns(x) and not isinstance(x, Mapping):
            x = _columns_of(x, [*named_inputs(self.network)])
        return self._predict(x, *args, **more)

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        loss_weights: Mapping[str, float] | None = None,
        **more: Any,
    ) -> None:
        """Sets a Keras optimizer, a per-example loss, and metrics.

        Args:
          optimizer: Optimizer of Keras, or its name.
          loss: Loss of Keras, its name, or a function (labels, outputs) -> one
            number per example or position; for a dict of outputs a dict of losses.
          metrics: As in Keras; ``evaluate`` and validation compute them.
          loss_weights: Factor of the loss of each output by name; None for 1.
          **more: Keras's other arguments, with its defaults.

        Raises:
          InputError: there is another argument, a model or loss that does not support
            per-example clipping, a model that cannot be exported, or an optimizer that
            is not Keras's.
        """
        unknown = _changed(keras.Model.compile, more)
        if unknown:
            raise InputError(
                "Expected compile with optimizer, loss, loss_weights and metrics; "
                f"{', '.join(unknown)} is not supported under privacy."
            )
        trainable = TrainableModel(
            network=self.network,
            description={"name": self.network.name, **(self._started_at or {})},
            loss=loss_of_keras(loss, loss_weights, self.network.output),
            columns=self._manifest.columns,
        )
        models.check_model(trainable, self._manifest)
        check_export(trainable, self._manifest)
        optimizer = optimizer_of_keras(optimizer)
        settings = self._compiled_settings(optimizer)
        super().compile(
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            loss_weights=loss_weights,
            jit_compile=False,
            auto_scale_loss=False,
        )
        described = {
            "name": settings.optimizer,
            "class": type(optimizer).__name__,
            "ema_decay": settings.ema_decay,
            **settings.describe_past(),
            **settings.describe_feedback(),
        }
        self.train_with(trainable, settings, optimizer, described)

    def _compiled_settings(self, optimizer: Any) -> TrainSettings:
        """Returns the settings with the name of the optimizer, which methods check."""
        kind = type(optimizer)
        name = (
            "sgd" if is_plain_sgd(optimizer) else f"{kind.__module__}:{kind.__name__}"
        )
        return dataclasses.replace(self._session.settings, optimizer=name)

    def train_with(
        self,
        model: TrainableModel,
        settings: TrainSettings,
        optimizer: Any,
        described: Mapping[str, Any],
    ) -> TrainableModel:
        """Sets what ``fit`` trains; ``compile`` and ``dpsgd train`` call it.

        Args:
          model: A model that ``check_model`` accepted.
          settings: Settings of the run, with the name of the optimizer.
          optimizer: Keras optimizer.
          described: Entry of the optimizer in the record.

        Returns:
          The model of a step, over all views or rows of an example.
        """
        self._checked_model = model
        self._compiled_by = (settings, described)
        trained = models.make_trained(model, self._session.manifest, self._views)
        self._num_parameters = sum(int(np.prod(v.shape)) for v in model.variables)
        trained = trained.described({"num_parameters": self._num_parameters})
        self._training.use(
            model,
            trained,
            settings=settings,
            optimizer=optimizer,
            description=described,
        )
        return trained

    # -- training ------------------------------------------------------------------

    @property
    def num_steps_executed(self) -> int:
        """Number of executed steps of the plan."""
        return self._session.num_steps_executed

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps per epoch; the last epoch may have fewer."""
        plan = self._session.manifest.plan
        return steps_per_epoch(plan.num_examples, plan.expected_batch_size)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        epochs: int | None = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        callbacks: Any = None,
        verbose: Any = "auto",
        validation_data: Any = None,
        validation_freq: int = 1,
        **more: Any,
    ) -> Any:
        """Trains for ``epochs - initial_epoch`` epochs; returns Keras's ``History``.

        Args:
          x: Must be None: the batches were given to ``make_private``.
          y: Must be None.
          epochs: Index of the epoch to end before; to the end of the plan if None.
          initial_epoch: Index of the first epoch.
          steps_per_epoch: Steps of the plan in an epoch; about one pass over the
            examples if None.
          callbacks: Callbacks of Keras.  A batch is a step of the plan.  Values that
            they decide by must be released, as metrics of validation data are.
          verbose: As in Keras.
          validation_data: ``(x, y)``, ``(x, y, sample_weight)`` or a data set; or a
            DataFrame, an Arrow table or a dict of arrays with the label among its
            columns.  Whether it holds training examples is not checked; their metrics
            are not private.
          validation_freq: Epochs between validations.
          **more: Keras's other arguments are refused.

        Raises:
          InputError: fewer steps are left, or an argument is not supported.
        """
        self._check_fit(x, y, more)
        self._training.check_goes_on()
        check_int("validation_freq", validation_freq, at_least=1)
        check_callbacks(callbacks, validates=validation_data is not None)
        validation_data = self._pair_of(validation_data)
        self._check_validation(validation_data)
        if not self._workers.is_chief:
            callbacks, validation_data, verbose = None, None, 0
        size = self.steps_per_epoch if steps_per_epoch is None else steps_per_epoch
        validate = functools.partial(self._validate, validation_data, validation_freq)
        given = {
            "epochs": epochs, "initial_epoch": initial_epoch, "steps_per_epoch": size,
            "optimizer": self._compiled_by[0].optimizer,
            "loss": self._compiled().loss.name,
            "num_parameters": self._num_parameters,
        }  # fmt: skip
        with self._opened(given) as (begun, plan):
            listed = keras.callbacks.CallbackList(
                callbacks, add_history=True, add_progbar=verbose != 0, model=self,
                verbose=1 if verbose == "auto" else verbose,
                epochs=plan[-1].index + 1, steps=size,
            )  # fmt: skip
            if begun["ended"]:
                self._recall()
            else:
                self._num_begun_here = self._num_fits + 1
                try:
                    with self._training.attempt(plan[-1].end):
                        self._run(begun, plan, listed, validate)
                finally:
                    self._note_weights()
            self._num_fits += 1
            is_last = self._num_fits == len(self._session.fits)
            if self._is_complete and is_last and self._held is None:
                self._training.finish()
        return self.history

    def _pair_of(self, data: Any) -> Any:
        """Returns columns with the label among them as ``(x, y)``, else ``data``."""
        if not _has_columns(data):
            return data
        model = self._compiled()
        columns = _columns_of(data, [*model.input_names, *model.label_names])
        return {name: columns[name] for name in model.input_names}, model.labels(
            columns
        )

    def _check_validation(self, data: Any) -> None:
        """Validates by one batch, before a step: what fails later ends the run."""
        if data is not None and not isinstance(data, Iterator):  # of which it would go
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            self._evaluate(x, y, sample_weight=weights, steps=1, verbose=0)

    @contextlib.contextmanager
    def _opened(
        self, given: Mapping[str, Any]
    ) -> Iterator[tuple[dict[str, Any], list[Epoch]]]:
        """Holds the folder of the run; yields the entry of ``fit``, and its epochs."""
        with contextlib.ExitStack() as own:
            held = own if self._held is None else self._held
            is_known = self._training.is_current or not self._resumes
            if not is_known:
                self._open(held)
            begun = self._begun(**given)
            plan = self._epochs_of(begun)
            if is_known:  # refused before anything is written
                self._open(held)
            yield begun, plan

    def _open(self, held: contextlib.ExitStack) -> None:
        """Opens the folder of the run, at its last commit."""
        run, resumes = self._session.run, self._resumes
        # The chief's folder is none of the others' business.
        is_new = self._workers.is_chief and not self._session.is_open
        if is_new and preflight.check_run_folder(run) != resumes:
            raise InputError(f"Expected run={run} to be as when the model was made.")
        settings, described = self._compiled_by
        model = self._compiled()
        identity = {
            **dataclasses.asdict(settings), "loss": model.loss.name,
            "optimizer_settings": described,
            # Not the name of their file, whose contents the record tells.
            "initial_weights": model.description.get("initial_weights"),
        }  # fmt: skip
        self._training.open(
            held, resumes=resumes, settings=identity, fit=self._num_fits
        )

    def _begun(self, **given: Any) -> dict[str, Any]:
        """Returns the entry of this call of ``fit``, which an earlier process may have.

        Raises:
          InputError: that process called it with other arguments.
        """
        fits, number = self._session.fits, self._num_fits
        if number == len(fits):
            fits.append(
                {**given, "first_step": self.num_steps_executed, "ended": False}
            )
        begun = fits[number]
        for name, value in given.items():
            if begun[name] != value and self._num_begun_here > number:
                begun["ended"] = True  # this process interrupted it
                self._num_fits += 1
                return self._begun(**given)
            if begun[name] != value:
                raise InputError(
                    f"Expected {name}={value!r} of this call of fit to be "
                    f"{begun[name]!r}, as when the run in {self._session.run} was "
                    "interrupted. Give the same as before."
                )
        return begun

    def _epochs_of(self, begun: Mapping[str, Any]) -> list[Epoch]:
        try:
            return plan_epochs(
                epochs=begun["epochs"],
                initial_epoch=begun["initial_epoch"],
                steps_per_epoch=begun["steps_per_epoch"],
                done=begun["first_step"],
                num_steps=self._session.num_steps,
            )
        except InputError:
            del self._session.fits[self._num_fits :]  # it was not begun
            raise

    def _run(
        self,
        begun: dict[str, Any],
        plan: list[Epoch],
        listed: Any,
        validate: Callable[[Epoch], dict[str, Any]],
    ) -> None:
        """Takes the steps of a call of ``fit`` that are left."""
        training, session = self._training, self._session
        training.share()
        training.commit()
        self.stop_training, logs = False, dict[str, Any]()
        listed.on_train_begin()
        self._recall()
        for epoch in plan:
            if training.shown >= epoch.end:
                continue  # an earlier process has taken and shown it
            training.rates = training.current_rates()
            listed.on_epoch_begin(epoch.index)
            self._epoch(epoch, listed)
            self._note_weights()
            logs = validate(epoch)
            listed.on_epoch_end(epoch.index, logs)
            training.shown, training.rates = session.num_steps_executed, None
            training.histories[str(self._num_fits)] = numbers_of(self.history)
            if training.agrees(self.stop_training):
                break
        listed.on_train_end(logs)
        begun["ended"] = True
        if session.num_steps_executed < session.num_steps:
            training.commit()

    def _recall(self) -> None:
        """Sets the history to that of the epochs of this ``fit`` that were shown."""
        found = self._training.histories.get(str(self._num_fits), {})
        self.history.epoch = [*found.get("epoch", ())]
        self.history.history |= copy.deepcopy(found.get("history", {}))

    def privacy_statement(self) -> Any:
        """Returns the statement of the executed steps; ``to_text()`` formats it.

        For a run that stopped early, it states the epsilon of the whole plan, which
        bounds every prefix.

        Raises:
          InputError: there is no delta.
        """
        return privacy.run_statement(
            self._session.record(complete=self._is_complete),
            self._session.manifest,
            delta=None,
            allow_large_delta=self._session.settings.allow_large_delta,
            certificate=read_certificate(self._session.run),
        )

    def _check_fit(self, x: Any, y: Any, more: Mapping[str, Any]) -> None:
        if x is not None or y is not None:
            raise InputError("Expected fit without data: make_private got the batches.")
        for name in _changed(keras.Model.fit, more):
            why = _OF_THE_PLAN.get(name, "omit it")
            raise InputError(f"Expected no {name} in fit; {why}.")
        self._compiled()

    def _epoch(self, epoch: Epoch, listed: Any) -> None:
        """Takes and commits the steps of an epoch that are left."""

        def before() -> None:
            listed.on_train_batch_begin(self.num_steps_executed - epoch.begin)

        def after() -> None:
            listed.on_train_batch_end(self.num_steps_executed - epoch.begin - 1, {})

        self._training.take_steps(epoch.end, before=before, after=after)

    def _validate(self, data: Any, every: int, epoch: Epoch) -> dict[str, Any]:
        if data is None or (epoch.index + 1) % every:
            return {}
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        found = self.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
        add_validation_point(
            self._session.run,
            self._training.points,
            found,
            method=self._session.settings.method,
            step=self.num_steps_executed,
            data=data,
        )
        return {f"val_{name}": value for name, value in found.items()}

    # -- the run -------------------------------------------------------------------

    def _compiled(self) -> TrainableModel:
        if self._checked_model is None:
            raise InputError("Expected compile before fit.")
        return self._checked_model

    def _note_weights(self) -> None:
        """Notes the weights that code of this process may give to another network."""
        if self._held is None:  # `dpsgd train` makes its network for itself
            initial_weights_files.note(self.network)

    @property
    def _is_complete(self) -> bool:
        return self.num_steps_executed == self._session.num_steps
