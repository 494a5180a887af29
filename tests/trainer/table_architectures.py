"""Architectures of tables and recommenders; heads, losses and users."""

from __future__ import annotations

from typing import Any

from pipelines.tables.schema import Schema
from tests.trainer.architecture import (
    LOGISTIC,
    SQUARES,
    Architectures,
    ids,
    one_hot,
    positive,
    real,
    registers,
)
from tests.trainer.zoo import Turned
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES
from trainer.model.table_model import read_table, table_model

layers, ops = keras.layers, keras.ops

OF_TABLES: Architectures = {}
architecture = registers(OF_TABLES)

#: Numbers, and the ids of four fields.
NUMBERS, FIELDS = real(5), ids(7, 4)


def _fields(fields: Any, units: int = 3) -> Any:
    return layers.Embedding(28, units)(fields + 7 * tf.range(4))


def _deep(numbers: Any, units: int = 1) -> Any:
    return layers.Dense(units)(layers.Dense(4, activation="relu")(numbers))


# -- recommenders ----------------------------------------------------------------------


@architecture(numbers=NUMBERS)
def tf_privacy_logistic_regression(numbers: Any) -> Any:
    return layers.Dense(1)(numbers)


@architecture(SINGLE_EXAMPLES, numbers=NUMBERS, fields=FIELDS)
def wide_and_deep(numbers: Any, fields: Any) -> Any:
    crossed = layers.HashedCrossing(9, output_mode="one_hot")(
        (fields[:, :1], fields[:, 1:2])
    )
    deep = ops.concatenate([numbers, layers.Flatten()(_fields(fields))], 1)
    return layers.Dense(1)(crossed) + _deep(deep)


@architecture(numbers=NUMBERS, fields=FIELDS)
def deep_and_cross(numbers: Any, fields: Any) -> Any:
    start = ops.concatenate([numbers, layers.Flatten()(_fields(fields))], 1)
    values = start
    for _ in range(2):
        low_rank = layers.Dense(17)(layers.Dense(2, use_bias=False)(values))
        values = start * low_rank + values
    return _deep(ops.concatenate([values, layers.Dense(3, "relu")(start)], 1))


@architecture(fields=FIELDS)
def deep_fm(fields: Any) -> Any:
    values = _fields(fields)
    pairs = ops.square(ops.sum(values, 1)) - ops.sum(ops.square(values), 1)
    linear = ops.sum(_fields(fields, 1), 1)
    return (
        linear + ops.sum(pairs, 1, keepdims=True) / 2 + _deep(layers.Flatten()(values))
    )


@architecture(numbers=NUMBERS, fields=FIELDS)
def dlrm(numbers: Any, fields: Any) -> Any:
    bottom = layers.Dense(3, "relu")(layers.Dense(4, "relu")(numbers))
    values = ops.concatenate([bottom[:, None], _fields(fields)], 1)
    dots = ops.reshape(ops.matmul(values, ops.transpose(values, (0, 2, 1))), (-1, 25))
    below = [5 * i + j for i in range(5) for j in range(i)]
    return _deep(ops.concatenate([bottom, ops.take(dots, below, 1)], 1))


@architecture(fields=FIELDS)
def auto_int(fields: Any) -> Any:
    values = _fields(fields, 4)
    attended = layers.MultiHeadAttention(2, 2, use_bias=False)(values, values)
    values = ops.relu(attended + layers.Dense(4, use_bias=False)(values))
    return layers.Dense(1)(layers.Flatten()(values))


@architecture(user=ids(9), item=ids(8))
def two_towers(user: Any, item: Any) -> Any:
    towers = [
        layers.Dense(3)(layers.Embedding(size, 4)(column))
        for size, column in ((9, user), (8, item))
    ]
    return 5.0 * layers.Dot(1, normalize=True)(towers)


@architecture(user=ids(9), item=ids(8))
def neural_collaborative_filtering(user: Any, item: Any) -> Any:
    product = layers.Embedding(9, 2)(user) * layers.Embedding(8, 2)(item)
    both = [layers.Embedding(9, 2)(user), layers.Embedding(8, 3)(item)]
    deep = layers.Dense(3, "relu")(layers.Concatenate()(both))
    return layers.Dense(1)(ops.concatenate([product, deep], 1))


@architecture(history=ids(8, 4), item=ids(8), numbers=NUMBERS)
def behaviour_transformer(history: Any, item: Any, numbers: Any) -> Any:
    table, places = layers.Embedding(8, 4), layers.Embedding(5, 4)
    steps = ops.concatenate([table(history), table(item)[:, None]], 1)
    steps = steps + places(tf.range(5))
    attended = layers.MultiHeadAttention(2, 2)(steps, steps)
    steps = layers.LayerNormalization()(steps + attended)
    steps = layers.LeakyReLU()(layers.Dense(3)(steps))
    return _deep(ops.concatenate([layers.Flatten()(steps), numbers], 1))


