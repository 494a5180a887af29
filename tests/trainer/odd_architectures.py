"""Models of one's own, and odd layers."""

from __future__ import annotations

from typing import Any

from tests.trainer.architecture import Architectures, ids, real, registers
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES

layers, ops = keras.layers, keras.ops

ODD: Architectures = {}
architecture = registers(ODD)

NUMBERS, FIELDS = real(5), ids(7, 4)


# -- models of one's own, and odd layers -----------------------------------------------


class Loop(keras.Model):
    """Takes all columns but the label; applies one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.again = layers.Embedding(7, 3), layers.Dense(5, "tanh")
        self.last = layers.Dense(1)

    def call(self, columns: Any, training: bool = False) -> Any:
        values = tf.where(tf.math.is_nan(columns["numbers"]), 0.0, columns["numbers"])
        for _ in range(2):
            values = values + self.again(values)
        rows = tf.reshape(self.table(columns["fields"]), (-1, 12))
        return self.last(tf.concat([values, rows], 1))


architecture(name="subclass", numbers=NUMBERS, fields=FIELDS)(lambda: Loop())


class Squared(keras.Model):
    """A functional model whose ``call`` is not its graph."""

    def call(self, columns: Any, training: bool = False, mask: Any = None) -> Any:
        return 2.0 * super().call(columns, training=training, mask=mask) ** 2


@architecture(numbers=NUMBERS)
def overridden_call() -> Any:
    numbers = keras.Input((5,), name="numbers")
    return Squared(numbers, layers.Dense(1)(numbers))


class _Untracked(layers.Layer):
    """Reads all of a table that Keras does not track."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self._read = lambda: table.embeddings

    def call(self, hidden: Any) -> Any:
        return tf.matmul(hidden, self._read(), transpose_b=True)


@architecture(fields=FIELDS)
def untracked_table(fields: Any) -> Any:
    table = layers.Embedding(7, 3)
    return layers.Dense(1)(_Untracked(table)(ops.sum(table(fields), 1)))


@tf.custom_gradient
def _own_gradient(values: Any) -> Any:
    return tf.tanh(values), lambda slope: 0.5 * slope


def _odd(values: Any) -> Any:
    values = layers.Lambda(lambda v: tf.math.l2_normalize(v, 1))(values)
    values = layers.BatchNormalization(trainable=False)(values)
    values = layers.EinsumDense("abc,cd->abd", (2, 3))(layers.Permute((2, 1))(values))
    values = layers.Dense(3, "softplus", trainable=False)(
        layers.ZeroPadding1D(1)(values)
    )
    return keras.Sequential([keras.Sequential([layers.Dense(3, "swish")])])(values)


for _name, (_decision, _part) in {
    "odd_layers": (ONE_PASS, _odd),
    "stacked_cells": (
        ONE_PASS,
        lambda v: layers.RNN([layers.LSTMCell(2), layers.SimpleRNNCell(2)])(v),
    ),
    "cells_in_slices": (
        SINGLE_EXAMPLES, lambda v: layers.GRU(2, reset_after=False)(v[:, :2]),
    ),
    "masked_bidirectional": (
        SINGLE_EXAMPLES,
        lambda v: layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True))(
            layers.Masking()(ops.relu(v))
        ),
    ),
    "grouped_convolution": (
        SINGLE_EXAMPLES, lambda v: layers.Conv1D(2, 2, groups=2)(layers.Dense(4)(v)),
    ),
    "convolution_of_clips": (
        ONE_PASS,
        lambda v: layers.Conv3D(2, 2, padding="same")(
            ops.reshape(layers.Dense(2)(v), (-1, 2, 2, 2, 1))
        ),
    ),
    "gradient_of_ones_own": (
        SINGLE_EXAMPLES, lambda v: layers.Lambda(_own_gradient)(layers.Dense(3)(v)),
    ),
}.items():  # fmt: skip
    architecture(_decision, name=_name, series=real(4, 2))(
        lambda series, part=_part: layers.Dense(1)(layers.Flatten()(part(series)))
    )
