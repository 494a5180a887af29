"""Architectures that were written after the engine, as users of Keras 3 write them.

``HELD_OUT`` stay apart by rows; ``MIXING`` are functions of all rows of a batch, before
a layer, and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.trainer import zoo
from tests.trainer.architectures import together
from trainer.tf_compat import keras, tf

layers, ops = keras.layers, keras.ops

Make = Callable[[], Any]
Body = Callable[[Any], Any]


def _numbers(body: Body) -> Make:
    """A model of (batch, 13) numbers; ``body`` gives (batch, ...)."""

    def make() -> Any:
        integers, values = zoo.numbers()
        hidden = layers.Flatten()(body(values))
        return keras.Model(integers, layers.Dense(1)(hidden))

    return make


def _steps(body: Body) -> Make:
    """A model of (batch, 4, 3) steps."""
    return _numbers(lambda v: body(layers.Reshape((4, 3))(v[:, :12])))


def _images(body: Body) -> Make:
    """A model of (batch, 4, 3, 1) images."""
    return _numbers(lambda v: body(layers.Reshape((4, 3, 1))(v[:, :12])))


def _words(body: Body) -> Make:
    """A model of (batch, 3, 4) masked embeddings; id 0 fills up."""

    def make() -> Any:
        ids = keras.Input((26,), dtype="int32", name="categories")
        rows = layers.Embedding(7, 4, mask_zero=True)(ids[:, :3])
        return keras.Model(ids, layers.Dense(1)(body(rows)))

    return make


class _Loop(keras.Model):
    """A subclassed model that applies one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = layers.Dense(5), layers.Dense(5, "tanh")
        self.last = layers.Dense(1)

    def call(self, columns: Any) -> Any:
        values = self.first(ops.nan_to_num(columns["integers"]) / 4.0)
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


class _Mixed(layers.Layer):
    """TensorFlow and Keras in one call."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight((shape[-1], 4), name="kernel")

    def call(self, values: Any) -> Any:
        hidden = tf.matmul(values, self.kernel)
        return ops.where(hidden > 0, tf.square(hidden), ops.sin(hidden))


class _Gated(layers.Layer):
    """Layers in a list, and one that is made in ``build``."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [layers.Dense(4), layers.Dense(4, "sigmoid")]

    def build(self, shape: Any) -> None:
        for part in self.parts:
            part.build(shape)
        self.scale = self.add_weight((4,), initializer="ones", name="scale")

    def call(self, values: Any) -> Any:
        return self.parts[0](values) * self.parts[1](values) * self.scale


def _sequential(late: bool) -> Make:
    def make() -> Any:
        inner = keras.Sequential([layers.Dense(4, "relu"), layers.Dense(3)])
        if not late:
            inner.build((None, 13))
        integers, values = zoo.numbers()
        return keras.Model(integers, layers.Dense(1)(inner(values)))

    return make


def _shared() -> Any:
    integers, values = zoo.numbers()
    tower = keras.Sequential([layers.Dense(4, "tanh"), layers.LayerNormalization()])
    both = layers.Concatenate()([tower(values), tower(-values)])
    return keras.Model(integers, layers.Dense(1)(both))


def _towers() -> Any:
    ids = keras.Input((26,), dtype="int32", name="categories")
    integers, values = zoo.numbers()
    user = layers.Dense(4)(layers.Flatten()(layers.Embedding(7, 2)(ids[:, :3])))
    film = layers.Dense(4)(values)
    score = layers.Dot(1, normalize=True)([user, film])
    return keras.Model({"categories": ids, "integers": integers}, 3.0 * score)


def _bilinear(values: Any) -> Any:
    left, right = layers.Dense(3)(values), layers.Dense(3)(values)
    return ops.einsum("bi,bj->bij", left, right)


def _squeeze(values: Any) -> Any:
    hidden = layers.Conv2D(4, 2, padding="same")(values)
    gate = layers.Dense(4, "sigmoid")(layers.GlobalAveragePooling2D()(hidden))
    return hidden * layers.Reshape((1, 1, 4))(gate)


def _both(layer: type, **more: Any) -> Body:
    return lambda v: layers.Bidirectional(layer(2, **more))(v)


