"""Architectures of all kinds: what users bring to private training.

Each takes the columns ``integers`` (13 floats, some NaN) and ``categories`` (26 ids
below 7).  The dicts say on which path a model's gradients are computed, or why it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.trainer import zoo
from trainer.tf_compat import keras, tf

layers, ops = keras.layers, keras.ops

Make = Callable[[], Any]


def _of_numbers(body: Callable[[Any], Any]) -> Make:
    """A model of (batch, 13) numbers; ``body`` gives (batch, units)."""

    def make() -> Any:
        integers, values = zoo.numbers()
        return keras.Model(integers, layers.Dense(1)(body(values)))

    return make


def _of_sequence(body: Callable[[Any], Any]) -> Make:
    """A model of (batch, 4, 4) values; ``body`` gives (batch, ..., units)."""

    def sequence(values: Any) -> Any:
        steps = layers.Dense(4)(ops.expand_dims(values[:, :4], -1))
        return layers.Flatten()(body(steps))

    return _of_numbers(sequence)


def _of_ids(body: Callable[[Any], Any], **table: Any) -> Make:
    """A model of (batch, 4, 3) embedded ids."""

    def make() -> Any:
        ids = keras.Input((26,), dtype="int32", name="categories")
        rows = layers.Embedding(7, 3, **table)(ids[:, :4])
        return keras.Model(ids, layers.Dense(1)(layers.Flatten()(body(rows))))

    return make


def _named(part: Any) -> Any:
    """A layer of the class; one that is made already gets a name of its own.

    Once another test has cleared Keras' session, a new layer may have that name.
    """
    if isinstance(part, type):
        return part()
    if isinstance(part, layers.Layer):
        part.name = f"part_{id(part)}"
    return part


def _seq(*parts: Any) -> Callable[[Any], Any]:
    def apply(values: Any) -> Any:
        for part in parts:
            values = _named(part)(values)
        return values

    return apply


def together(*bodies: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The outputs of all side by side; each is a way to get a gradient wrong."""
    return lambda values: ops.concatenate(
        [layers.Flatten()(_named(body)(values)) for body in bodies], 1
    )


def _by_tf(function: Callable[[Any], Any]) -> Any:
    """A layer that calls a function of TensorFlow."""
    return layers.Lambda(function)


def _dense(units: int = 6, **more: Any) -> Callable[[Any], Any]:
    return lambda values: layers.Dense(units, **more)(values)


class _Residual(layers.Layer):
    """A user's layer that holds layers of Keras."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first = layers.Dense(units, activation="tanh")
        self.second = layers.Dense(13)

    def call(self, values: Any) -> Any:
        return values + self.second(self.first(values))


class _OwnWeights(layers.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight((shape[-1],), initializer="ones")

    def call(self, values: Any) -> Any:
        return values * self.scale


class _Subclass(keras.Model):
    """All columns in, one logit out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(7, 3)
        self.hidden = layers.Dense(5, activation="relu")
        self.logit = layers.Dense(1)

    def call(self, columns: Any, training: bool = False) -> Any:
        numbers = columns["integers"]
        numbers = tf.where(tf.math.is_nan(numbers), 0.0, numbers) / 4.0
        rows = tf.reshape(self.table(columns["categories"]), (-1, 78))
        return self.logit(self.hidden(tf.concat([numbers, rows], 1)))


class _Loop(keras.Model):
    """A subclassed model that applies one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.last = layers.Dense(13, "tanh"), layers.Dense(1)

    def call(self, columns: Any) -> Any:
        values = ops.nan_to_num(columns["integers"]) / 4.0
        for _ in range(3):
            values = values + self.again(values)
        return self.last(values)


def _loop() -> Any:
    inputs = {"integers": keras.Input((13,), name="integers")}
    return keras.Model(inputs, _Loop()(inputs))


class _OwnDropout(layers.Layer):
    """Drops by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = keras.random.SeedGenerator(5)

    def call(self, values: Any, training: bool = False) -> Any:
        if training:
            return keras.random.dropout(values, 0.5, seed=self.draws)
        return values


