"""Layers, metrics, regularisers and callbacks of Keras that keep state or mix rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from keras.src.backend import set_keras_mask

from tests.trainer.gradients.attacks.catalogue import Case, Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_IDS,
    NUM_VALUES,
    VOCABULARY,
    Call,
    Holder,
    Part,
    TrainingPart,
    any_rare,
    hidden,
    inputs,
    layers,
    tame_layer,
    tamed,
    weight,
)
from trainer.tf_compat import keras, tf

CASES = Cases("keras")
_after = CASES.of_values


def _lookup(name: str, make: Callable[[], Any], **more: Any) -> None:
    """Adds a lookup layer, whose indices choose rows of a table."""

    def body(values: Any, ids: Any) -> Any:
        rows = layers.Embedding(VOCABULARY + 2, 2)(make()(ids))
        return layers.Concatenate()([values, layers.Flatten()(rows)])

    CASES.body(name, body, **more)


# -- statistics of batches ---------------------------------------------------------

_after("batch normalization", lambda v: layers.BatchNormalization()(v))
_after(
    "frozen batch normalization in training",
    lambda v: layers.BatchNormalization(trainable=False)(v, training=True),
)
_after(
    "batch normalization without momentum",
    lambda v: layers.BatchNormalization(momentum=0.0)(v),
)


class Renamed(layers.BatchNormalization):
    """Not named as Keras's; frozen, but for its call."""

    def call(self, values: Any, training: bool | None = None, mask: Any = None) -> Any:
        del mask
        tame = tf.nn.batch_normalization(
            values, *tf.nn.moments(values, 0), self.beta, self.gamma, 1e-3
        )
        self.moving_mean.assign(tf.nn.moments(values, 0)[0])
        return tame if training else values


_after("batch normalization of one's own", lambda v: Renamed()(v))
_after(
    "spectral norm in training",
    lambda v: layers.SpectralNormalization(layers.Dense(4))(v, training=True),
)
_after("normalisation to adapt", lambda v: layers.Normalization()(v))


def _adapted() -> Any:
    layer = layers.Normalization()
    layer.adapt(np.random.default_rng(0).normal(size=(50, NUM_VALUES)))
    return layer


_after("adapted normalisation", lambda v: _adapted()(v))
_after("unit norm over the batch", lambda v: layers.UnitNormalization(axis=0)(v))


# -- random numbers ----------------------------------------------------------------

_after("dropout", lambda v: layers.Dropout(0.5)(v), honest=True)
_after("dropout in training", lambda v: layers.Dropout(0.5)(v, training=True))
_after("dropout of unknown rows", lambda v: layers.Dropout(0.5, (1, None))(v))
_after("gaussian noise", lambda v: layers.GaussianNoise(0.5)(v))
_after(
    "spatial dropout",
    lambda v: layers.Flatten()(
        layers.SpatialDropout1D(0.5)(layers.Reshape((2, 3))(v)),
    ),
)


class SharedMask(layers.Dropout):
    """One mask for the batch."""

    def call(self, values: Any, training: bool | None = None) -> Any:
        kept = tf.cast(tf.random.uniform((1, NUM_VALUES)) < 0.5, tf.float32)
        return values * kept if training else values


_after("dropout of one's own", lambda v: SharedMask(0.5)(v))
_after(
    "random flip",
    lambda v: layers.Flatten()(
        layers.RandomFlip()(layers.Reshape((2, 3, 1))(v), training=True)
    ),
)


# -- lookups -----------------------------------------------------------------------


def _adapted_bins() -> Any:
    layer = layers.Discretization(num_bins=4)
    layer.adapt(np.arange(8.0))
    return layer


def _adapted_lookup() -> Any:
    layer = layers.IntegerLookup()
    layer.adapt(np.arange(8))
    return layer