HELD_OUT: dict[str, Make] = {
    "loop in a subclass": _loop,
    "layers of one's own": _numbers(
        together(
            lambda v: _OwnDropout()(layers.Dense(6)(v)),
            lambda v: _Mixed()(v),
            lambda v: _Gated()(v),
        )
    ),
    "sequential": _sequential(late=False),
    "sequential that is built late": _sequential(late=True),
    "shared tower": _shared,
    "towers by cosine": _towers,
    "products and norms": _numbers(
        together(
            _bilinear,
            lambda v: layers.RMSNormalization()(v),
            lambda v: layers.Dense(4, layers.PReLU())(v),
        )
    ),
    "query groups": _steps(lambda v: layers.GroupQueryAttention(2, 4, 2)(v, v)),
    "attention": _steps(
        together(
            lambda v: layers.MultiHeadAttention(2, 2, dropout=0.5)(v, v),
            lambda v: layers.MultiHeadAttention(1, 2)(v, v, use_causal_mask=True),
            lambda v: layers.AdditiveAttention()([v, v]),
        )
    ),
    "repeated vector": _numbers(
        lambda v: layers.SimpleRNN(2)(layers.RepeatVector(3)(layers.Dense(2)(v)))
    ),
    "convolution and recurrence": _steps(
        lambda v: layers.GRU(2)(layers.Conv1D(3, 2, padding="causal")(v))
    ),
    "of steps": _steps(
        together(
            lambda v: layers.EinsumDense("bij,jk->bik", (4, 2))(v),
            lambda v: layers.SpatialDropout1D(0.5)(v),
            lambda v: layers.Cropping1D(1)(layers.UpSampling1D(2)(v)),
        )
    ),
    "of images": _images(
        together(
            _squeeze,
            lambda v: layers.GroupNormalization(2)(
                layers.DepthwiseConv2D(2, depth_multiplier=2)(v)
            ),
            lambda v: layers.GlobalMaxPooling2D()(layers.Conv2D(3, 2)(v)),
        )
    ),
    "masked mean": _words(lambda v: layers.GlobalAveragePooling1D()(v)),
    "masked lstm with dropout": _words(
        lambda v: layers.LSTM(2, dropout=0.2, recurrent_dropout=0.2)(v)
    ),
    "masked attention": _words(
        lambda v: layers.GlobalAveragePooling1D()(layers.MultiHeadAttention(1, 2)(v, v))
    ),
    "masked steps, then a layer for each": _words(
        lambda v: layers.Flatten()(
            layers.Dense(2)(layers.GRU(2, return_sequences=True)(v))
        )
    ),
    "both directions of a masked gru": _words(_both(layers.GRU)),
}


def _of_first(values: Any) -> Any:
    return values - values[:1]


def _similar(values: Any) -> Any:
    return tf.nn.softmax(tf.matmul(values, values, transpose_b=True)) @ values


def _ranks(values: Any) -> Any:
    return tf.cast(tf.argsort(tf.argsort(values, 0), 0), tf.float32) / 8


def _of_others(values: Any) -> Any:
    return (tf.reduce_sum(values, 0, keepdims=True) - values) / 8


def _size(values: Any) -> Any:
    return values / tf.sqrt(tf.cast(tf.shape(values)[0], tf.float32))


def _regrouped(values: Any) -> Any:
    return tf.reshape(tf.transpose(values), tf.shape(values))


#: Functions (rows, units) -> (rows, units) that look at other rows.
_MIXES: dict[str, Body] = {
    "mean": lambda v: v - tf.reduce_mean(v, 0),
    "standard deviation": lambda v: v / (1.0 + tf.math.reduce_std(v, 0)),
    "largest": lambda v: v - tf.reduce_max(v, 0),
    "first row": _of_first,
    "running sum": lambda v: tf.cumsum(v, 0) / 8,
    "reversed": lambda v: tf.reverse(v, [0]),
    "rolled by one": lambda v: v + tf.roll(v, 1, 0),
    "sorted": lambda v: tf.sort(v, 0),
    "ranks": _ranks,
    "softmax over rows": lambda v: 8 * tf.nn.softmax(v, 0),
    "norm of all rows": lambda v: 4 * tf.math.l2_normalize(v, 0),
    "similar rows": _similar,
    "other rows": _of_others,
    "number of rows": _size,
    "regrouped values": _regrouped,
}
_PLACES: dict[str, Callable[[Body], Body]] = {
    "inputs": lambda mix: lambda v: layers.Dense(4, "tanh")(_layer(mix)(v)),
    "hidden": lambda mix: lambda v: _layer(mix)(layers.Dense(4, "tanh")(v)),
}


def _layer(mix: Body) -> Any:
    return layers.Lambda(mix)


MIXING: dict[str, Make] = {
    f"{name} of {place}": _numbers(around(mix))
    for name, mix in _MIXES.items()
    for place, around in _PLACES.items()
}
