"""Models, batches and gradients that the tests of per-example gradients share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.core.tf_compat import keras, tf
from trainer.model.trainable_model import TrainableModel

NUM_ROWS = 5

# As every run of `train`: some losses are other operations then.
tf.config.experimental.enable_op_determinism()


def numbers() -> tuple[Any, Any]:
    integers = keras.Input((13,), name="integers")
    return integers, keras.ops.where(keras.ops.isnan(integers), 0.0, integers) / 4.0


def linear() -> Any:
    integers, values = numbers()
    return keras.Model(integers, keras.layers.Dense(1)(values))


def dense_per_position() -> Any:
    categories = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Embedding(7, 3)(categories)
    values = keras.layers.Dense(4, activation="tanh")(values)
    return keras.Model(categories, keras.layers.Dense(1)(keras.ops.sum(values, 1)))


def both_inputs() -> Any:
    integers, values = numbers()
    categories = keras.Input((26,), dtype="int32", name="categories")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(7, 2)(categories))
    values = keras.layers.Concatenate()([values, embedded])
    return keras.Model([integers, categories], keras.layers.Dense(1)(values))


def layer_used_twice() -> Any:
    integers, values = numbers()
    layer = keras.layers.Dense(13, activation="tanh")
    return keras.Model(integers, keras.layers.Dense(1)(layer(layer(values))))


class Turned(keras.layers.Layer):
    """Multiplies by the kernel of another layer, which Keras tracks twice."""

    def __init__(self, dense: Any) -> None:
        super().__init__()
        self.dense = dense

    def call(self, values: Any) -> Any:
        return tf.tanh(tf.matmul(values, self.dense.kernel, transpose_b=True))


def tied_weights() -> Any:
    integers, values = numbers()
    dense = keras.layers.Dense(13, activation="tanh")
    values = dense(values)
    return keras.Model(integers, keras.layers.Dense(1)(Turned(dense)(values)))


def layer_normalization() -> Any:
    integers, values = numbers()
    values = keras.layers.LayerNormalization()(keras.layers.Dense(6)(values))
    return keras.Model(integers, keras.layers.Dense(1)(values))


def many_ids_in_one_table() -> Any:
    categories = keras.Input((26,), dtype="int32", name="categories")
    ids = keras.ops.concatenate([categories, categories, 6 - categories], 1)
    values = keras.layers.Embedding(7, 3)(ids)
    return keras.Model(categories, keras.layers.Dense(1)(keras.ops.mean(values, 1)))


def one_id() -> Any:
    categories = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Embedding(7, 3)(categories[:, 0])
    return keras.Model(categories, keras.layers.Dense(1)(values))


def masked_ids() -> Any:
    categories = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Embedding(7, 3, mask_zero=True)(categories)
    values = keras.layers.GlobalAveragePooling1D()(values)
    return keras.Model(categories, keras.layers.Dense(1)(values))


#: Computed by the graph's operations alone.
FAST = (one_id, many_ids_in_one_table, both_inputs)
OTHER = (layer_used_twice, tied_weights, layer_normalization)
#: These have every layer, and every use of one: they are computed on both paths.
EVERY_LAYER = (dense_per_position, masked_ids, *OTHER)


def make_model(make: Callable[[], Any], seed: int = 0) -> TrainableModel:
    """A model with weights that hide nothing."""
    keras.utils.set_random_seed(seed)
    model = TrainableModel(network=make(), description={"make": make})
    random = np.random.default_rng(seed)
    for variable in model.variables:
        # Biases start at 0 and embeddings near it; clipping should meet all of them.
        variable.assign(random.normal(0, 0.7, variable.shape).astype("f4"))
    return model


def batch(
    rows: np.ndarray, padding: int = 0, fill: float = 0.0
) -> tuple[dict[str, Any], Any]:
    """Columns and weight of the rows, with padding after them."""
    columns = {}
    for name in rows.dtype.names:
        values = rows[name]
        shape = (padding, *values.shape[1:])
        pad = np.full(shape, fill if values.dtype.kind == "f" else 0, values.dtype)
        columns[name] = tf.constant(np.concatenate([values, pad]))
    weight = np.repeat([1.0, 0.0], [len(rows), padding]).astype("f4")
    return columns, tf.constant(weight)


def arrays(gradients: list[Any]) -> list[np.ndarray]:
    """Dense arrays of gradients."""
    return [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


def norm_of(gradients: list[np.ndarray]) -> float:
    """The norm of all values together."""
    return math.sqrt(sum(float((g.astype("f8") ** 2).sum()) for g in gradients))


def clipped_total(
    gradients: list[list[np.ndarray]], clip: float, cap: float = math.inf
) -> list[np.ndarray]:
    """The sum of the gradients of examples, each clipped by itself."""
    total = [np.zeros(g.shape, "f8") for g in gradients[0]]
    for of_example in gradients:
        norm = norm_of(of_example)
        scale = 1.0 if norm <= clip else clip / norm
        for target, g in zip(total, of_example, strict=True):
            target += np.clip(g * scale, -cap, cap)
    return total


def tape_gradients(model: TrainableModel, row: dict[str, Any]) -> list[np.ndarray]:
    """The gradient of the only row of a batch."""
    with tf.GradientTape() as tape:
        loss = model.losses(row)[0]
    return arrays(tape.gradient(loss, model.variables))


def naive_gradients(model: TrainableModel, rows: np.ndarray) -> list[list[np.ndarray]]:
    """The gradients of rows, each by a tape of its own."""
    return [tape_gradients(model, batch(row)[0]) for row in rows[:, np.newaxis]]


def naive_sum(
    model: TrainableModel, rows: np.ndarray, clip: float, cap: float = math.inf
) -> list[np.ndarray]:
    """The sum of clipped gradients by a loop over the rows."""
    return clipped_total(naive_gradients(model, rows), clip, cap)


def assert_close(
    found: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = 1e-5
) -> None:
    """All values agree."""
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)