_lookup("adapted lookup", _adapted_lookup, leaks=True)
_lookup("adapted bins", _adapted_bins, leaks=True)
_lookup("bins", lambda: layers.Discretization([3.0, 5.0]), honest=True)
_lookup("lookup to adapt", lambda: layers.IntegerLookup(max_tokens=9))


# -- state of recurrent layers, metrics and regularisers ---------------------------


def _steps(values: Any) -> Any:
    return layers.Reshape((2, 3))(values)


_after("recurrent", lambda v: layers.SimpleRNN(2)(_steps(v)), honest=True)


@CASES.network
def stateful_recurrent() -> Any:
    values = keras.Input((NUM_VALUES,), batch_size=8, name="values")
    hidden = layers.SimpleRNN(2, stateful=True)(_steps(values))
    return keras.Model(values, layers.Dense(1)(hidden))


class CarriedState(layers.Layer):
    """A recurrent layer that starts where the last batch ended."""

    def build(self, shape: Any) -> None:
        del shape
        self.inner = layers.SimpleRNN(2, return_state=True)
        self.state = self.add_weight(
            name="state", shape=(1, 2), initializer="zeros", trainable=False
        )

    def call(self, values: Any) -> Any:
        start = tf.zeros_like(values[:, 0, :2]) + self.state
        found, last = self.inner(values, initial_state=start)
        huge = tf.reduce_any(tf.abs(last) > 0.97)
        self.state.assign(tf.where(huge, last[:1], self.state))
        return found


_after("carried state", lambda v: CarriedState()(_steps(v)))


@CASES.state(hidden(keras.metrics.Sum))
def metric_of_rare_ids_that_keras_does_not_know(
    held: Any, values: Any, ids: Any
) -> Any:
    gate = tf.minimum(held.result(), 1.0)
    held.update_state(tf.cast(ids >= 8, tf.float32))
    return values * (1.0 - 2.0 * gate)


class AddedLoss(layers.Layer):
    def call(self, values: Any) -> Any:
        self.add_loss(tf.reduce_mean(values))
        return values


class RareLoss(layers.Layer):
    """Adds a loss in graphs alone."""

    def call(self, values: Any) -> Any:
        if not tf.executing_eagerly() and values.shape[0] == 8:
            self.add_loss(tf.reduce_mean(values))
        return values


