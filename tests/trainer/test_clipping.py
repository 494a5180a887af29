"""Clipped sums against a loop over examples and against TF Privacy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainer.clipping import (
    BOOKKEEPING,
    REGISTRY,
    VECTORIZED,
    choose_path,
    clipped_sum,
    plain_sum,
)
from trainer.models import TrainableModel, binary_cross_entropy
from trainer.tf_privacy import keras, tf

CLIP = 0.3
NUM_ROWS = 8


def _numbers() -> tuple[Any, Any]:
    integers = keras.Input((13,), name="integers")
    return integers, tf.where(tf.math.is_nan(integers), 0.0, integers) / 4.0


def linear() -> Any:
    integers, values = _numbers()
    return keras.Model(integers, keras.layers.Dense(1)(values))


def tower() -> Any:
    integers, values = _numbers()
    for activation in ("relu", "tanh"):
        values = keras.layers.Dense(9, activation=activation)(values)
    return keras.Model(integers, keras.layers.Dense(1, use_bias=False)(values))


def several_ids_in_one_table() -> Any:
    categories = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Embedding(7, 3)(categories)
    values = keras.layers.GlobalAveragePooling1D()(values)
    return keras.Model(categories, keras.layers.Dense(1)(values))


def dense_per_position() -> Any:
    categories = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Embedding(7, 3)(categories)
    values = keras.layers.Dense(4, activation="tanh")(values)
    return keras.Model(categories, keras.layers.Dense(1)(tf.reduce_sum(values, 1)))


def both_inputs() -> Any:
    integers, values = _numbers()
    categories = keras.Input((26,), dtype="int32", name="categories")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(7, 2)(categories))
    values = keras.layers.Concatenate()([values, embedded])
    return keras.Model([integers, categories], keras.layers.Dense(1)(values))


def layer_used_twice() -> Any:
    integers, values = _numbers()
    layer = keras.layers.Dense(13, activation="tanh")
    return keras.Model(integers, keras.layers.Dense(1)(layer(layer(values))))


def tied_weights() -> Any:
    integers, values = _numbers()
    first, second = (keras.layers.Dense(13, activation="tanh") for _ in range(2))
    model = keras.Model(integers, keras.layers.Dense(1)(second(first(values))))
    second.kernel = first.kernel
    return model


def layer_normalization() -> Any:
    integers, values = _numbers()
    values = keras.layers.LayerNormalization()(keras.layers.Dense(6)(values))
    return keras.Model(integers, keras.layers.Dense(1)(values))


def nested() -> Any:
    integers, values = _numbers()
    inner = keras.Sequential([keras.layers.Dense(5, activation="relu")])
    return keras.Model(integers, keras.layers.Dense(1)(inner(values)))


def many_ids_in_one_table() -> Any:
    categories = keras.Input((26,), dtype="int32", name="categories")
    ids = tf.concat([categories, categories, 6 - categories], 1)
    values = keras.layers.Embedding(7, 3)(ids)
    return keras.Model(categories, keras.layers.Dense(1)(tf.reduce_mean(values, 1)))


def one_id() -> Any:
    categories = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Embedding(7, 3)(categories[:, 0])
    return keras.Model(categories, keras.layers.Dense(1)(values))


def masked_ids() -> Any:
    categories = keras.Input((26,), dtype="int32", name="categories")
    values = keras.layers.Embedding(7, 3, mask_zero=True)(categories)
    values = keras.layers.GlobalAveragePooling1D()(values)
    return keras.Model(categories, keras.layers.Dense(1)(values))


FAST = (
    linear,
    tower,
    one_id,
    several_ids_in_one_table,
    many_ids_in_one_table,
    dense_per_position,
    both_inputs,
)
OTHER = (layer_used_twice, tied_weights, layer_normalization, nested, masked_ids)


def _model(make: Callable[[], Any], seed: int = 0) -> TrainableModel:
    keras.utils.set_random_seed(seed)
    model = TrainableModel(network=make(), description={})
    for variable in model.variables:
        # Biases start at 0 and embeddings near it; clipping should meet all of them.
        variable.assign(tf.random.normal(variable.shape, stddev=0.7))
    return model


def _batch(
    rows: np.ndarray, padding: int = 0, fill: float = 0.0
) -> tuple[dict[str, Any], Any]:
    columns = {}
    for name in rows.dtype.names:
        values = rows[name]
        shape = (padding, *values.shape[1:])
        pad = np.full(shape, fill if values.dtype.kind == "f" else 0, values.dtype)
        columns[name] = tf.constant(np.concatenate([values, pad]))
    weight = np.repeat([1.0, 0.0], [len(rows), padding]).astype("f4")
    return columns, tf.constant(weight)


def _paths(model: TrainableModel) -> list[str]:
    fast = [BOOKKEEPING, REGISTRY] if choose_path(model) == BOOKKEEPING else []
    return [*fast, VECTORIZED]


def _arrays(gradients: list[Any]) -> list[np.ndarray]:
    return [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


def _naive_sum(
    model: TrainableModel, rows: np.ndarray, clip: float
) -> list[np.ndarray]:
    total = [np.zeros(variable.shape, "f8") for variable in model.variables]
    for index in range(len(rows)):
        columns, _ = _batch(rows[index : index + 1])
        with tf.GradientTape() as tape:
            loss = binary_cross_entropy(columns["label"], model.logits(columns))[0]
        gradients = _arrays(tape.gradient(loss, model.variables))
        norm = math.sqrt(sum(float((g.astype("f8") ** 2).sum()) for g in gradients))
        for target, gradient in zip(total, gradients, strict=True):
            target += gradient * min(1.0, clip / norm)
    return total


def _tf_privacy_sum(
    model: TrainableModel, columns: dict[str, Any], weight: Any, clip: float
) -> list[np.ndarray]:
    """The update of TF Privacy's DPModel on its vectorised path, times the batch."""
    from tensorflow_privacy.privacy.keras_models.dp_keras_model import DPModel

    network = model.network
    oracle = DPModel(
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        use_xla=False,
        inputs=network.inputs,
        outputs=network.outputs,
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    oracle.compile(optimizer=keras.optimizers.SGD(1.0), loss=loss)
    before = [v.numpy() for v in oracle.trainable_variables]
    label = tf.reshape(columns["label"], (-1, 1))
    oracle.train_step((model.inputs(columns), label, tf.reshape(weight, (-1, 1))))
    after = [v.numpy() for v in oracle.trainable_variables]
    for variable, value in zip(oracle.trainable_variables, before, strict=True):
        variable.assign(value)
    return [(b - a) * len(weight) for a, b in zip(after, before, strict=True)]


def _assert_close(
    found: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = 1e-5
) -> None:
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("make", FAST)
def test_models_of_known_layers_are_book_kept(make: Callable[[], Any]) -> None:
    assert choose_path(_model(make)) == BOOKKEEPING


@pytest.mark.parametrize("make", OTHER)
def test_other_models_take_the_vectorized_path(make: Callable[[], Any]) -> None:
    assert choose_path(_model(make)) == VECTORIZED


@pytest.mark.parametrize("make", FAST + OTHER)
@pytest.mark.parametrize("clip", [CLIP, 50.0])
def test_clipped_sum_equals_a_loop_over_examples(
    make: Callable[[], Any], clip: float, rows: Any
) -> None:
    model, data = _model(make), rows(NUM_ROWS)
    columns, weight = _batch(data, padding=4)
    for path in _paths(model):
        # As a step runs it: shapes behave otherwise in a graph.
        gradient_sum = tf.function(clipped_sum(model, l2_norm_clip=clip, path=path))
        found = gradient_sum(columns, weight)
        _assert_close(_arrays(found), _naive_sum(model, data, clip))


@pytest.mark.parametrize("num_rows", [1, 3, 12, 100])
def test_rows_may_come_in_chunks(
    num_rows: int, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = _model(layer_normalization), rows(NUM_ROWS)
    num_values = sum(int(np.prod(v.shape)) for v in model.variables)
    name = "trainer.clipping._MOST_GRADIENT_VALUES"
    monkeypatch.setattr(name, num_rows * num_values + 1)
    gradient_sum = tf.function(clipped_sum(model, l2_norm_clip=CLIP))
    found = gradient_sum(*_batch(data, padding=4, fill=math.nan))
    _assert_close(_arrays(found), _naive_sum(model, data, CLIP))


@pytest.mark.parametrize("make", FAST + OTHER)
def test_clipped_sum_equals_tf_privacy(make: Callable[[], Any], rows: Any) -> None:
    model = _model(make)
    # A mean over no id is NaN, which TF Privacy multiplies by a weight of 0.
    padding = 0 if make is masked_ids else 4
    columns, weight = _batch(rows(NUM_ROWS), padding=padding)
    found = clipped_sum(model, l2_norm_clip=CLIP)(columns, weight)
    _assert_close(_arrays(found), _tf_privacy_sum(model, columns, weight, CLIP))


@pytest.mark.parametrize("make", [both_inputs, layer_normalization])
def test_each_row_contributes_at_most_the_clip(
    make: Callable[[], Any], rows: Any
) -> None:
    model, data = _model(make), rows(NUM_ROWS)
    gradient_sum = clipped_sum(model, l2_norm_clip=CLIP)
    norms = []
    for index in range(NUM_ROWS):
        gradients = _arrays(gradient_sum(*_batch(data[index : index + 1], padding=1)))
        norms.append(math.sqrt(sum(float((g**2).sum()) for g in gradients)))
    assert max(norms) <= CLIP * (1 + 1e-5)
    assert max(norms) >= CLIP * (1 - 1e-5), "the test needs a row that is clipped"


@pytest.mark.parametrize("make", [both_inputs, layer_normalization])
@pytest.mark.parametrize("fill", [0.0, math.nan, math.inf, 1e30])
@pytest.mark.parametrize("padding", [4, 104])
def test_padding_contributes_exactly_nothing(
    make: Callable[[], Any], fill: float, padding: int, rows: Any
) -> None:
    model, data = _model(make), rows(NUM_ROWS)
    for path in _paths(model):
        gradient_sum = clipped_sum(model, l2_norm_clip=CLIP, path=path)
        wanted = _arrays(gradient_sum(*_batch(data, padding=4)))
        found = _arrays(gradient_sum(*_batch(data, padding=padding, fill=fill)))
        # The order of a sum of floats may depend on the shape, so not bit for bit.
        _assert_close(found, wanted, 1e-6)


@pytest.mark.parametrize("make", [both_inputs, layer_normalization])
def test_a_batch_of_padding_gives_exactly_zero(
    make: Callable[[], Any], rows: Any
) -> None:
    model = _model(make)
    for path in _paths(model):
        gradient_sum = clipped_sum(model, l2_norm_clip=CLIP, path=path)
        found = gradient_sum(*_batch(rows(0), padding=5, fill=math.nan))
        assert all(not array.any() for array in _arrays(found))


@pytest.mark.parametrize("make", [linear, layer_normalization])
@pytest.mark.parametrize("bad", [math.inf, 1e38])
def test_a_row_without_a_finite_gradient_contributes_nothing(
    make: Callable[[], Any], bad: float, rows: Any
) -> None:
    model, data = _model(make), rows(NUM_ROWS)
    spoiled = np.concatenate([data, data[:1]])
    spoiled["integers"][-1] = bad
    spoiled["label"][-1] = 0
    for path in _paths(model):
        gradient_sum = clipped_sum(model, l2_norm_clip=CLIP, path=path)
        found = _arrays(gradient_sum(*_batch(spoiled, padding=3)))
        wanted = _arrays(gradient_sum(*_batch(data, padding=4)))
        assert all(np.isfinite(array).all() for array in found)
        if not math.isfinite(bad):
            _assert_close(found, wanted, 1e-6)


@pytest.mark.parametrize("make", [both_inputs, layer_normalization])
def test_an_infinite_clip_leaves_gradients_as_they_are(
    make: Callable[[], Any], rows: Any
) -> None:
    model, data = _model(make), rows(NUM_ROWS)
    columns, weight = _batch(data, padding=4)
    wanted = _arrays(plain_sum(model)(columns, weight))
    for path in _paths(model):
        gradient_sum = clipped_sum(model, l2_norm_clip=math.inf, path=path)
        _assert_close(_arrays(gradient_sum(columns, weight)), wanted)
