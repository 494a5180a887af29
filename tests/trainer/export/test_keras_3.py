"""Keras 2 models, converted to Keras 3 models with the same outputs."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from accounting.validation import InputError
from trainer.export import keras_3
from trainer.export.keras_3 import to_keras_3
from trainer.tf_compat import keras, tf

layers = keras.layers


def _network() -> Any:
    """Has layers of most kinds, functions, a nested model and a shared layer."""
    keras.utils.set_random_seed(0)
    numbers = keras.Input((6,), name="numbers")
    ids = keras.Input((4,), dtype="int32", name="ids")
    image = keras.Input((6, 6, 2), name="image")
    known = tf.where(tf.math.is_nan(numbers), 0.0, tf.abs(numbers))
    known = tf.math.log1p(tf.clip_by_value(known, 0.0, 9.0)) * [1.0, 2, 3, 4, 5, 6]
    words = layers.Embedding(9, 6)(tf.minimum(ids, [1, 2, 3, 4]))
    words = layers.MultiHeadAttention(2, 3)(words, words)
    shared = layers.Dense(6, activation="relu")
    inner = keras.Sequential([layers.Dense(3, "tanh"), layers.LayerNormalization()])
    parts = [
        inner(shared(shared(known))),
        layers.LSTM(3)(words),
        layers.GRU(3)(words),
        layers.GlobalAveragePooling1D()(layers.Conv1D(2, 2)(words)),
        layers.Flatten()(layers.GroupNormalization(1)(layers.Conv2D(2, 3)(image))),
        tf.reduce_mean(words, axis=1),
    ]
    logit = layers.Dense(1)(tf.concat(parts, axis=-1))
    return keras.Model({"numbers": numbers, "ids": ids, "image": image}, logit)


def _file(network: Any, path: pathlib.Path) -> pathlib.Path:
    for variable in network.variables:
        variable.assign(np.random.default_rng(0).normal(0, 0.5, variable.shape))
    network.save(path)
    return path


def test_a_conversion_gives_the_outputs_of_the_model(tmp_path: pathlib.Path) -> None:
    network = _network()
    converted = to_keras_3(_file(network, tmp_path / "model.keras"))
    assert type(converted).__module__.startswith("keras.")
    random = np.random.default_rng(1)
    rows = {
        "numbers": random.normal(size=(5, 6)).astype("f4"),
        "ids": random.integers(0, 9, (5, 4)).astype("i4"),
        "image": random.normal(size=(5, 6, 6, 2)).astype("f4"),
    }
    np.testing.assert_allclose(converted(rows), network(rows), rtol=1e-4, atol=1e-6)


def test_layers_in_layers_are_converted_with_their_weights_and_masks(
    tmp_path: pathlib.Path,
) -> None:
    ids = keras.Input((5,), dtype="int32", name="ids")
    words = layers.Embedding(9, 3, mask_zero=True)(ids)
    backward = layers.GRU(2, return_sequences=True, go_backwards=True)
    cells = [layers.LSTMCell(2), layers.GRUCell(3)]
    parts = [
        layers.Bidirectional(layers.LSTM(2))(words),
        layers.Bidirectional(
            layers.GRU(2, return_sequences=True),
            merge_mode="mul",
            backward_layer=backward,
        )(words),
        layers.TimeDistributed(layers.Dense(2, "tanh"))(words),
        layers.RNN(cells)(words),
        layers.LSTM(2, return_sequences=True, zero_output_for_mask=True)(words),
    ]
    plain = layers.Embedding(9, 3)(ids)  # Keras 3 takes no mask beside a first state
    first = layers.Dense(2)(plain[:, -1, :2])
    both = layers.Bidirectional(layers.SimpleRNN(2, return_state=True))
    parts += both(plain, initial_state=[first, -first])
    flat = [layers.Flatten()(part) for part in parts]
    network = keras.Model(ids, layers.Dense(2)(tf.concat(flat, axis=-1)))
    converted = to_keras_3(_file(network, tmp_path / "model.keras"))
    rows = np.array([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8], [0] * 5], "i4")
    np.testing.assert_allclose(converted(rows), network(rows), rtol=1e-4, atol=1e-6)


def test_inputs_in_a_list_stay_a_list() -> None:
    left, right = keras.Input((3,)), keras.Input((2,))
    network = keras.Model([left, right], left[:, :1] - tf.zeros_like(right) / 2.0)
    rows = [np.ones((4, 3), "f4"), np.ones((4, 2), "f4")]
    np.testing.assert_array_equal(to_keras_3(network)(rows), np.ones((4, 2)))


def test_a_conversion_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = keras.Input((2,))
    network = keras.Model(inputs, tf.math.square(inputs))
    to_keras_3(network)
    monkeypatch.setitem(keras_3._FUNCTIONS, "square", lambda x: 2.0 * x)
    with pytest.raises(InputError, match="different predictions"):
        to_keras_3(network)


class Own(layers.Layer):
    """A layer that Keras 3 does not have."""


class OwnCell(layers.SimpleRNNCell):
    """A cell that Keras 3 does not have."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: Own(name="mine")(x), "mine is a Own of"),
        (
            lambda x: layers.RNN(OwnCell(1, name="cell"))(tf.expand_dims(x, -1)),
            "cell is a OwnCell of",
        ),
        (
            lambda x: layers.Lambda(tf.sin, name="wave")(x),
            "of wave, a Lambda, it says: TypeError: ",
        ),
        (tf.math.bessel_i0, "tf.math.bessel_i0 is not known"),
    ],
)
def test_what_keras_3_does_not_have_is_refused_by_name(make: Any, message: str) -> None:
    inputs = keras.Input((2,))
    with pytest.raises(InputError, match=rf"{message}.*TFSMLayer"):
        to_keras_3(keras.Model(inputs, make(inputs)))


def test_only_functional_models_and_their_files_are_taken() -> None:
    with pytest.raises(InputError, match="no functional model"):
        to_keras_3(keras.Model())
    with pytest.raises(InputError, match=r"none\.keras to be a \.keras file"):
        to_keras_3("none.keras")