@architecture(history=ids(8, 4), item=ids(8))
def deep_interest(history: Any, item: Any) -> Any:
    table = layers.Embedding(8, 3)
    wanted, steps = ops.repeat(table(item)[:, None], 4, 1), table(history)
    pairs = ops.concatenate([wanted, steps, wanted - steps, wanted * steps], -1)
    scores = layers.Dense(1)(layers.Dense(4, activation=layers.PReLU())(pairs))
    scores = ops.where(history[..., None] > 0, scores, -1e9)
    interest = ops.sum(ops.softmax(scores, 1) * steps, 1)
    return _deep(ops.concatenate([interest, table(item)], 1))


@architecture(
    numbers=NUMBERS, click=ids(2), dwell=positive(1),
    loss={"click": LOGISTIC, "dwell": SQUARES},
    loss_weights={"click": 1.0, "dwell": 0.3},
)  # fmt: skip
def multi_gate_experts(numbers: Any) -> Any:
    experts = ops.stack([layers.Dense(3, "relu")(numbers) for _ in range(3)], 1)
    outputs = {}
    for name in ("click", "dwell"):
        gate = layers.Dense(3, activation="softmax")(numbers)
        mixed = ops.sum(gate[..., None] * experts, 1)
        outputs[name] = layers.Dense(1, name=f"head_of_{name}")(mixed)
    return outputs


# -- tables ----------------------------------------------------------------------------


def _gated_residual(values: Any, units: int = 4) -> Any:
    inner = layers.Dense(units)(layers.Dense(units, activation="elu")(values))
    inner = layers.Dropout(0.15)(inner)
    gated = layers.Dense(units)(inner) * layers.Dense(units, "sigmoid")(inner)
    skip = values if values.shape[-1] == units else layers.Dense(units)(values)
    return layers.LayerNormalization()(skip + gated)


@architecture(numbers=real(2))
def variable_selection(numbers: Any) -> Any:
    parts = [_gated_residual(numbers[:, at : at + 1]) for at in range(2)]
    chosen = layers.Dense(2, "softmax")(ops.concatenate(parts, 1))
    values = ops.sum(ops.stack(parts, 1) * chosen[..., None], 1)
    return layers.Dense(1)(values)


def _block(values: Any) -> Any:
    values = layers.LayerNormalization()(
        values + layers.MultiHeadAttention(2, 2)(values, values)
    )
    left, gate = ops.split(layers.Dense(8)(values), 2, -1)
    return values + layers.Dense(4)(left * ops.gelu(gate))


@architecture(numbers=NUMBERS, fields=FIELDS)
def tab_transformer(numbers: Any, fields: Any) -> Any:
    values = layers.Flatten()(_block(_fields(fields, 4)))
    return _deep(ops.concatenate([values, layers.LayerNormalization()(numbers)], 1))


