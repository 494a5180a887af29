"""Layers, metrics, regularisers and callbacks of Keras that keep state or mix rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from keras.src.backend import set_keras_mask

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    VOCABULARY,
    TrainingPart,
    any_rare,
    hidden,
    layers,
    tame_layer,
    tamed,
    weight,
)
from trainer.core.tf_compat import keras, tf

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
_after("normalisation to adapt", lambda v: layers.Normalization()(v))


# -- random numbers ----------------------------------------------------------------

_after("dropout", lambda v: layers.Dropout(0.5)(v), honest=True)
_after("dropout of unknown rows", lambda v: layers.Dropout(0.5, (1, None))(v))


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


class TrainingLoss(layers.Layer):
    """Adds a loss in training alone."""

    def call(self, values: Any, training: bool = False) -> Any:
        if training:
            self.add_loss(tf.reduce_mean(values))
        return values


_after("added loss", lambda v: AddedLoss()(v), leaks=True)
_after("loss added in training", lambda v: TrainingLoss()(v), leaks=True)
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


for _name, _make in (("writes", _writes_if(True)), ("mixes", _mixes_if_training)):
    CASES.body(
        f"{_name} in training beside dropout",
        lambda v, ids, make=_make: layers.Dropout(0.5)(TrainingPart(make)([v, ids])),
    )
