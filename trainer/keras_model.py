"""``make_private``: a Keras model whose ``fit`` is DP-SGD on batches of the pipeline.

    model = make_private(network, batches="batches", run="run", epsilon=3, delta=1e-6,
                         l2_norm_clip=10)
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), ["AUC"])
    model.fit(epochs=2, validation_data=(x, y), callbacks=[...])
    print(model.privacy_statement().to_text())

``fit`` has a loop of its own, which drives Keras's callbacks.  A ``train_step`` within
Keras's loop could be given any data set, repeated, cut short or shuffled, and would see
one physical batch at a time, where noise belongs to a logical one.

An epoch is ``num_examples / expected_batch_size`` steps of the plan, to the nearest
integer; the last epoch is what is left.  ``epochs`` counts from the start of the plan,
as in Keras: after ``fit(epochs=1)``, ``fit(epochs=3)`` trains for two more.  A batch,
for callbacks, is a step of the plan.

Formal guarantees:
  - Steps, batches, noise, record and statement are those of ``dpsgd train``: every step
    of the plan is consumed at most once and in order, however often ``fit`` is called.
  - The record on disk is of all steps that were executed, also when ``fit`` ends early.
  - After an exception within a step the run cannot go on: the noise of that step may
    have been released, and is not used a second time.  Between steps it can.
  - A run folder is used by one object: no noise is drawn twice from one run id.
  - No error of ``fit``, ``evaluate`` or ``predict`` quotes an example.
  - Losses and metrics of training examples are computed only if
    ``non_private_training_metrics`` asks for them; their names begin with
    ``non_private_``.

Noise is added to every row of an embedding table at every step; lazy noise, DP-SAT,
ModelMix, averages and checkpoints that survive the process are for ``dpsgd train``.

TensorBoard's callback needs the package ``tensorboard``.

Public: weights; logs but for the non-private ones.  Sensitive: the rest.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from accounting.plan import steps_per_epoch
from accounting.validation import InputError, check_int
from pipelines.batches.manifest import read_manifest
from trainer import models
from trainer.gradients.dp_step import Step
from trainer.methods import registry
from trainer.methods.optimizers import optimizer_of_keras
from trainer.model.losses import loss_of_keras
from trainer.model.trainable_model import TrainableModel
from trainer.model.user_code import withhold_values
from trainer.run import preflight, privacy
from trainer.run.batches import Element
from trainer.run.session import Session, StepInputs
from trainer.settings.method_settings import DP_SGD
from trainer.settings.train_settings import TrainSettings
from trainer.tf_compat import keras, tf

_PREFIX = "non_private_"


def make_private(
    model: Any,
    *,
    batches: str | os.PathLike[str],
    run: str | os.PathLike[str],
    l2_norm_clip: float | None = None,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    allow_large_delta: bool = False,
    method: str = DP_SGD,
    noise_key_file: str | os.PathLike[str] | None = None,
    **method_settings: Any,
) -> PrivateModel:
    """Returns a Keras model that trains privately on ``batches``.

    Args:
      model: A Keras 2 model (``tf_keras``) whose inputs are named as columns of the
        batches; its weights are the ones that are trained.
      batches: Folder that ``dpsgd batches`` wrote.
      run: New folder for the key, the record and the copy of the manifest.
      l2_norm_clip: Bound on the L2 norm of one example's gradient.
      noise_multiplier: Noise standard deviation over ``l2_norm_clip``; or
      epsilon: target of the whole plan, from which the noise follows; with
      delta: which the statement is for, too.
      allow_large_delta: Whether a delta that protects next to nothing is meant.
      method: "dp-sgd", "bam", "non-private", or another that is registered and takes
        the optimizer of ``compile``.
      noise_key_file: Where the noise key is, or is made; in ``run`` if None.
      **method_settings: Of the method alone, as ``bam_radius=0.02``.

    Raises:
      InputError: name, value, bound, remedy.
    """
    if registry.hooks_of(method).optimizer is not None:
        raise InputError(f"Expected no method={method!r}; `dpsgd train` has it.")
    if not isinstance(model, keras.Model):
        raise InputError(
            "Expected a Keras 2 model, of the package tf_keras. Import it as "
            "`import tf_keras as keras`."
        )
    if isinstance(model, PrivateModel):
        raise InputError(
            "Expected a plain Keras model; this one is private already. Give its "
            ".network."
        )
    settings = TrainSettings(
        method=method,
        target_epsilon=epsilon,
        target_delta=delta,
        allow_large_delta=allow_large_delta,
        noise_multiplier=noise_multiplier,
        l2_norm_clip=l2_norm_clip,
        method_settings=method_settings,
    )
    key = pathlib.Path(noise_key_file) if noise_key_file is not None else None
    return PrivateModel(
        model, settings, pathlib.Path(batches), pathlib.Path(run), noise_key_file=key
    )


class PrivateModel(keras.Model):
    """What ``make_private`` returns.  ``network`` is the plain model with its weights.

    ``save`` and ``save_weights`` write ``network``, which loads without this package.
    """

    def __init__(
        self,
        network: Any,
        settings: TrainSettings,
        batches: pathlib.Path,
        run: pathlib.Path,
        *,
        noise_key_file: pathlib.Path | None = None,
    ) -> None:
        preflight.check_local(batches=batches, run=run, noise_key_file=noise_key_file)
        super().__init__(name=network.name)
        manifest = read_manifest(batches)
        preflight.check_files(batches, manifest)
        if preflight.check_run_folder(run):
            raise InputError(
                f"Expected run={run} to be new or empty; a run of another process "
                "cannot go on here. Choose another folder, or use `dpsgd train`."
            )
        self.network = models.as_functional(network, manifest)
        self._session = Session(
            settings=settings,
            manifest=manifest,
            noise_multiplier=preflight.noise_multiplier_of(settings, manifest),
            batches=batches,
            run=run,
            noise_key_file=noise_key_file,
        )
        self._within_step = False
        # Not _trainable: that is Keras's word for whether weights are trained.
        self._checked_model: TrainableModel | None = None
        self.build(None)

    # -- what Keras asks of a model ------------------------------------------------

    def build(self, input_shape: Any) -> None:
        """Does nothing: the network is built."""
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns the outputs of the network."""
        return self.network(inputs, training=training)

    def save(self, *args: Any, **more: Any) -> None:
        """Saves the plain network."""
        self.network.save(*args, **more)

    def save_weights(self, *args: Any, **more: Any) -> None:
        """Saves the weights of the plain network."""
        self.network.save_weights(*args, **more)

    def load_weights(self, *args: Any, **more: Any) -> Any:
        """Loads weights of the plain network."""
        return self.network.load_weights(*args, **more)

    def train_on_batch(self, *args: Any, **more: Any) -> None:
        """Is refused: a step is of the plan, and is ``fit``'s."""
        raise InputError("Expected fit; train_on_batch would train without privacy.")

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
        **more: Any,
    ) -> None:
        """Takes a Keras optimizer, loss and metrics; the loss is of each example.

        Raises:
          InputError: another argument, a model or loss that clipping cannot take, or
            an optimizer that is not of tf_keras.
        """
        unknown = [name for name, value in more.items() if value is not None]
        if unknown:
            raise InputError(
                f"Expected compile with optimizer, loss and metrics alone; "
                f"{', '.join(unknown)} is not supported under privacy."
            )
        trainable = TrainableModel(
            network=self.network,
            description={"name": self.network.name},
            loss=loss_of_keras(loss),
            columns=self._session.manifest.columns,
        )
        models.check_model(trainable, self._session.manifest)
        optimizer = optimizer_of_keras(optimizer)
        super().compile(optimizer=optimizer, loss=loss, metrics=metrics)
        step = Step(
            trainable.variables,
            registry.gradient_sum(trainable, self._session.settings),
            self.optimizer,
            expected_batch_size=self._session.manifest.plan.expected_batch_size,
            autograph=trainable.needs_autograph,
        )
        num_parameters = sum(int(np.prod(v.shape)) for v in trainable.variables)
        self._session.use(
            step,
            optimizer={"name": type(self.optimizer).__name__},
            model={**trainable.description, "num_parameters": num_parameters},
        )
        self._checked_model = trainable

    # -- training ------------------------------------------------------------------

    @property
    def num_steps_executed(self) -> int:
        """Steps of the plan that are consumed."""
        return self._session.num_steps_executed

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; the last may have fewer."""
        plan = self._session.manifest.plan
        return steps_per_epoch(plan.num_examples, plan.expected_batch_size)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *,
        epochs: int | None = None,
        initial_epoch: int | None = None,
        callbacks: Sequence[Any] | None = None,
        verbose: Any = "auto",
        validation_data: Any = None,
        validation_freq: int = 1,
        non_private_training_metrics: bool = False,
    ) -> Any:
        """Consumes the steps of the plan up to the end of epoch ``epochs``.

        Args:
          x: Must be None: the batches were given to ``make_private``.
          y: Must be None, too.
          epochs: Counted from the start of the plan; all that there are if None.
          initial_epoch: Where training stands, if given.
          callbacks: Of Keras.  A batch is a step of the plan.
          verbose: As in Keras.
          validation_data: What ``evaluate`` takes: ``(x, y)``, or a data set.  Whether
            it holds training examples is not checked; their metrics are not private.
          validation_freq: Epochs between two validations.
          non_private_training_metrics: Also computes loss and metrics of the training
            examples.  The privacy statement does not cover them.

        Returns:
          Keras's ``History``.

        Raises:
          InputError: nothing is left to train, or an argument cannot be had.
        """
        last = self._last_step(x, y, epochs, initial_epoch)
        check_int("validation_freq", validation_freq, at_least=1)
        size = self.steps_per_epoch
        listed = keras.callbacks.CallbackList(
            callbacks, add_history=True, add_progbar=verbose != 0, model=self,
            verbose=1 if verbose == "auto" else verbose,
            epochs=-(-last // size), steps=size,
        )  # fmt: skip
        self._open_run()
        self.stop_training, logs = False, dict[str, Any]()
        listed.on_train_begin()
        with self._recorded(), self._session.steps(end=last) as steps:
            while self.num_steps_executed < last and not self.stop_training:
                epoch = self.num_steps_executed // size
                listed.on_epoch_begin(epoch)
                end = min(last, (epoch + 1) * size)
                logs = self._epoch(steps, end, listed, non_private_training_metrics)
                is_whole = self.num_steps_executed == end
                due = is_whole and (epoch + 1) % validation_freq == 0
                if due and validation_data is not None:
                    logs |= self._validate(validation_data)
                listed.on_epoch_end(epoch, logs)
        listed.on_train_end(logs)
        return self.history

    def privacy_statement(self) -> Any:
        """Returns the statement of what was executed; ``to_text()`` is for people.

        Raises:
          InputError: steps of the plan are left, or there is no delta.
        """
        return privacy.run_statement(
            self._session.record(complete=self._is_complete),
            self._session.manifest,
            delta=None,
            allow_large_delta=self._session.settings.allow_large_delta,
        )

    def _last_step(
        self, x: Any, y: Any, epochs: int | None, initial_epoch: int | None
    ) -> int:
        plan, size = self._session.manifest.plan, self.steps_per_epoch
        done = self.num_steps_executed
        if x is not None or y is not None:
            raise InputError("Expected fit without data: make_private got the batches.")
        if self._within_step:
            raise InputError(
                f"Expected steps to end; step {done} was interrupted, and its "
                "noise may not be used twice. Start again with make_private."
            )
        self._compiled()
        if initial_epoch is not None and initial_epoch * size != done:
            raise InputError(
                f"Expected initial_epoch={initial_epoch} to be where training stands, "
                f"after {done} steps of {size} per epoch. Leave it away."
            )
        num_epochs = -(-plan.num_steps // size)
        if epochs is not None:
            check_int("epochs", epochs, at_least=1, at_most=num_epochs)
        last = min(plan.num_steps, (epochs or num_epochs) * size)
        if last <= done:
            raise InputError(
                f"Expected steps to be left before the end of epoch {epochs or 1}; "
                f"{done} of num_steps={plan.num_steps} were consumed, and none "
                "is used twice. Make a new plan to train for longer."
            )
        return last

    def _epoch(
        self,
        steps: Iterator[StepInputs],
        end: int,
        listed: Any,
        non_private: bool,
    ) -> dict[str, Any]:
        logs: dict[str, Any] = {}
        self.reset_metrics()
        while self.num_steps_executed < end and not self.stop_training:
            index = self.num_steps_executed % self.steps_per_epoch
            listed.on_train_batch_begin(index)
            self._within_step = True
            noise, parts = next(steps)
            found: dict[str, Any] = {}
            observe = functools.partial(self._evaluate_batch, found)
            self._session.execute(
                noise, parts, observe=observe if non_private else None
            )
            self._train_counter.assign_add(1)
            self._within_step = False
            logs = found or logs
            listed.on_train_batch_end(index, logs)
        return dict(logs)

    def _validate(self, data: Any) -> dict[str, Any]:
        pair = data if isinstance(data, tuple) else (data,)
        found = self.evaluate(*pair, verbose=0, return_dict=True)
        return {f"val_{name}": value for name, value in found.items()}

    def _evaluate_batch(self, logs: dict[str, Any], batch: Element) -> None:
        """Adds the real rows of a physical batch to metrics, and sets ``logs``."""
        real = np.asarray(batch["weight"]) > 0
        if not real.any():
            return
        columns = {k: np.asarray(v)[real] for k, v in batch["columns"].items()}
        model = self._compiled()
        found = self.test_on_batch(
            model.inputs(columns),
            model.labels(columns),
            reset_metrics=False,
            return_dict=True,
        )
        logs.update((_PREFIX + name, value) for name, value in found.items())

    # -- the run -------------------------------------------------------------------

    def _compiled(self) -> TrainableModel:
        if self._checked_model is None:
            raise InputError("Expected compile before fit.")
        return self._checked_model

    def _open_run(self) -> None:
        if self._session.is_identified:
            return
        if preflight.check_run_folder(self._session.run):
            raise InputError(f"Expected run={self._session.run} to be new or empty.")
        self._session.open()
        # Its id alone tells this run from all others: no process goes on with it.
        identity = {
            "manifest": self._session.manifest.fingerprint,
            "batches": preflight.digest_of_batches(self._session.batches),
        }
        self._session.identify(identity, model=models.identity(self._compiled()))
        self._session.write_record(complete=False)

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Writes the record of what was executed, also when that ends early."""
        try:
            yield
        finally:
            self._session.write_record(complete=self._is_complete)

    @property
    def _is_complete(self) -> bool:
        return self.num_steps_executed == self._session.num_steps
