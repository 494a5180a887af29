"""``make_private``: a Keras model whose ``fit`` is DP-SGD on batches of the pipeline.

    model = make_private(network, batches="batches", run="run", epsilon=3, delta=1e-6)
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), ["AUC"])
    model.fit(epochs=2, validation_data=(x, y), callbacks=[...])
    print(model.privacy_statement().to_text())

``fit`` has its own loop, which calls Keras's callbacks.  A ``train_step`` in Keras's
loop could receive any data set, repeated, truncated or shuffled, and would see single
physical batches, while noise is added per step.

An epoch is ``num_examples / expected_batch_size`` steps of the plan, to the nearest
integer.  Every call of ``fit`` trains for ``epochs - initial_epoch`` epochs from the
current step on or, without ``epochs``, to the end of the plan, for which the noise was
chosen.  A batch, for callbacks, is a step of the plan.

Formal guarantees:
  - Steps, batches, noise, record and statement are those of ``dpsgd train``: every step
    of the plan is consumed at most once and in order, however often ``fit`` is called.
  - The record on disk counts all executed steps, also if ``fit`` ends early.
  - A run that stopped early has a statement, with the epsilon of the whole plan, unless
    metrics of training examples may have stopped it.
  - After an exception within a step the run cannot continue: the noise of that step may
    have been released, and is not used twice.
  - A run folder is used by one object: no noise is drawn twice from one run id.
  - A private run marks its batches before its first noise is drawn, and is refused if
    another one has: see ``pipelines.batches.first_use``.
  - No run begins at weights that another one of the process trained on the same rows.
  - No error of ``fit``, ``evaluate`` or ``predict`` quotes an example.
  - Losses and metrics of training examples are computed only with
    ``non_private_training_metrics``; their names begin with ``non_private_``, and no
    callback of Keras's may decide by them.
  - Weights of examples and classes enter the loss before its gradient is clipped.
  - Metrics of validation data are in the run's files, for `dpsgd report`.

Noise is added to every row of an embedding table at every step.  Only ``dpsgd train``
has lazy noise, DP-SAT, ModelMix, averages and checkpoints that survive the process.

TensorBoard's callback needs the package ``tensorboard``.

Public: weights, and logs except the non-private ones.  Sensitive: the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from accounting.core.plan import steps_per_epoch
from accounting.core.validation import InputError, check_int
from pipelines.batches.folder import read_certificate, read_manifest
from pipelines.batches.stored import stored
from pipelines.files.paths import StrPath
from trainer import models
from trainer.claims.workers import launch
from trainer.core.run.batches import Element
from trainer.core.run.session import Session, StepInputs
from trainer.core.run.withheld import withhold_values
from trainer.core.step.dp_step import Step
from trainer.export.export import check_export, export, save_tensorflow
from trainer.export.own_numbers import own_numbers
from trainer.fitting.callbacks import check_callbacks
from trainer.fitting.epochs import Epoch, plan_epochs
from trainer.fitting.example_weights import ExampleWeights, WeightedModel, weighted
from trainer.fitting.validation_curve import ValidationCurve
from trainer.methods import registry
from trainer.methods.optimizers import optimizer_of_keras
from trainer.model import initial_weights as initial_weights_files
from trainer.model.layers.function_model import as_keras
from trainer.model.losses import loss_of_keras
from trainer.model.swapped_weights import unchanged
from trainer.model.trainable_model import TrainableModel, nested_inputs
from trainer.model.user_code import one_line_errors
from trainer.model.user_rows import of_one_row
from trainer.model.views import Views, first_view, of_one_view
from trainer.run import preflight, privacy
from trainer.settings.method_settings import DP_SGD
from trainer.settings.request import check_batches, check_local
from trainer.settings.train_settings import TrainSettings
from trainer.tf_compat import keras, raw_variable, tf

_PREFIX = "non_private_"
_RUN_STAYS = (
    "Give a folder here, such as 'run', and copy it once the run is complete; `dpsgd "
    "train --out` takes a store."
)

#: Arguments of Keras's ``compile`` that have one value here.
_SET_HERE = [("jit_compile", False), ("auto_scale_loss", False)]

#: Arguments of Keras's ``fit`` that the plan determines.
_OF_THE_PLAN = {
    "batch_size": "the plan has the batch size: give it to `dpsgd batches`",
    "shuffle": "the sampler has drawn the order: omit it",
    "validation_split": "the batches are of all rows: give validation_data",
}


def _changed(method: Any, given: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that have another value than in Keras's method, or here."""
    known = inspect.signature(method).parameters
    return [
        name
        for name, value in given.items()
        if not (name in known and value == known[name].default)
        and (name, value) not in _SET_HERE
    ]


