"""Weights of examples: within the clip norm, and functions of the example's row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from pipelines.core.batches.batch_format import Column
from trainer.core.tf_compat import keras, tf
from trainer.fitting import ExampleWeights, weighted
from trainer.gradients.paths import (
    ONE_PASS,
    SINGLE_EXAMPLES,
    choose_path,
    clipped_sum,
)
from trainer.model.losses import loss_by_name
from trainer.model.trainable_model import TrainableModel

ROWS = 7
#: One row per class and kind of weight: ordinary, zero, negative, not a number.
WEIGHT = np.array([1, 20, 0.1, 0, -1, np.nan, np.inf], "f4")


def _model(loss: str, label: Column, units: int) -> TrainableModel:
    keras.utils.set_random_seed(0)
    x = keras.Input((3,), name="x")
    return TrainableModel(
        network=keras.Model(x, keras.layers.Dense(units)(x)),
        description={},
        loss=loss_by_name(loss),
        columns=(
            label,
            Column(name="x", dtype="float32", shape=(3,)),
            Column(name="importance", dtype="float32"),
        ),
    )


BINARY = _model("binary_crossentropy", Column(name="label", dtype="int8"), 1)
ONE_HOT = _model(
    "categorical_crossentropy", Column(name="label", dtype="int8", shape=(3,)), 3
)


def _columns(model: TrainableModel) -> dict[str, Any]:
    random = np.random.default_rng(0)
    classes = np.arange(ROWS) % 2
    labels = classes.astype("i1") if model is BINARY else np.eye(3, dtype="i1")[classes]
    x = random.normal(0, 1, (ROWS, 3)).astype("f4")
    columns = {"label": labels, "x": x, "importance": WEIGHT}
    return {name: tf.constant(values) for name, values in columns.items()}


def _by_loop(model: TrainableModel, factors: np.ndarray, clip: float) -> list[Any]:
    total = [np.zeros(v.shape) for v in model.variables]
    columns = _columns(model)
    for row, factor in enumerate(factors):
        if not (np.isfinite(factor) and factor >= 0):
            continue
        one = {name: value[row : row + 1] for name, value in columns.items()}
        with tf.GradientTape() as tape:
            loss = factor * model.losses(one)[0]
        found = [np.asarray(g) for g in tape.gradient(loss, model.variables)]
        norm = np.sqrt(sum(np.square(g).sum() for g in found))
        scale = min(1.0, clip / norm) if norm else 0.0
        total = [t + scale * g for t, g in zip(total, found, strict=True)]
    return total


@pytest.mark.parametrize("path", [ONE_PASS, SINGLE_EXAMPLES])
@pytest.mark.parametrize("model", [BINARY, ONE_HOT], ids=["binary", "one hot"])
def test_the_weighted_gradient_of_each_example_is_clipped(
    model: TrainableModel, path: str
) -> None:
    weights = ExampleWeights(class_weight={1: 5.0}, sample_weight="importance")
    found = weighted(model, weights)
    assert choose_path(found) == ONE_PASS
    sums = clipped_sum(found, l2_norm_clip=1.0, path=path)
    classes = np.arange(ROWS) % 2
    wanted = _by_loop(model, WEIGHT * np.where(classes == 1, 5.0, 1.0), 1.0)
    for a, b in zip(sums(_columns(model), tf.ones(ROWS)), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_an_example_whose_weight_is_negative_or_not_finite_contributes_nothing() -> (
    None
):
    found = weighted(BINARY, ExampleWeights(sample_weight="importance"))
    kept = found.accepts(_columns(BINARY))
    np.testing.assert_array_equal(kept, [True] * 4 + [False] * 3)


def test_of_a_class_without_a_weight_it_is_one() -> None:
    found = weighted(ONE_HOT, ExampleWeights(class_weight={1: 5.0}))
    np.testing.assert_array_equal(
        found.example_weights(_columns(ONE_HOT)), [1, 5, 1, 5, 1, 5, 1]
    )


def test_no_weights_leave_the_model_as_it_is() -> None:
    assert weighted(BINARY, ExampleWeights()) is BINARY


def test_class_weights_of_labels_that_are_no_classes_are_refused() -> None:
    label = Column(name="label", dtype="int8", shape=(2,))
    lists = _model("mean_squared_error", label, 2)
    with pytest.raises(InputError, match=r"one class per example.*sample_weight"):
        weighted(lists, ExampleWeights(class_weight={1: 2.0}))
