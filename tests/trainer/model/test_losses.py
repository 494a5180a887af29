"""Losses per example by hand, their labels, and models trained by them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Column
from tests.trainer.zoo import assert_close, clipped_total, tape_gradients
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import (
    ONE_PASS,
    SINGLE_EXAMPLES,
    choose_path,
    clipped_sum,
    plain_sum,
)
from trainer.model.losses import loss_by_name, loss_of_keras, loss_of_ones_own
from trainer.model.trainable_model import TrainableModel
from trainer.models import check_model

CLIP = 0.4


def _softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def _huber(y: np.ndarray, z: np.ndarray) -> np.ndarray:
    error = np.abs(y - z)
    return np.where(error <= 1, error**2 / 2, error - 0.5)


BY_HAND = {"mean_squared_error": lambda y, z: (y - z) ** 2, "huber": _huber}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("size", [None, 1, 3])
def test_losses_of_numbers_by_hand(name: str, size: int | None) -> None:
    random = np.random.default_rng(0)
    shape = (5,) if size is None else (5, size)
    labels, outputs = random.uniform(0.5, 4, (2, *shape)).astype("f4")
    wanted = BY_HAND[name](labels, outputs).reshape(5, -1).mean(1)
    per_example = loss_by_name(name).per_example
    np.testing.assert_allclose(per_example(labels, outputs), wanted, rtol=1e-4)
    if size == 1:  # a column of numbers beside outputs of shape (batch, 1)
        found = per_example(labels[:, 0], outputs)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_cross_entropies_by_hand() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (6, 4)).astype("f4")
    classes = np.array([0, 1, 2, 3, 3, 0], "u1")
    wanted = -np.log(_softmax(logits)[np.arange(6), classes])
    found = loss_by_name("sparse_categorical_crossentropy").per_example(classes, logits)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    found = loss_by_name("categorical_crossentropy").per_example(
        np.eye(4)[classes], logits
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    positions = loss_by_name("sparse_categorical_crossentropy").per_example(
        classes.reshape(3, 2), logits.reshape(3, 2, 4)
    )
    np.testing.assert_allclose(positions, wanted.reshape(3, 2).mean(1), rtol=1e-5)
    signed = np.where(classes > 1, -1, 1) * logits[:, 0]
    found = loss_by_name("binary_crossentropy").per_example(classes > 1, logits[:, :1])
    np.testing.assert_allclose(found, np.log1p(np.exp(signed)), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "labels", "wanted"),
    [
        ("binary_crossentropy", np.array([0, 1, 2, -1], "i1"), [1, 1, 0, 0]),
        ("binary_crossentropy", np.array([0, 1, 0.5, np.nan], "f4"), [1, 1, 0, 0]),
        ("binary_crossentropy", np.array([0, 1, np.inf], "f8"), [1, 1, 0]),
        (
            "sparse_categorical_crossentropy",
            np.array([0, 2, 3, -1, 127], "i1"),
            [1, 1, 0, 0, 0],
        ),
        (
            "sparse_categorical_crossentropy",
            np.array([2, 1.5, np.nan, np.inf, 2.0**40], "f8"),
            [1, 0, 0, 0, 0],
        ),
        ("sparse_categorical_crossentropy", np.array([[0, 1], [0, 3]]), [1, 0]),
        (
            "categorical_crossentropy",
            np.array([[0, 0, 1], [0.5, 0.25, 0.25], [0, 0, 0], [2, -1, 0], [1, 1, 0]]),
            [1, 1, 0, 0, 0],
        ),
        (
            "mean_squared_error",
            np.array([[0, 1e30], [0, np.nan], [np.inf, 0]]),
            [1, 0, 0],
        ),
        ("huber", np.array([3, -4], "i8"), [1, 1]),
    ],
)
def test_the_labels_that_a_loss_takes(
    name: str, labels: np.ndarray, wanted: Any
) -> None:
    np.testing.assert_array_equal(loss_by_name(name).accepts(labels, 3), wanted)


# -- clipped sums ----------------------------------------------------------------------


def _absolute(labels: Any, outputs: Any) -> Any:
    return tf.abs(tf.cast(labels["label"], tf.float32) - outputs["label"][:, 0]) + (
        tf.reduce_sum(
            outputs["other"] - tf.cast(labels["other"], tf.float32)[:, None], 1
        )
        ** 2
    )


def _network(size: int, activation: str | None = None) -> Any:
    numbers = keras.Input((4,), name="numbers")
    hidden = keras.layers.Dense(5, activation="tanh")(numbers)
    return keras.Model(numbers, keras.layers.Dense(size, activation=activation)(hidden))


def _two_outputs() -> Any:
    numbers = keras.Input((4,), name="numbers")
    hidden = keras.layers.Dense(5, activation="tanh")(numbers)
    outputs = {
        name: keras.layers.Dense(size, name=name)(hidden)
        for name, size in (("label", 1), ("other", 3))
    }
    return keras.Model(numbers, outputs)


MODELS = {
    "binary": (lambda: _network(1), "binary_crossentropy"),
    "classes": (lambda: _network(3), "sparse_categorical_crossentropy"),
    "squares": (lambda: _network(1), "mean_squared_error"),
    "poisson": (lambda: _network(1, "softplus"), "poisson"),
    "own": (_two_outputs, _absolute),
}


def _model(kind: str, seed: int = 0) -> TrainableModel:
    keras.utils.set_random_seed(seed)
    make, loss = MODELS[kind]
    made = (
        loss_by_name(loss) if isinstance(loss, str) else loss_of_ones_own("m:f", loss)
    )
    return TrainableModel(
        network=make(),
        description={},
        loss=made,
        columns=(
            Column(name="numbers", dtype="float32", shape=(4,)),
            Column(name="label", dtype="float32"),
            Column(name="other", dtype="int32"),
        ),
    )


def _columns(labels: Any) -> dict[str, Any]:
    random = np.random.default_rng(len(labels))
    return {
        "numbers": tf.constant(random.normal(0, 1, (len(labels), 4)), tf.float32),
        "label": tf.constant(labels, tf.float32),
        "other": tf.range(len(labels)),
    }


BAD_LABELS = {
    "binary": [2.0, -1.0, 0.5, np.nan, np.inf],
    "classes": [3.0, -1.0, 0.5, np.nan, np.inf],
    "squares": [np.nan, np.inf, -np.inf, np.nan, np.nan],
    "poisson": [np.nan, np.inf, -np.inf, np.nan, np.nan],
    "own": [np.nan, np.inf, -np.inf, np.nan, np.nan],
}


def _sum_of_rows(model: TrainableModel, path: str) -> Callable[..., list[np.ndarray]]:
    """The sum of a batch of 8, traced once; (columns, rows that count) -> arrays."""
    add = (
        plain_sum(model)
        if path == "plain"
        else clipped_sum(model, l2_norm_clip=CLIP, path=path)
    )
    traced = tf.function(add, autograph=False)

    def found(columns: dict[str, Any], kept: Any = (True,) * 8) -> list[np.ndarray]:
        sums = traced(columns, tf.cast(kept, tf.float32))
        return [tf.convert_to_tensor(value).numpy() for value in sums]

    return found


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *((kind, ONE_PASS) for kind in MODELS),
        ("own", SINGLE_EXAMPLES),
        ("classes", "plain"),
    ],
)
def test_a_sum_is_of_the_rows_that_may_contribute(kind: str, path: str) -> None:
    model = _model(kind)
    assert choose_path(model) == ONE_PASS
    sum_of = _sum_of_rows(model, path)
    # A row whose label the loss does not take contributes exactly nothing.
    kept = np.isin(np.arange(8), [0, 1, 7])
    without = sum_of(_columns(kept * [1, 0, 0, 0, 0, 0, 0, 1]), kept)
    assert any(map(np.any, without))
    found = sum_of(_columns([1, 0, *BAD_LABELS[kind], 1]))
    assert all(map(np.array_equal, found, without))
    if path == "plain":
        return
    columns = _columns([0, 1, 1, 0, 1, 0, 0, 1])
    rows = ({k: v[row : row + 1] for k, v in columns.items()} for row in range(8))
    wanted = clipped_total([tape_gradients(model, row) for row in rows], CLIP)
    assert_close(sum_of(columns), wanted)
    # Nor does one whose gradient is not finite.
    numbers = columns["numbers"].numpy()
    numbers[1], numbers[2, 0] = np.nan, np.inf
    # tanh(inf) is finite; its slope times inf is not a number.
    columns["numbers"] = tf.constant(numbers)
    finite = ~np.isin(np.arange(8), [1, 2])
    assert all(map(np.array_equal, sum_of(columns), sum_of(columns, finite)))


# -- models and losses that are refused ------------------------------------------------


@pytest.fixture
def manifest(small_batches: Any) -> Any:
    return small_batches.manifest


def _with_loss(network: Any, loss: Any) -> TrainableModel:
    return TrainableModel(network=network, description={}, loss=loss)


def _checked(manifest: Any, size: int, loss: Any) -> None:
    integers = keras.Input((13,), name="integers")
    values = keras.ops.nan_to_num(integers)
    network = keras.Model(integers, keras.layers.Dense(size)(values))
    check_model(TrainableModel(network=network, description={}, loss=loss), manifest)


@pytest.mark.parametrize(
    ("size", "name", "message"),
    [
        (2, "binary_crossentropy", "one logit per example"),
        (1, "sparse_categorical_crossentropy", "one logit per class"),
        (3, "categorical_crossentropy", "one logit per class"),
        (2, "mean_squared_error", "one output per label"),
    ],
)
def test_outputs_that_do_not_suit_the_loss_are_refused(
    size: int, name: str, message: str, manifest: Any
) -> None:
    with pytest.raises(InputError, match=message):
        _checked(manifest, size, loss_by_name(name))
    _checked(manifest, 3, loss_by_name("sparse_categorical_crossentropy"))
    _checked(manifest, 1, loss_by_name("mean_squared_error"))


_DENSE = keras.layers.Dense
ENDINGS = {
    "sigmoid": lambda x, n: _DENSE(n, activation="sigmoid")(x),
    "softmax": lambda x, n: keras.layers.Softmax()(_DENSE(n + 1)(x))[:, 1:],
}
LOGIT_ENDINGS = {
    "zeros": lambda x, n: _DENSE(n, kernel_initializer="zeros")(x),
    "tanh": lambda x, n: _DENSE(n, activation="tanh")(x),
}


def _ending(ending: Any, size: int) -> Any:
    keras.utils.set_random_seed(0)
    integers = keras.Input((13,), name="integers")
    hidden = _DENSE(8, activation="relu")(keras.ops.relu(integers))
    return keras.Model(integers, ending(hidden, size))


ON_LOGITS = {
    1: [
        loss_by_name("binary_crossentropy"),
        loss_of_keras(keras.losses.BinaryFocalCrossentropy(from_logits=True)),
        loss_of_keras(
            functools.partial(keras.losses.binary_crossentropy, from_logits=True)
        ),
    ],
    3: [loss_of_keras(keras.losses.SparseCategoricalCrossentropy(from_logits=True))],
}
ON_PROBABILITIES = {
    1: loss_of_keras("binary_crossentropy"),
    3: loss_of_keras(keras.losses.SparseCategoricalCrossentropy()),
}


@pytest.mark.parametrize("size", [1, 3])
def test_probabilities_under_a_loss_on_logits_are_refused_and_the_reverse(
    size: int, manifest: Any
) -> None:
    for ending in ENDINGS.values():
        network = _ending(ending, size)
        check_model(_with_loss(network, ON_PROBABILITIES[size]), manifest)
        for loss in ON_LOGITS[size]:
            with pytest.raises(InputError, match=r"between 0 and 1.*from_logits=False"):
                check_model(_with_loss(network, loss), manifest)
    for ending in LOGIT_ENDINGS.values():
        network = _ending(ending, size)
        before = network.get_weights()
        check_model(_with_loss(network, ON_LOGITS[size][0]), manifest)
        with pytest.raises(InputError, match="from_logits=True"):
            check_model(_with_loss(network, ON_PROBABILITIES[size]), manifest)
        for left, right in zip(before, network.get_weights(), strict=True):
            np.testing.assert_array_equal(left, right)