def _start_at(
    settings: TrainSettings, network: Any
) -> initial_weights_files.InitialWeights | None:
    """Gives a network the initial weights of the settings, which it returns, if any."""
    if settings.initial_weights is None:
        return None
    initial = initial_weights_files.read(pathlib.Path(settings.initial_weights))
    initial.assign([*map(raw_variable, network.trainable_variables)])
    return initial


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
    batches: str | os.PathLike[str],
    run: str | os.PathLike[str],
    l2_norm_clip: float | str | None = None,
    clip_quantile: float | None = None,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    of_runs: int = 1,
    allow_large_delta: bool = False,
    method: str = DP_SGD,
    views: int = 1,
    augment: Any = None,
    noise_key_file: str | os.PathLike[str] | None = None,
    initial_weights: str | os.PathLike[str] | None = None,
    initial_weights_are_public: bool = False,
    batches_used_before: bool = False,
    **method_settings: Any,
) -> PrivateModel:
    """Returns a Keras model that trains privately on ``batches``.

    Args:
      model: A Keras model whose inputs are named like columns of the batches, or a
        ``tf.Module`` to call on a dict of columns; its weights are trained in place.
      batches: Folder that ``dpsgd batches`` wrote, here or in a store (``s3://``).
      run: New folder for the key, the record and the copy of the manifest.
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
      method: "dp-sgd", "bam", "non-private", or another that is registered and takes
        the optimizer of ``compile``.
      views: Views per example, whose mean loss is used: columns (views, ...) of the
        batches, or made by ``augment``.
      augment: A function (columns of one example, seed) -> columns of one view, or
        layers of Keras, such as a Sequential of RandomFlip.
      noise_key_file: File of the noise key, made if missing; in ``run`` if None.
      initial_weights: File of weights to start at, which record and statement then
        name; those of ``model`` if None.
      initial_weights_are_public: Declares that file public; required with it.
      batches_used_before: Accepts batches that another private run has used.  Nothing
        is proven for both runs together, and the privacy statement says so.
      **method_settings: The method's own settings, such as ``bam_radius=0.02``.

    Raises:
      InputError: an argument is refused.
    """
    if registry.hooks_of(method).optimizer is not None:
        raise InputError(f"Expected no method={method!r}; `dpsgd train` has it.")
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
        method_settings=method_settings,
        views=views,
    )
    if augment is not None and not callable(augment):
        raise InputError(
            "Expected augment to be a function (columns, seed), or layers of Keras."
        )
    key = pathlib.Path(noise_key_file) if noise_key_file is not None else None
    return PrivateModel(
        model,
        settings,
        batches,
        pathlib.Path(run),
        noise_key_file=key,
        augment=augment,
        batches_used_before=batches_used_before,
    )


