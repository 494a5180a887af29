"""A model has all its weights before anything is traced."""

from __future__ import annotations

from trainer.core.tf_compat import keras
from trainer.model.trainable_model import TrainableModel


def _model() -> TrainableModel:
    values = keras.Input((3,), name="values")
    hidden = keras.layers.Dense(2, activation=keras.layers.PReLU())(values)
    network = keras.Model(values, keras.layers.Dense(1)(hidden))
    return TrainableModel(network=network, description={})


def test_weights_that_keras_creates_in_the_first_call_are_trained() -> None:
    assert [tuple(v.shape) for v in _model().variables] == [
        (3, 2), (2,), (2,), (2, 1), (1,)
    ]  # fmt: skip