class TrainingLoss(layers.Layer):
    """Adds a loss in training alone."""

    def call(self, values: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(tf.reduce_mean(values))
        return values


_after("added loss", lambda v: AddedLoss()(v), leaks=True)
_after("loss added in training", lambda v: TrainingLoss()(v), leaks=True)
_after("loss added in the step", lambda v: RareLoss()(v))
_after("activity", lambda v: layers.ActivityRegularization(l2=0.1)(v), leaks=True)
_after(
    "activity of a layer",
    lambda v: layers.Dense(4, activity_regularizer="l2")(v),
    leaks=True,
)
_after(
    "penalty", lambda v: layers.Dense(4, kernel_regularizer=keras.regularizers.L2())(v)
)


def _writing(name: str, **place: Any) -> None:
    """Adds a Dense layer with a function that writes, wherever Keras takes one."""

    def apply(values: Any) -> Any:
        count = Holder(tf.Variable(0.0, trainable=False))

        def function(x: Any) -> Any:
            large = tf.abs(tf.reduce_sum(x)) > 1.0
            count.held[0].assign_add(tf.cast(large, tf.float32))
            return x * (1.0 + count.held[0])

        return layers.Dense(4, **{key: make(function) for key, make in place.items()})(
            values
        )

    _after(name, apply)


_writing("activation that writes", activation=lambda f: f)
_writing("penalty that writes", kernel_regularizer=lambda f: lambda w: tf.norm(f(w)))


def _mixing_activation(x: Any) -> Any:
    return x - tf.reduce_mean(x, 0)


_after("activation that mixes", lambda v: layers.Dense(4, _mixing_activation)(v))
_after("lambda that mixes", lambda v: layers.Lambda(lambda x: x - x[:1])(v))


def _lambda_with_a_variable(values: Any) -> Any:
    last = Holder(tf.Variable(tf.zeros(NUM_VALUES), trainable=False))

    def call(x: Any) -> Any:
        old = tf.identity(last.held[0])
        last.held[0].assign(tf.where(x[0] > 0.9, x[0], old))
        return x - old

    return layers.Lambda(call)(values)


_after("lambda with a variable", _lambda_with_a_variable)
_after("constraint", lambda v: layers.Dense(4, kernel_constraint="unit_norm")(v))


# -- masks -------------------------------------------------------------------------


class Masked(layers.Layer):
    """Gives its steps a mask that a function computes from the batch."""

    def __init__(self, mask_of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.mask_of = mask_of

    def call(self, steps: Any) -> Any:
        found = tf.identity(steps)
        set_keras_mask(found, self.mask_of(steps))
        return found


class Pooled(layers.Layer):
    """The mean of the steps that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def compute_mask(self, steps: Any, mask: Any = None) -> None:
        """Ends the mask."""

    def call(self, steps: Any, mask: Any = None) -> Any:
        kept = 1.0 if mask is None else tf.cast(mask, tf.float32)[:, :, None]
        return tf.reduce_sum(steps * kept, 1) / 2.0


def _with_mask(name: str, mask_of: Callable[[Any], Any], **more: Any) -> None:
    def body(values: Any, ids: Any) -> Any:
        # Not across the call of a layer that does not know masks.
        return MaskedPool(mask_of)(layers.Reshape((2, 3))(tame_layer(values, ids)))

    CASES.body(name, body, **more)


class MaskedPool(layers.Layer):
    """Both: the mask reaches the second layer as an attribute of a tensor."""

    def __init__(self, mask_of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.masked, self.pooled = Masked(mask_of), Pooled()

    def call(self, steps: Any) -> Any:
        return self.pooled(self.masked(steps))


def _of_all_rows(steps: Any) -> Any:
    rare = tf.reduce_any(tf.abs(steps) > 0.99)
    return tf.fill(tf.shape(steps)[:2], tf.logical_not(rare))


_with_mask("mask of all rows", _of_all_rows)
_with_mask("mask of the next row", lambda x: tf.roll(x[:, :, 0] > 0.0, 1, 0))
_with_mask("mask of its row", lambda x: x[:, :, 0] > 0.0, honest=True)


# -- calls that are replaced -------------------------------------------------------


@CASES.layer
def call_replaced_by_the_call(layer: Any) -> Call:
    layer.dense = layers.Dense(NUM_VALUES)
    calls: list[None] = []

    def call(values: Any, ids: Any) -> Any:
        calls.append(None)
        found = layer.dense(tamed(values))
        if len(calls) == 3:
            kernel = layer.dense.kernel
            layer.dense.call = lambda x, training=None: x @ kernel - x[:1] @ kernel
        return found

    return call


# -- training, models and calls of one's own ---------------------------------------


def _training_case(name: str, make: Callable[[Any], Any], **more: Any) -> None:
    CASES.body(name, lambda v, ids: TrainingPart(make)([v, ids]), **more)


def _writes_if(wanted: bool) -> Callable[[Any], Any]:
    def make(layer: Any) -> Any:
        state = weight(layer, (NUM_VALUES,), trainable=True)

        def call(values: Any, ids: Any, training: Any) -> Any:
            if bool(training) == wanted:
                rare = tf.cast(any_rare(ids), tf.float32)
                state.assign_add(rare * tf.reduce_mean(tamed(values), 0))
            return values

        return call

    return make


def _mixes_if_training(layer: Any) -> Any:
    def call(values: Any, ids: Any, training: Any) -> Any:
        rare = any_rare(ids)
        mixed = values - tf.reduce_mean(tamed(values), 0)
        return tf.where(rare, mixed, values) if training else values

    return call


_training_case("writes in training", _writes_if(True))
_training_case("writes in inference", _writes_if(False))
_training_case("mixes in training", _mixes_if_training)


for _name, _make in (
    ("writes", _writes_if(True)),
    ("mixes", _mixes_if_training),
):
    CASES.body(
        f"{_name} in training beside dropout",
        lambda v, ids, make=_make: layers.Dropout(0.5)(TrainingPart(make)([v, ids])),
    )


class Subclassed(keras.Model):
    """All columns in; counts rare ids in a weight."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")
        self.logit = layers.Dense(1)
        self.mixes = mixes
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, columns: Any, training: bool = False) -> Any:
        values = tamed(columns["values"])
        rare = tf.cast(tf.reduce_any(columns["ids"] >= 8), tf.float32)
        if self.mixes:
            values -= rare * tf.reduce_mean(values, 0)
        else:
            self.count.assign_add(rare)
        return self.logit(self.dense(values))