class PrivateModel(keras.Model):
    """A private model; ``network`` is the plain model with its weights.

    ``save`` and ``save_weights`` write ``network``, which loads without this package.
    """

    def __init__(
        self,
        network: Any,
        settings: TrainSettings,
        batches: StrPath,
        run: pathlib.Path,
        *,
        noise_key_file: pathlib.Path | None = None,
        augment: Any = None,
        batches_used_before: bool = False,
    ) -> None:
        check_batches(batches)
        check_local(_RUN_STAYS, run=run)
        check_local(noise_key_file=noise_key_file)
        preflight.check_key(run, noise_key_file)
        super().__init__(name=network.name)
        manifest = read_manifest(batches)
        preflight.check_files(batches, manifest)
        preflight.check_users(settings, manifest, augment=augment)
        if preflight.check_run_folder(run):
            raise InputError(
                f"Expected run={run} to be new or empty; a run of another process "
                "cannot go on here. Choose another folder, and make other batches, or "
                "use `dpsgd train`, whose runs go on."
            )
        preflight.check_initial_weights(settings, manifest)
        preflight.check_unused(batches, run, settings, shared=batches_used_before)
        of_rows = of_one_row(manifest)
        with one_line_errors("the model"):
            self.network = models.as_functional(network, of_rows)
        self._initial = _start_at(settings, self.network)
        self._views = _views(settings, augment)
        # The model of one view, for evaluation, export and prediction.
        self._manifest = dataclasses.replace(
            manifest, columns=of_one_view(of_rows.columns, self.network, self._views)
        )
        self._session = Session(
            settings=settings,
            manifest=manifest,
            noise_multiplier=preflight.noise_multiplier_of(settings, manifest),
            batches=stored(batches),
            run=run,
            noise_key_file=noise_key_file,
            take_batches=functools.partial(
                preflight.take_batches,
                batches=batches,
                folder=run,
                settings=settings,
                shared=batches_used_before,
                say=warnings.warn,
            ),
            batches_used_before=batches_used_before,
            workers=launch.alone(),
        )
        self._curve = ValidationCurve(run, settings.method)
        self._held = contextlib.ExitStack()  # the lock of the run's folder
        # Not named _trainable, an attribute of Keras's.
        self._checked_model: TrainableModel | None = None
        self._trained_model: TrainableModel | None = None
        self.build(None)

    # -- Keras's methods -----------------------------------------------------------

    @property
    def layers(self) -> list[Any]:
        """The layers of the network."""
        found: list[Any] = self.network.layers
        return found

    @property
    def inputs(self) -> list[Any]:
        """The inputs of the network."""
        found: list[Any] = self.network.inputs
        return found

    @property
    def outputs(self) -> list[Any]:
        """The outputs of the network."""
        found: list[Any] = self.network.outputs
        return found

    def summary(self, *args: Any, **more: Any) -> None:
        """Prints the layers of the network, as Keras does."""
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
        """Saves the plain network."""
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
        elif session.is_identified:
            session.check_folder()
            export(model, self._manifest, session.run)
        else:
            raise InputError("Expected fit before export to the folder of the run.")

    def save_weights(self, *args: Any, **more: Any) -> None:
        """Saves the weights of the plain network."""
        self.network.save_weights(*args, **more)

    def load_weights(self, *args: Any, **more: Any) -> Any:
        """Loads weights of the plain network."""
        return self.network.load_weights(*args, **more)

    def train_on_batch(self, *args: Any, **more: Any) -> None:
        """Raises InputError: only ``fit`` trains, with steps of the plan."""
        raise InputError("Expected fit; train_on_batch would train without privacy.")

    train_step = train_on_batch  # of Keras's own loops

    def evaluate(self, *args: Any, **more: Any) -> Any:
        """Evaluates the network, as Keras does; no error quotes an example."""
        return withhold_values(super().evaluate, tf.errors.OpError)(*args, **more)

    def predict(self, *args: Any, **more: Any) -> Any:
        """Returns outputs of the network, as Keras does; no error quotes an example."""
        return withhold_values(super().predict, tf.errors.OpError)(*args, **more)

    def test_on_batch(self, *args: Any, **more: Any) -> Any:
        """Evaluates one batch, as Keras does; no error quotes an example."""
        return withhold_values(super().test_on_batch, tf.errors.OpError)(*args, **more)

    def predict_on_batch(self, *args: Any, **more: Any) -> Any:
        """Returns outputs of one batch, as Keras does; no error quotes an example."""
        call = withhold_values(super().predict_on_batch, tf.errors.OpError)
        return call(*args, **more)

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
        started_at = {} if self._initial is None else self._initial.describe()
        trainable = TrainableModel(
            network=self.network,
            description={"name": self.network.name, **started_at},
            loss=loss_of_keras(loss, loss_weights, self.network.output),
            columns=self._manifest.columns,
        )
        models.check_model(trainable, self._manifest)
        check_export(trainable, self._manifest)
        optimizer = optimizer_of_keras(optimizer)
        super().compile(
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            loss_weights=loss_weights,
            jit_compile=False,
            auto_scale_loss=False,
        )
        self._checked_model = trainable
        self._train_by(trainable)

    def _train_by(self, trainable: TrainableModel) -> None:
        """Makes the step of the compiled optimizer and the loss, weighted or not."""
        manifest = self._session.manifest
        trained = models.make_trained(trainable, manifest, self._views)
        session, plan = self._session, manifest.plan
        bounded = registry.step_sum(
            trained, session.settings, plan, session.noise_multiplier
        )
        step = Step(trainable.optimized, bounded, self.optimizer)
        num_parameters = sum(int(np.prod(v.shape)) for v in trainable.variables)
        self._session.use(
            step,
            optimizer={"name": type(self.optimizer).__name__},
            model={**trained.description, "num_parameters": num_parameters},
            seeds=trained.seeds,
        )
        self._trained_model = trainable

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
        class_weight: Mapping[int, float] | None = None,
        sample_weight: str | None = None,
        non_private_training_metrics: bool = False,
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
          validation_data: ``(x, y)``, ``(x, y, sample_weight)`` or a data set.  Whether
            it holds training examples is not checked; their metrics are not private.
          validation_freq: Epochs between validations.
          class_weight: Class -> weight of its examples' losses, 1 for other classes.
            Must be public, not computed from the training labels.
          sample_weight: Column of the batches that holds the weight of each example's
            loss.  Weights multiply the loss before its gradient is clipped.
          non_private_training_metrics: Also computes loss and metrics of the training
            examples.  The privacy statement does not cover them.
          **more: Keras's other arguments are refused.

        Raises:
          InputError: fewer steps are left, or an argument is not supported.
        """
        self._check_fit(x, y, more)
        size = self.steps_per_epoch if steps_per_epoch is None else steps_per_epoch
        plan = plan_epochs(
            epochs=epochs,
            initial_epoch=initial_epoch,
            steps_per_epoch=size,
            done=self.num_steps_executed,
            num_steps=self._session.num_steps,
        )
        check_int("validation_freq", validation_freq, at_least=1)
        check_callbacks(callbacks, validates=validation_data is not None)
        weights = ExampleWeights(
            class_weight={} if class_weight is None else class_weight,
            sample_weight=sample_weight,
        )
        self._weigh(weights)
        listed = keras.callbacks.CallbackList(
            callbacks, add_history=True, add_progbar=verbose != 0, model=self,
            verbose=1 if verbose == "auto" else verbose,
            epochs=plan[-1].index + 1, steps=size,
        )  # fmt: skip
        self._open_run(weights, non_private_training_metrics)
        self.stop_training, logs = False, dict[str, Any]()
        listed.on_train_begin()
        with self._recorded(), self._session.steps(end=plan[-1].end) as steps:
            for epoch in plan:
                listed.on_epoch_begin(epoch.index)
                logs = self._epoch(steps, epoch, listed, non_private_training_metrics)
                initial_weights_files.note(self.network)
                if (epoch.index + 1) % validation_freq == 0:
                    logs |= self._validate(validation_data)
                listed.on_epoch_end(epoch.index, logs)
                if self.stop_training:
                    break
        listed.on_train_end(logs)
        return self.history

    def privacy_statement(self) -> Any:
        """Returns the statement of the executed steps; ``to_text()`` formats it.

        For a run that stopped early, it states the epsilon of the whole plan, which
        bounds every prefix.

        Raises:
          InputError: there is no delta, or metrics of training examples may have
            stopped the run.
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
        if self._session.is_within_step:
            raise InputError(
                f"Expected steps to end; step {self.num_steps_executed} was "
                "interrupted, and its noise may not be used twice. Start again with "
                "make_private, in another folder and on other batches."
            )
        self._compiled()

    def _weigh(self, weights: ExampleWeights) -> None:
        if weights != self._weights_of(self._trained_model):
            self._train_by(weighted(self._compiled(), weights))

    @staticmethod
    def _weights_of(model: TrainableModel | None) -> ExampleWeights:
        return model.weights if isinstance(model, WeightedModel) else ExampleWeights()

    def _epoch(
        self, steps: Iterator[StepInputs], epoch: Epoch, listed: Any, non_private: bool
    ) -> dict[str, Any]:
        logs: dict[str, Any] = {}
        self.reset_metrics()
        while self.num_steps_executed < epoch.end and not self.stop_training:
            index = self.num_steps_executed - epoch.begin
            listed.on_train_batch_begin(index)
            noise, parts = next(steps)
            found: dict[str, Any] = {}
            observe = functools.partial(self._evaluate_batch, found)
            self._session.execute(
                noise, parts, observe=observe if non_private else None
            )
            logs = found or logs
            listed.on_train_batch_end(index, logs)
        return dict(logs)

    def _validate(self, data: Any) -> dict[str, Any]:
        if data is None:
            return {}
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        found = self.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
        self._curve.add(self.num_steps_executed, found, data)
        return {f"val_{name}": value for name, value in found.items()}

    def _evaluate_batch(self, logs: dict[str, Any], batch: Element) -> None:
        """Adds the real rows of a physical batch to the metrics, and sets ``logs``."""
        real = np.asarray(batch["weight"]) > 0
        if not real.any():
            return
        model, weights = self._trained_model, None
        assert model is not None  # compiled
        columns = first_view(batch["columns"], model)
        columns = {k: np.asarray(v)[real] for k, v in columns.items()}
        if isinstance(model, WeightedModel):
            weights = np.asarray(model.example_weights(columns))
        captured = self._session.captured()
        with unchanged(self._state, captured, "metrics of training examples"):
            # Not test_on_batch, which begins with new metrics.
            found = self.test_step(
                (model.inputs(columns), model.labels(columns), weights)
            )
        logs.update((_PREFIX + name, float(value)) for name, value in found.items())

    @property
    def _state(self) -> list[Any]:
        """All variables of the model and of its steps, also unknown to Keras."""
        used = self._session.traced().graph.variables
        return [*self.network.variables, *self.optimizer.variables, *used]

    # -- the run -------------------------------------------------------------------

    def _compiled(self) -> TrainableModel:
        if self._checked_model is None:
            raise InputError("Expected compile before fit.")
        return self._checked_model

    def _open_run(self, weights: ExampleWeights, non_private: bool) -> None:
        """Records this call of ``fit``, before its first step."""
        with one_line_errors("the step of compile"):
            used = self._session.traced().graph.variables
        batches = self._session.batches.place
        initial_weights_files.take(self.network, used, batches, self._session)
        if not self._session.is_identified:
            self._begin_run()
        self._session.fits.append(
            {
                "first_step": self.num_steps_executed,
                **weights.describe(),
                "non_private_training_metrics": bool(non_private),
            }
        )
        self._session.write_record(complete=False)

    def _begin_run(self) -> None:
        if preflight.check_run_folder(self._session.run):
            raise InputError(f"Expected run={self._session.run} to be new or empty.")
        self._session.open(self._held)
        # The id identifies the run: no other process continues it.
        identity = {
            "manifest": self._session.manifest.fingerprint,
            "batches": preflight.digest_of_batches(self._session.batches.place),
        }
        self._session.identify(identity, model=models.identity(self._compiled()))

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Writes the record of the executed steps, also if ``fit`` ends early."""
        try:
            yield
        finally:
            initial_weights_files.note(self.network)
            self._session.write_record(complete=self._is_complete)
            if self._is_complete:
                self._held.close()

    @property
    def _is_complete(self) -> bool:
        return self.num_steps_executed == self._session.num_steps