class Overridden(keras.Model):
    """A functional model whose ``call`` is not its graph."""

    def call(self, columns: Any, training: bool = False, mask: Any = None) -> Any:
        return 2.0 * super().call(columns, training=training, mask=mask) ** 2


def _overridden() -> Any:
    integers, values = zoo.numbers()
    return Overridden(integers, layers.Dense(1)(values))


def _subclass() -> Any:
    inputs = {
        "integers": keras.Input((13,), name="integers"),
        "categories": keras.Input((26,), dtype="int32", name="categories"),
    }
    return keras.Model(inputs, _Subclass()(inputs))


def _masking() -> Any:
    integers, values = zoo.numbers()
    steps = layers.Masking(0.0)(ops.stack([values, ops.relu(values)], 2))
    steps = layers.Dense(3)(steps)
    return keras.Model(
        integers, layers.Dense(1)(layers.GlobalAveragePooling1D()(steps))
    )


def _table_through_an_op() -> Any:
    ids = keras.Input((26,), dtype="int32", name="categories")
    table = layers.Embedding(7, 3)
    hidden = ops.sum(table(ids), 1)
    scores = ops.einsum("bi,ji->bj", hidden, table.embeddings)
    return keras.Model(ids, layers.Dense(1)(scores))


def _table_in_a_lambda() -> Any:
    ids = keras.Input((26,), dtype="int32", name="categories")
    table = layers.Embedding(7, 3)
    hidden = ops.sum(table(ids), 1)
    scores = layers.Lambda(lambda h: tf.matmul(h, table.embeddings, transpose_b=True))
    return keras.Model(ids, layers.Dense(1)(scores(hidden)))


