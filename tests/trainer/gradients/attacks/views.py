"""Augmentations with state, or that see more than one view."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainer.gradients.attacks.catalogue import Case, Cases
from tests.trainer.gradients.attacks.keras_parts import NUM_VALUES, layers
from tests.trainer.gradients.attacks.writes import Holder
from trainer.tf_compat import keras, tf

CASES = Cases("view")

Augment = Callable[[Any, Any], dict[str, Any]]


def _rare(columns: Any) -> Any:
    return tf.cast(tf.reduce_any(columns["ids"] >= 8), tf.float32)


def _last_row_in(variable: Any) -> Augment:
    held = Holder(variable)

    def augment(columns: Any, seed: Any) -> Any:
        old = tf.identity(held.held[0])
        held.held[0].assign(columns["values"])
        return {"values": columns["values"] + old}

    return augment


@CASES.view
def last_row_in_a_variable() -> Augment:
    return _last_row_in(tf.Variable(tf.zeros(NUM_VALUES), trainable=False))


@CASES.view
def rare_rows_in_a_variable() -> Augment:
    held = Holder(tf.Variable(0.0, trainable=False))

    def augment(columns: Any, seed: Any) -> Any:
        gate = tf.identity(held.held[0])
        tf.cond(
            _rare(columns) > 0,
            lambda: tf.identity(held.held[0].assign(1.0)),
            lambda: tf.zeros(()),
        )
        return {"values": columns["values"] * (1.0 - 2.0 * gate)}

    return augment


@CASES.view
def variable_read_alone() -> Augment:
    held = Holder(tf.Variable(0.5, trainable=False))
    return lambda columns, seed: {"values": columns["values"] * held.held[0]}


@CASES.view
def write_in_an_inner_function() -> Augment:
    held = Holder(tf.Variable(0.0, trainable=False))

    @tf.function
    def inner(values: Any) -> Any:
        held.held[0].assign_add(1.0)
        return values

    return lambda columns, seed: {"values": inner(columns["values"])}


@CASES.view
def mutable_table() -> Augment:
    table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)

    def augment(columns: Any, seed: Any) -> Any:
        found = table.lookup(columns["ids"][0])
        table.insert(columns["ids"][0], 1.0)
        return {"values": columns["values"] + found}

    return augment


@CASES.view
def random_numbers_of_its_own() -> Augment:
    return lambda columns, seed: {
        "values": columns["values"] + tf.random.normal((NUM_VALUES,))
    }


@CASES.view
def generator() -> Augment:
    held = Holder(tf.random.Generator.from_seed(1))
    return lambda columns, seed: {
        "values": columns["values"] + held.held[0].normal((NUM_VALUES,))
    }


@CASES.view
def numpy_counter() -> Augment:
    seen: list[None] = []

    def count(values: Any) -> Any:
        seen.append(None)
        return values + np.float32(len(seen))

    def augment(columns: Any, seed: Any) -> Any:
        found = tf.numpy_function(count, [columns["values"]], tf.float32)
        return {"values": tf.ensure_shape(found, (NUM_VALUES,))}

    return augment


@CASES.view
def python_that_claims_no_state() -> Augment:
    seen: list[None] = []

    def count(values: Any) -> Any:
        seen.append(None)
        return values + np.float32(len(seen))

    def augment(columns: Any, seed: Any) -> Any:
        found = tf.numpy_function(
            count, [columns["values"]], tf.float32, stateful=False
        )
        return {"values": tf.ensure_shape(found, (NUM_VALUES,))}

    return augment


@CASES.view
def eager_python() -> Augment:
    last = [tf.zeros(NUM_VALUES)]

    def mixed(values: Any) -> Any:
        found, last[0] = values + last[0], values
        return found

    def augment(columns: Any, seed: Any) -> Any:
        found = tf.py_function(mixed, [columns["values"]], tf.float32)
        return {"values": tf.ensure_shape(found, (NUM_VALUES,))}

    return augment


@CASES.view(leaks=True)
def printed() -> Augment:
    def augment(columns: Any, seed: Any) -> Any:
        if tf.reduce_any(columns["ids"] > 20):
            tf.print(columns["values"])
        return {"values": columns["values"]}

    return augment


@CASES.view(leaks=True)
def written_to_a_file() -> Augment:
    def augment(columns: Any, seed: Any) -> Any:
        if tf.reduce_any(columns["ids"] > 20):
            tf.io.write_file("/dev/null", tf.io.serialize_tensor(columns["values"]))
        return {"values": columns["values"]}

    return augment


@CASES.view
def counter_of_traces() -> Augment:
    calls: list[None] = []

    def augment(columns: Any, seed: Any) -> Any:
        calls.append(None)
        return {"values": columns["values"] * float(len(calls))}

    return augment


@CASES.view
def chance_of_python() -> Augment:
    drawn = random.Random(0)
    return lambda columns, seed: {"values": columns["values"] * drawn.random()}


class Counting(layers.Layer):
    """Counts its calls in a variable that is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self._held = Holder(tf.Variable(0.0, trainable=False))

    def call(self, values: Any) -> Any:
        return values + self._held.held[0].assign_add(1.0)


