"""Bias-aware minimisation against a loop that moves the weights for every example."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.bounded import bam_sum
from tests.trainer.zoo import (
    NUM_ROWS,
    OTHER,
    arrays,
    assert_close,
    batch,
    clipped_total,
    dense_per_position,
    layer_normalization,
    linear,
    make_model,
    many_ids_in_one_table,
    masked_ids,
    norm_of,
    numbers,
)
from trainer.claims.bam import choose_bam_path
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES, GradientSum
from trainer.model.trainable_model import TrainableModel

CLIP = 0.3
RADIUS = 0.3


def _sum(model: TrainableModel, radius: float = RADIUS, **more: Any) -> GradientSum:
    """As a step runs it: in a graph, which is traced once for each shape."""
    moved_sum = bam_sum(model, l2_norm_clip=CLIP, radius=radius, **more)
    return tf.function(moved_sum, autograph=False)


def _gradient_of(model: TrainableModel) -> Callable[[np.ndarray], list[np.ndarray]]:
    """The gradient of a row, traced once: all rows have one shape."""

    @tf.function(autograph=False)
    def traced(columns: dict[str, Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.losses(columns)[0]
        return tape.gradient(
            loss, model.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )

    return lambda row: [one.astype("f8") for one in arrays(traced(batch(row)[0]))]


@contextlib.contextmanager
def _moved(
    model: TrainableModel, direction: list[np.ndarray], length: float
) -> Iterator[None]:
    """The model's own variables, moved."""
    before = [variable.numpy() for variable in model.variables]
    scale = length / norm_of(direction) if norm_of(direction) else 0.0
    for variable, value in zip(model.variables, direction, strict=True):
        variable.assign_add(scale * value)
    yield
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)


def loop_sum(
    model: TrainableModel,
    rows: np.ndarray,
    clip: float = CLIP,
    radius: float = RADIUS,
    gradient: Callable[[np.ndarray], list[np.ndarray]] | None = None,
) -> list[np.ndarray]:
    gradient, found = gradient or _gradient_of(model), list[Any]()
    for row in rows[:, np.newaxis]:
        with _moved(model, gradient(row), radius):
            found.append(gradient(row))
    return clipped_total(found, clip)


@pytest.mark.parametrize(
    "make", [dense_per_position, masked_ids, many_ids_in_one_table, *OTHER]
)
def test_the_sum_equals_a_loop_that_moves_the_weights(
    make: Callable[[], Any], rows: Any
) -> None:
    model, data = make_model(make), rows(NUM_ROWS)
    assert choose_bam_path(model) == ONE_PASS
    columns, weight = batch(data, padding=4, fill=math.nan)
    gradient = _gradient_of(model)
    wanted = loop_sum(model, data, gradient=gradient)
    plain = clipped_total([gradient(row) for row in data[:, np.newaxis]], CLIP)
    assert max(np.abs(a - b).max() for a, b in zip(plain, wanted, strict=True)) > 1e-3
    for path in (ONE_PASS, SINGLE_EXAMPLES) if make in OTHER else (ONE_PASS,):
        assert_close(arrays(_sum(model, path=path)(columns, weight)), wanted)


@pytest.mark.parametrize("make", [linear, layer_normalization])
def test_a_row_without_a_finite_gradient_contributes_nothing(
    make: Callable[[], Any], rows: Any
) -> None:
    model, data = make_model(make), rows(NUM_ROWS)
    spoiled, gradient_sum = np.concatenate([data, data[:1]]), _sum(model, radius=2.0)
    wanted = arrays(gradient_sum(*batch(data, padding=4)))
    for bad in (math.inf, 1e38, 1e25):
        spoiled["integers"][-1] = bad
        # The wrong label for a large logit: the gradient does not vanish.
        logit = model.outputs({k: v[-1:] for k, v in batch(spoiled)[0].items()})[0]
        spoiled["label"][-1] = not logit > 0
        found = arrays(gradient_sum(*batch(spoiled, padding=3)))
        assert all(np.isfinite(array).all() for array in found)
        if make is linear:  # layer normalisation makes the gradient of any row finite
            for left, right in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(left, right)


class Raw(keras.layers.Layer):
    """Reads the handle of its weight, which no tape sees."""

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight((input_shape[-1], 1), name="kernel")

    def call(self, values: Any) -> Any:
        handle = self.kernel._value.handle
        return tf.matmul(
            values, tf.raw_ops.ReadVariableOp(resource=handle, dtype="float32")
        )


def test_weights_that_cannot_be_replaced_are_refused() -> None:
    def make() -> Any:
        integers, values = numbers()
        return keras.Model(integers, Raw()(values))

    with pytest.raises(InputError, match="cannot be moved for one example"):
        _sum(make_model(make), path=SINGLE_EXAMPLES)