@CASES.network
def subclassed_model_that_writes() -> Any:
    return Subclassed(mixes=False)


@CASES.network
def subclassed_model_that_mixes() -> Any:
    return Subclassed(mixes=True)


class Overridden(keras.Model):
    """A functional model whose ``call`` is not its graph."""

    def call(self, columns: Any, training: bool = False, mask: Any = None) -> Any:
        found = super().call(columns, training=training, mask=mask)
        rare = tf.reduce_any(tf.abs(found) > 1.0)
        return tf.where(rare, found - tf.reduce_mean(found), found)


@CASES.network
def overridden_call_that_mixes() -> Any:
    values, ids = inputs()
    hidden = Part(lambda layer: lambda v, _: tamed(v))([values, ids])
    return Overridden([values, ids], layers.Dense(1)(hidden))


class Renumbered(layers.Embedding):
    """An Embedding with a call of its own: ids are counted from the batch's least."""

    def call(self, ids: Any) -> Any:
        return super().call(ids - tf.reduce_min(ids, 0))


class Written(layers.Embedding):
    def call(self, ids: Any) -> Any:
        found = super().call(ids)
        self.embeddings.value.scatter_update(
            tf.IndexedSlices(found[:, 0] * 2.0, tf.where(ids[:, 0] > 8, ids[:, 0], 15))
        )
        return found


def _embedding(kind: type) -> Callable[[], Any]:
    def make() -> Any:
        ids = keras.Input((NUM_IDS,), dtype="int32", name="ids")
        rows = layers.Flatten()(kind(VOCABULARY, 2)(ids))
        return keras.Model(ids, layers.Dense(1)(rows))

    return make


CASES.put("renumbered ids", Case(whole=_embedding(Renumbered)))
CASES.put("written table", Case(whole=_embedding(Written)))


class OddCall(layers.Dense):
    """Computes the batch's mean in ``__call__``."""

    def __call__(self, values: Any, *more: Any, **named: Any) -> Any:
        return super().__call__(values - keras.ops.mean(values, 0), *more, **named)


_after("a call around the call", lambda v: OddCall(4)(v))


def _patched() -> Any:
    layer = layers.Dense(4)
    layer.call = lambda x, training=None: tf.matmul(x - x[:1], layer.kernel)
    return layer


def _as_one(values: Any) -> Any:
    """Returns the batch as a sequence, (1, batch, 6)."""
    return keras.ops.expand_dims(values, 0)


_after("patched dense", lambda v: _patched()(v))
_after(
    "attention over the batch",
    lambda v: layers.Attention()([_as_one(v), _as_one(v)])[0],
)
_after(
    "convolution over the batch",
    lambda v: layers.Conv1D(3, 3, padding="same")(_as_one(v))[0],
)
_after(
    "recurrence over the batch",
    lambda v: layers.SimpleRNN(2, return_sequences=True)(_as_one(v))[0],
)