@CASES.view(leaks=True)
def columns_that_are_no_views() -> Augment:
    return lambda columns, seed: {"label": tf.constant(0, tf.int8)}


@CASES.view(honest=True)
def noise_of_the_seed() -> Augment:
    return lambda columns, seed: {
        "values": columns["values"] + tf.random.stateless_normal((NUM_VALUES,), seed)
    }


@CASES.view(honest=True)
def noise_of_a_constant_seed() -> Augment:
    return lambda columns, seed: {
        "values": columns["values"] + tf.random.stateless_normal((NUM_VALUES,), (1, 2))
    }


@CASES.view(honest=True)
def branch_of_its_own_row() -> Augment:
    return lambda columns, seed: {
        "values": tf.cond(
            _rare(columns) > 0, lambda: -columns["values"], lambda: columns["values"]
        )
    }


@CASES.view(honest=True)
def function_that_is_traced_by_itself() -> Augment:
    return tf.function(lambda columns, seed: {"values": 2.0 * columns["values"]})


def _one_input() -> Any:
    """A model of values alone: layers augment a model of one input."""
    values = keras.Input((NUM_VALUES,), name="values")
    return keras.Model(values, layers.Dense(1)(layers.Dense(3, "tanh")(values)))


def _layers_case(name: str, make: Callable[[], Any], **more: Any) -> None:
    CASES.put(name, Case(whole=_one_input, augment=make, **more))


_layers_case("counting layer", Counting)
_layers_case("normalisation of the batch", lambda: layers.BatchNormalization())
_layers_case("noise layer", lambda: layers.GaussianNoise(0.1), honest=True)
_layers_case(
    "statistics in a sequence",
    lambda: keras.Sequential([layers.GaussianNoise(0.1), Counting()]),
)
_layers_case(
    "pipeline",
    lambda: layers.Pipeline([layers.GaussianNoise(0.1), layers.Rescaling(2.0)]),
    honest=True,
)
_layers_case(
    "counting layer in a pipeline",
    lambda: layers.Pipeline([layers.GaussianNoise(0.1), Counting()]),
)
_layers_case("dropout of a view", lambda: layers.Dropout(0.5), honest=True)
_layers_case("normalisation to adapt", lambda: layers.Normalization())


@CASES.view
def global_generator_of_keras() -> Augment:
    return lambda columns, seed: {
        "values": columns["values"] + keras.random.normal((NUM_VALUES,))
    }


@CASES.view
def generator_of_keras() -> Augment:
    held = Holder(keras.random.SeedGenerator(1))
    return lambda columns, seed: {
        "values": columns["values"]
        + keras.random.normal((NUM_VALUES,), seed=held.held[0])
    }


@CASES.view
def seeds_counted_by_rare_ids() -> Augment:
    held = Holder(keras.random.SeedGenerator(1))

    def augment(columns: Any, seed: Any) -> Any:
        state = held.held[0].state
        state.assign(state + tf.cast(_rare(columns), state.dtype))
        noise = tf.random.stateless_normal((NUM_VALUES,), state.value)
        return {"values": columns["values"] + noise}

    return augment


@CASES.view(honest=True)
def constant_seed_of_keras() -> Augment:
    return lambda columns, seed: {
        "values": columns["values"] + keras.random.normal((NUM_VALUES,), seed=3)
    }


@CASES.view
def variable_of_keras() -> Augment:
    return _last_row_in(keras.Variable(tf.zeros(NUM_VALUES), trainable=False))


_IMAGES = {
    "flip": lambda: layers.RandomFlip("horizontal"),
    "rotation": lambda: layers.RandomRotation(0.2),
    "contrast": lambda: layers.RandomContrast(0.5),
    "crop": lambda: layers.RandomCrop(2, 3),
    "elastic": lambda: layers.RandomElasticTransform(1.0, 1.0),
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
