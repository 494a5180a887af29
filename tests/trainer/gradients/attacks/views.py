"""Augmentations with state, or that see more than one view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainer.gradients.attacks.catalogue import Case, Cases
from tests.trainer.gradients.attacks.keras_parts import NUM_VALUES, Holder, layers
from trainer.core.tf_compat import keras, tf

CASES = Cases("view")

Augment = Callable[[Any, Any], dict[str, Any]]


def _rare(ids: Any) -> Any:
    return tf.reduce_any(ids >= 8)


def _with(make: Callable[[], Any] = lambda: None, **more: Any) -> Any:
    """Adds a view with hidden state: (state, values (6,), ids, seed) -> values.

    Args:
      make: Makes the state.
      **more: Fields of the case.
    """

    def add(function: Callable[..., Any]) -> Any:
        def view() -> Augment:
            hidden = Holder(make())

            def augment(columns: Any, seed: Any) -> Any:
                row = columns["values"], columns["ids"]
                return {"values": function(hidden.held[0], *row, seed)}

            return augment

        view.__name__ = function.__name__
        CASES.view(view, **more)
        return function

    return add


def _add(name: str, function: Callable[[Any, Any], Any], **more: Any) -> None:
    def view(state: None, values: Any, ids: Any, seed: Any) -> Any:
        return function(values, seed)

    view.__name__ = name
    _with(**more)(view)


_SHAPE = (NUM_VALUES,)
for _name, _function in {
    "random numbers of its own": lambda v, seed: v + tf.random.normal(_SHAPE),
    "global generator of keras": lambda v, seed: v + keras.random.normal(_SHAPE),
}.items():
    _add(_name, _function)
for _name, _function in {
    "noise of the seed": lambda v, seed: v + tf.random.stateless_normal(_SHAPE, seed),
    "noise of a constant seed": lambda v, seed: (
        v + tf.random.stateless_normal(_SHAPE, (1, 2))
    ),
    "constant seed of keras": lambda v, seed: v + keras.random.normal(_SHAPE, seed=3),
}.items():
    _add(_name, _function, honest=True)


def _last_row_in(last: Any, values: Any, ids: Any, seed: Any) -> Any:
    old = tf.identity(last)
    last.assign(values)
    return values + old


for _name, _kind in {
    "last row in a variable": tf.Variable, "variable of keras": keras.Variable
}.items():  # fmt: skip

    def _last(*row: Any) -> Any:
        return _last_row_in(*row)

    _last.__name__ = _name
    _with(lambda kind=_kind: kind(tf.zeros(NUM_VALUES), trainable=False))(_last)


@_with(lambda: tf.Variable(0.0, trainable=False))
def rare_rows_in_a_variable(state: Any, values: Any, ids: Any, seed: Any) -> Any:
    gate = tf.identity(state)
    tf.cond(_rare(ids), lambda: tf.identity(state.assign(1.0)), lambda: tf.zeros(()))
    return values * (1.0 - 2.0 * gate)


def _counted(seen: list[None], values: Any, **more: Any) -> Any:
    def count(values: Any) -> Any:
        seen.append(None)
        return values + np.float32(len(seen))

    return tf.ensure_shape(
        tf.numpy_function(count, [values], tf.float32, **more), _SHAPE
    )


@_with(list)
def python_that_claims_no_state(seen: Any, values: Any, ids: Any, seed: Any) -> Any:
    return _counted(seen, values, stateful=False)


@CASES.view(leaks=True)
def printed() -> Augment:
    def augment(columns: Any, seed: Any) -> Any:
        if tf.reduce_any(columns["ids"] > 20):
            tf.print(columns["values"])
        return {"values": columns["values"]}

    return augment


@_with(honest=True)
def branch_of_its_own_row(state: None, values: Any, ids: Any, seed: Any) -> Any:
    return tf.cond(_rare(ids), lambda: -values, lambda: values)


class Counting(layers.Layer):
    """Counts its calls in a variable that is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self._held = Holder(tf.Variable(0.0, trainable=False))

    def call(self, values: Any) -> Any:
        return values + self._held.held[0].assign_add(1.0)


def _one_input() -> Any:
    """A model of values alone: layers augment a model of one input."""
    values = keras.Input((NUM_VALUES,), name="values")
    return keras.Model(values, layers.Dense(1)(layers.Dense(3, "tanh")(values)))


def _layers_case(name: str, make: Callable[[], Any], **more: Any) -> None:
    CASES.put(name, Case(whole=_one_input, augment=make, **more))


for _name, _make in {
    "counting layer": Counting,
    "normalisation of the batch": layers.BatchNormalization,
    "statistics in a sequence": lambda: keras.Sequential(
        [layers.GaussianNoise(0.1), Counting()]
    ),
    "normalisation to adapt": layers.Normalization,
}.items():
    _layers_case(_name, _make)
for _name, _make in {
    "noise layer": lambda: layers.GaussianNoise(0.1),
    "pipeline": lambda: layers.Pipeline(
        [layers.GaussianNoise(0.1), layers.Rescaling(2.0)]
    ),
    "dropout of a view": lambda: layers.Dropout(0.5),
}.items():
    _layers_case(_name, _make, honest=True)

_IMAGES = {
    "flip": lambda: layers.RandomFlip("horizontal"),
    "crop": lambda: layers.RandomCrop(2, 3),
    "mix": lambda: layers.MixUp(),
    "erasing": lambda: layers.RandomErasing(1.0),
    "pipeline of images": lambda: layers.Pipeline(
        [layers.RandomFlip("horizontal"), layers.RandomTranslation(0.2, 0.2)]
    ),
}


def _image_case(name: str, make: Callable[[], Any]) -> None:
    class Images(layers.Layer):
        """Augments a row as an image."""

        def __init__(self) -> None:
            super().__init__()
            self.of_images = make()

        def call(self, values: Any, training: bool = True) -> Any:
            image = tf.reshape(values, (1, 2, 3, 1))
            found = self.of_images(image, training=training)
            return tf.reshape(found, (1, NUM_VALUES))

    _layers_case(f"image {name}", Images, honest=True)


for _name, _make in _IMAGES.items():
    _image_case(_name, _make)