class _Tokens(layers.Layer):
    """A vector of each number, and one of the class before them."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight((shape[-1], 4))
        self.bias = self.add_weight((shape[-1], 4))
        self.of_class = self.add_weight((1, 1, 4))

    def call(self, numbers: Any) -> Any:
        tokens = numbers[..., None] * self.kernel + self.bias
        first = ops.repeat(self.of_class, ops.shape(numbers)[0], 0)
        return ops.concatenate([first, tokens], 1)


@architecture(SINGLE_EXAMPLES, numbers=NUMBERS)
def ft_transformer(numbers: Any) -> Any:
    return _deep(_block(_Tokens()(numbers))[:, 0])


@architecture(numbers=NUMBERS)
def highway(numbers: Any) -> Any:
    gate = layers.Dense(5, "sigmoid", bias_initializer="ones")(numbers)
    return _deep(gate * layers.Dense(5, "relu")(numbers) + (1 - gate) * numbers)


@architecture(numbers=NUMBERS)
def maxout(numbers: Any) -> Any:
    pieces = ops.reshape(layers.Dense(12)(numbers), (-1, 4, 3))
    return layers.Dense(1)(ops.max(pieces, -1))


@architecture(bags=real(4, 3))
def instances_of_a_bag(bags: Any) -> Any:
    """Attention-based multiple instance learning, gated."""
    tanh, gate = (layers.Dense(4, name)(bags) for name in ("tanh", "sigmoid"))
    weights = ops.softmax(layers.Dense(1)(tanh * gate), 1)
    return layers.Dense(1)(ops.sum(weights * layers.Dense(4, "relu")(bags), 1))


@architecture(numbers=NUMBERS, label=real(5), loss="mean_squared_error")
def tied_autoencoder(numbers: Any) -> Any:
    encoder = layers.Dense(3, activation="tanh")
    return Turned(encoder)(encoder(numbers))


@architecture(numbers=NUMBERS, fields=FIELDS)
def preprocessing(numbers: Any, fields: Any) -> Any:
    found = [
        layers.Normalization(mean=0.5, variance=2.0)(numbers),
        layers.Rescaling(0.5)(numbers),
        layers.Flatten()(layers.Embedding(5, 2)(layers.Hashing(5)(fields))),
    ]
    lookups = [
        layers.Discretization(bin_boundaries=[-0.5, 0.0, 0.5])(numbers),
        layers.IntegerLookup(vocabulary=[1, 2, 3])(fields),
        layers.StringLookup(vocabulary=["1"])(
            layers.Lambda(tf.strings.as_string)(fields)
        ),
    ]
    found += [layers.Flatten()(layers.Embedding(4, 2)(one)) for one in lookups]
    return _deep(ops.concatenate(found, 1))


# -- heads and losses ------------------------------------------------------------------


def _poisson(labels: Any, logs: Any) -> Any:
    return ops.mean(ops.exp(logs) - ops.cast(labels, "float32") * logs, -1)


def _pinball(labels: Any, outputs: Any) -> Any:
    gap = ops.cast(labels, "float32")[:, None] - outputs
    shares = tf.constant([0.1, 0.5, 0.9])
    return ops.mean(ops.maximum(shares * gap, (shares - 1) * gap), -1)


def _density(labels: Any, outputs: Any) -> Any:
    logits, means, scales = ops.split(outputs, 3, -1)
    scales = ops.softplus(scales) + 0.1
    gap = (ops.cast(labels, "float32")[:, None] - means) / scales
    logs = ops.log_softmax(logits) - ops.square(gap) / 2 - ops.log(scales)
    return -ops.logsumexp(logs, -1)


def _of_each(labels: Any, logits: Any) -> Any:
    return keras.losses.binary_crossentropy(labels, logits, from_logits=True)


_SMOOTHED = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)

for _name, _label, _loss, _units in (
    ("poisson_of_logs", ids(5), _poisson, 1),
    ("huber", real(), keras.losses.Huber(), 1),
    ("quantiles", real(), _pinball, 3),
    ("mixture_density", real(), _density, 6),
    ("several_labels", ids(2, 3), _of_each, 3),
    ("label_smoothing", one_hot(3), _SMOOTHED, 3),
    ("focal_loss", ids(2), keras.losses.BinaryFocalCrossentropy(from_logits=True), 1),
    ("cosine_loss", one_hot(3), keras.losses.CosineSimilarity(), 3),
):
    architecture(name=_name, numbers=NUMBERS, label=_label, loss=_loss)(
        lambda numbers, units=_units: _deep(numbers, units)
    )


class _Thresholds(layers.Layer):
    def build(self, shape: Any) -> None:
        self.thresholds = self.add_weight((3,), initializer="zeros")

    def call(self, score: Any) -> Any:
        return score - self.thresholds


def _ordinal(labels: Any, logits: Any) -> Any:
    above = ops.cast(ops.cast(labels, "int32")[:, None] > tf.range(3), "float32")
    return ops.sum(ops.softplus(logits) - above * logits, -1)


@architecture(numbers=NUMBERS, label=ids(4), loss=_ordinal)
def ordinal_regression(numbers: Any) -> Any:
    return _Thresholds()(_deep(numbers))


def _schema(**y: Any) -> Schema:
    columns = {
        "age": {"kind": "numeric", "range": [0, 1], "missing": "indicator"},
        "job": {"kind": "category", "vocabulary": ["a", "b", "c"]},
        "words": {"kind": "text", "tokens": 3, "buckets": 6},
        "y": {"kind": "label", **y},
    }
    return Schema.from_json({"version": 1, "columns": columns})


_CLASSES = _schema(task="classes", classes=["red", "green", "blue"])


_NUMBER = _schema(task="regression", range=[0, 100])
_OF_CLASSES = "sparse_categorical_crossentropy"

for _name, _table, _loss in (
    ("named_classes", _CLASSES, _OF_CLASSES),
    ("regression", _NUMBER, "mean_squared_error"),
):
    architecture(name=_name, schema=_table, loss=_loss)(
        lambda manifest: table_model(read_table(manifest), embedding_dim=2, hidden=(4,))
    )


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