class _Untracked(layers.Layer):
    """Reads a table that Keras does not track."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self._read = lambda: table.embeddings

    def call(self, hidden: Any) -> Any:
        return tf.matmul(hidden, self._read(), transpose_b=True)


def _table_untracked() -> Any:
    ids = keras.Input((26,), dtype="int32", name="categories")
    table = layers.Embedding(7, 3)
    hidden = ops.sum(table(ids), 1)
    return keras.Model(ids, layers.Dense(1)(_Untracked(table)(hidden)))


def _two_tables() -> Any:
    ids = keras.Input((26,), dtype="int32", name="categories")
    first = layers.Embedding(7, 3)(ids[:, :3])
    second = layers.Embedding(7, 2)(ids[:, 3:])
    flat = [layers.Flatten()(value) for value in (first, second)]
    return keras.Model(ids, layers.Dense(1)(layers.Concatenate()(flat)))


def _table_used_twice() -> Any:
    ids = keras.Input((26,), dtype="int32", name="categories")
    table = layers.Embedding(7, 3)
    values = table(ids[:, :13]) * table(ids[:, 13:])
    return keras.Model(ids, layers.Dense(1)(ops.sum(values, 1)))


def _constant_positions() -> Any:
    # The second table is read once, while the model is built: it is not trained.
    ids = keras.Input((26,), dtype="int32", name="categories")
    values = layers.Embedding(7, 3)(ids) + layers.Embedding(26, 3)(tf.range(26))
    return keras.Model(ids, layers.Dense(1)(ops.mean(ops.tanh(values), 1)))


def _frozen_layer() -> Any:
    integers, values = zoo.numbers()
    values = layers.Dense(5, activation="tanh", trainable=False)(values)
    return keras.Model(integers, layers.Dense(1)(values))


def _factorisation() -> Any:
    ids = keras.Input((26,), dtype="int32", name="categories")
    rows = layers.Embedding(7, 3)(ids)
    pairs = ops.square(ops.sum(rows, 1)) - ops.sum(ops.square(rows), 1)
    return keras.Model(ids, layers.Dense(1)(pairs))


def _deep_and_cross() -> Any:
    integers, values = zoo.numbers()
    crossed = values
    for _ in range(2):
        crossed = values * layers.Dense(13)(crossed) + crossed
    deep = layers.Dense(5, activation="relu")(values)
    return keras.Model(integers, layers.Dense(1)(ops.concatenate([crossed, deep], 1)))


def _attention_block(values: Any) -> Any:
    values += layers.MultiHeadAttention(2, 2)(values, values)
    values = layers.LayerNormalization()(values)
    return values + layers.Dense(4)(layers.Dense(6, activation="gelu")(values))


def _by_hand(values: Any) -> Any:
    query, key, value = (layers.Dense(3)(values) for _ in range(3))
    scores = ops.matmul(query, ops.transpose(key, (0, 2, 1))) / 2.0
    return ops.matmul(ops.softmax(scores), value)


class _Positions(layers.Layer):
    """Adds a trained vector to each of four places."""

    def build(self, shape: Any) -> None:
        self.places = layers.Embedding(4, shape[-1])

    def call(self, values: Any) -> Any:
        return values + self.places(tf.range(4))


def _looked_up(make: Callable[[Any], Any]) -> Make:
    """A model of the rows of a table for ids that ``make`` computes."""

    def model() -> Any:
        ids = keras.Input((26,), dtype="int32", name="categories")
        rows = layers.Embedding(7, 3)(make(ids))
        return keras.Model(ids, layers.Dense(1)(layers.Flatten()(rows)))

    return model


def _two_towers() -> Any:
    integers, values = zoo.numbers()
    ids = keras.Input((26,), dtype="int32", name="categories")
    left = layers.Dense(3)(values)
    right = layers.Dense(3)(layers.Flatten()(layers.Embedding(7, 2)(ids)))
    score = layers.Dot(1, normalize=True)([left, right])
    return keras.Model([integers, ids], layers.Dense(1)(score))


def _discretised() -> Any:
    integers, values = zoo.numbers()
    bins = layers.Discretization(bin_boundaries=[-0.5, 0.0, 0.5])(values)
    rows = layers.Embedding(4, 2)(bins)
    return keras.Model(integers, layers.Dense(1)(layers.Flatten()(rows)))


def half_precision() -> Any:
    integers, values = zoo.numbers()
    hidden = layers.Dense(4, dtype="mixed_float16")(values)  # weights stay float32
    return keras.Model(integers, layers.Dense(1, dtype="float32")(hidden))


def _mixture_of_experts(values: Any) -> Any:
    gates = layers.Dense(3, activation="softmax")(values)
    experts = ops.stack([layers.Dense(4)(values) for _ in range(3)], 1)
    return ops.einsum("be,bed->bd", gates, experts)


def _highway(values: Any) -> Any:
    gate = layers.Dense(13, activation="sigmoid")(values)
    return gate * layers.Dense(13, activation="relu")(values) + (1 - gate) * values


def _siamese(values: Any) -> Any:
    tower = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(3)])
    left, right = tower(values[:, :6]), tower(values[:, 6:12])
    return left - right


def _pairwise(values: Any) -> Any:
    pair = ops.reshape(values[:, :12], (-1, 2, 6))
    scores = layers.Dense(4, activation="tanh")(pair)
    return scores[:, 0] - scores[:, 1]


def _grid(values: Any) -> Any:
    return ops.reshape(values[:, :12], (-1, 3, 4, 1))


def _clip_of_images(values: Any) -> Any:
    return ops.reshape(values[:, :8], (-1, 2, 2, 2, 1))


def _activations(values: Any) -> Any:
    names = ("elu", "gelu", "selu", "softplus", "swish", "softmax", "sigmoid")
    parts = [_dense(activation=name)(values) for name in names]
    parts += [one()(_dense()(values)) for one in (layers.LeakyReLU, layers.ReLU)]
    return ops.concatenate(parts, 1)


_OF_TWO = (layers.Add, layers.Multiply)


@tf.custom_gradient
def _own_gradient(values: Any) -> Any:
    return tf.tanh(values), lambda slope: 0.5 * slope


#: One forward and backward pass for all rows.
GHOST: dict[str, Make] = {
    "activations": _of_numbers(_activations),
    "skip, add and multiply": _of_numbers(
        lambda v: ops.concatenate(
            [v, *(one()([v, layers.Dense(13)(v)]) for one in _OF_TWO)], 1
        )
    ),
    "residual layer of one's own": _of_numbers(lambda v: _Residual(5)(v)),
    "subclass": _subclass,
    "overridden call": _overridden,
    "two tables": _two_tables,
    "constant positions": _constant_positions,
    "frozen layer": _frozen_layer,
    "factorisation": _factorisation,
    "deep and cross": _deep_and_cross,
    "mixture of experts": _of_numbers(_mixture_of_experts),
    "highway": _of_numbers(_highway),
    "pairwise difference": _of_numbers(_pairwise),
    "attention by hand": _of_sequence(_by_hand),
    "of steps": _of_sequence(
        together(
            lambda v: layers.Attention()([v, v]),
            _dense(3, activation="tanh"),
            layers.GlobalAveragePooling1D(),
            layers.GlobalMaxPooling1D(),
            layers.ZeroPadding1D(2),
            layers.Permute((2, 1)),
        )
    ),
    "pooling of windows": _of_numbers(
        _seq(_grid, layers.MaxPooling2D, layers.Flatten, _dense())
    ),
    "functions of a layer": _of_numbers(
        together(
            _seq(_dense(), _by_tf(lambda v: tf.math.l2_normalize(v, 1))),
            _seq(_dense(), layers.Lambda(lambda v: v * 2.0)),
            lambda v: keras.Sequential([keras.Sequential([layers.Dense(4)])])(v),
            _seq(layers.Normalization(mean=0.5, variance=2.0), layers.Rescaling(0.5)),
            _seq(_dense(), layers.BatchNormalization(trainable=False)),
        )
    ),
    "mean of ids": _of_ids(lambda rows: ops.mean(rows, 1)),
    "masked dense": _masking,
    "two towers": _two_towers,
    "discretised": _discretised,
    "lookups": _looked_up(
        together(
            layers.IntegerLookup(vocabulary=[1, 2, 3, 4, 5]),
            _seq(_by_tf(tf.strings.as_string), layers.StringLookup(vocabulary=["1"])),
            layers.Hashing(5),
        )
    ),
    "loop in a subclass": _loop,
    "built late": _of_numbers(lambda v: keras.Sequential([layers.Dense(4)])(v)),
    "query groups": _of_sequence(lambda v: layers.GroupQueryAttention(2, 4, 2)(v, v)),
    "root mean squares": _of_numbers(lambda v: layers.RMSNormalization()(v)),
    "dropout": _of_numbers(
        together(
            _seq(_dense(), _OwnDropout),
            _seq(_dense(), layers.Dropout(0.5)),
            _seq(_dense(), layers.Dropout(0.0)),
            lambda v: layers.Dropout(0.5)(layers.Dense(4)(v), training=False),
        )
    ),
}

#: One forward and backward pass, with the uses of weights found in the traced graph.
OPERATIONS: dict[str, Make] = {
    "table in a lambda": _table_in_a_lambda,
    "table untracked": _table_untracked,
    "table used twice": _table_used_twice,
    "siamese": _of_numbers(_siamese),
    "weights of numbers": _of_numbers(
        together(
            lambda v: _OwnWeights()(v),
            _seq(_dense(), layers.PReLU),
            layers.LayerNormalization(),
            _seq(_dense(), layers.UnitNormalization, layers.LayerNormalization),
        )
    ),
    "weighted activation": _of_numbers(_dense(activation=layers.PReLU())),
    "group normalisation": _of_sequence(lambda v: layers.GroupNormalization(2)(v)),
    "weights of steps": _of_sequence(
        together(
            lambda v: layers.TimeDistributed(layers.Dense(3))(v),
            lambda v: layers.Conv1D(3, 3)(v),
            lambda v: layers.EinsumDense("abc,cd->abd", output_shape=(4, 3))(v),
        )
    ),
    "simple rnn": _of_sequence(lambda v: layers.SimpleRNN(3, return_sequences=True)(v)),
    "lstm": _of_sequence(lambda v: layers.LSTM(2)(v)),
    "gru": _of_sequence(lambda v: layers.GRU(2, unroll=True)(v)),
    "stacked cells": _of_sequence(
        lambda v: layers.RNN([layers.LSTMCell(2), layers.SimpleRNNCell(2)])(v)
    ),
    "bidirectional": _of_sequence(
        lambda v: layers.Bidirectional(layers.GRU(2, return_sequences=True))(v)
    ),
    "masked lstm": _of_ids(lambda rows: layers.LSTM(2)(rows), mask_zero=True),
    "convolutional lstm": _of_numbers(
        _seq(_clip_of_images, lambda v: layers.ConvLSTM2D(1, 2)(v), layers.Flatten)
    ),
    "places": _of_ids(lambda rows: _Positions()(rows)),
    "convolutions of clips": _of_numbers(
        _seq(
            _clip_of_images,
            together(
                lambda v: layers.Conv3D(2, 2)(v),
                lambda v: layers.TimeDistributed(layers.Conv2D(2, 2))(v),
            ),
        )
    ),
    "strides and padding": _of_numbers(
        _seq(_grid, layers.Conv2D(2, 2, strides=2, padding="same"), layers.Flatten)
    ),
    "convolutions": _of_numbers(
        _seq(
            _grid,
            together(
                layers.Conv2D(2, 2),
                _seq(layers.Conv2D(2, 2), layers.DepthwiseConv2D(2)),
                _seq(layers.Resizing(2, 2), layers.Conv2D(2, 2)),
            ),
        )
    ),
    "causal attention": _of_ids(
        lambda rows: layers.MultiHeadAttention(2, 2)(rows, rows, use_causal_mask=True),
        mask_zero=True,
    ),
    "separable": _of_numbers(_seq(_grid, layers.SeparableConv2D(2, 2), layers.Flatten)),
    "multi-head attention": _of_sequence(
        lambda v: layers.MultiHeadAttention(2, 2)(v, v)
    ),
    "transformer": _of_sequence(_attention_block),
}

#: The gradient of one row at a time.
VECTORIZED: dict[str, Make] = {
    "gradient of one's own": _of_numbers(_seq(_dense(), layers.Lambda(_own_gradient))),
    "transposed convolution": _of_numbers(
        _seq(_grid, layers.Conv2DTranspose(2, 2), layers.Flatten)
    ),
    "dilated convolution": _of_sequence(
        lambda v: layers.Conv1D(2, 2, dilation_rate=2, padding="causal")(v)
    ),
    "grouped convolution": _of_numbers(
        _seq(_grid, layers.Conv2D(2, 2), layers.Conv2D(2, 1, groups=2), layers.Flatten)
    ),
    "table through an op": _table_through_an_op,  # Keras turns it
    "masked bidirectional": _of_ids(
        lambda rows: layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True))(
            rows
        ),
        mask_zero=True,
    ),
    "cell in slices": _of_sequence(
        lambda v: layers.GRU(2, reset_after=False)(v[:, :2])
    ),
}

#: What is refused, and the words that say why.
REFUSED: dict[str, tuple[Make, str]] = {
    "batch maximum": (
        _of_numbers(_by_tf(lambda v: v / (1e-3 + tf.reduce_max(tf.abs(v))))),
        "not to depend on the others",
    ),
    "places": (
        _of_numbers(
            _by_tf(lambda v: v + tf.cast(tf.range(tf.shape(v)[0]), tf.float32)[:, None])
        ),
        "not to depend on the others",
    ),
    "roll by four": (
        _of_numbers(_by_tf(lambda v: tf.roll(v, 4, 0))),
        "not to depend on the others",
    ),
    "batch mean": (
        _of_numbers(_by_tf(lambda v: v - tf.reduce_mean(v, 0))),
        "not to depend on the others",
    ),
    "batch softmax": (
        _of_numbers(_by_tf(lambda v: 9.0 * tf.nn.softmax(v, 0))),
        "not to depend on the others",
    ),
    "batch size": (
        _of_numbers(_by_tf(lambda v: v * tf.cast(tf.shape(v)[0], tf.float32))),
        "not to depend on the others",
    ),
    "neighbours": (
        _of_numbers(_by_tf(lambda v: v + tf.concat([v[1:], v[:1]], 0))),
        "not to depend on the others",
    ),
    "batch normalisation": (
        _of_numbers(_seq(_dense(), layers.BatchNormalization)),
        "mixes examples",
    ),
    "noise": (_of_numbers(layers.GaussianNoise(0.5)), "random numbers"),
    "adapted later": (_of_numbers(layers.Normalization()), "mean and variance"),
}
