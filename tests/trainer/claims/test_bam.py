"""Bias-aware minimisation against a loop that moves the weights for every example."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from accounting.core.validation import InputError
from tests.trainer.bounded import bam_sum
from tests.trainer.zoo import (
    EVERY_LAYER,
    NUM_ROWS,
    arrays,
    assert_close,
    batch,
    both_inputs,
    clipped_total,
    dense_per_position,
    layer_normalization,
    linear,
    make_model,
    many_ids_in_one_table,
    norm_of,
    numbers,
)
from trainer.claims.bam import choose_bam_path
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import (
    ONE_PASS,
    SINGLE_EXAMPLES,
    GradientSum,
    clipped_sum,
)
from trainer.model.trainable_model import TrainableModel
from trainer.settings.methods import BAM_HVP, BAM_SAM

CLIP = 0.3
RADIUS = 0.3


def _sum(
    model: TrainableModel, clip: float = CLIP, radius: float = RADIUS, **more: Any
) -> GradientSum:
    """As a step runs it: in a graph, which is traced once for each shape."""
    moved_sum = bam_sum(model, l2_norm_clip=clip, radius=radius, **more)
    return tf.function(moved_sum, autograph=False)


@functools.cache
def _shared(make: Callable[[], Any], variant: str) -> GradientSum:
    """The sum far from the weights, traced once: all batches have 12 rows."""
    return _sum(make_model(make), radius=2.0, variant=variant)


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


@pytest.mark.parametrize("make", [*EVERY_LAYER, many_ids_in_one_table])
def test_the_sum_equals_a_loop_that_moves_the_weights(
    make: Callable[[], Any], rows: Any
) -> None:
    model, data = make_model(make), rows(NUM_ROWS)
    assert choose_bam_path(model) == ONE_PASS
    assert choose_bam_path(model, BAM_HVP) == SINGLE_EXAMPLES
    columns, weight = batch(data, padding=4, fill=math.nan)
    gradient = _gradient_of(model)
    for clip, radius, path in (
        (CLIP, RADIUS, ONE_PASS),
        (CLIP, RADIUS, SINGLE_EXAMPLES),
    ):
        wanted = loop_sum(model, data, clip, radius, gradient)
        plain = arrays(clipped_sum(model, l2_norm_clip=clip)(columns, weight))
        assert (
            max(np.abs(a - b).max() for a, b in zip(plain, wanted, strict=True)) > 1e-3
        )
        found = _sum(model, clip, radius, path=path)(columns, weight)
        assert_close(arrays(found), wanted)


@pytest.mark.parametrize("make", [dense_per_position, layer_normalization])
def test_the_hessian_variant_equals_finite_differences(
    make: Callable[[], Any], rows: Any
) -> None:
    # (g(+h) - g(-h)) / 2h is the Hessian times the direction, with an error of O(h^2)
    # and of 1e-7 / h from float32; with h = 0.01 both are near 1e-5 at these weights.
    model, data, h = make_model(make), rows(3), 0.01
    gradient = _gradient_of(model)
    wanted, here = ([0.0] * len(model.variables) for _ in range(2))
    for row in (data[i : i + 1] for i in range(3)):
        u = gradient(row)
        with _moved(model, u, h):
            ahead = gradient(row)
        with _moved(model, u, -h):
            behind = gradient(row)
        for k in range(len(u)):
            here[k] += u[k]
            wanted[k] += u[k] + RADIUS * (ahead[k] - behind[k]) / (2 * h)
    gradient_sum = _sum(model, math.inf, variant=BAM_HVP)
    found = arrays(gradient_sum(*batch(data, padding=1)))
    assert max(np.abs(w - u).max() for w, u in zip(wanted, here, strict=True)) > 1e-2
    assert_close(found, wanted, 2e-4)


#: Models and variants whose sums are traced once.
_TRACED = pytest.mark.parametrize(
    ("make", "variant"),
    [
        (both_inputs, BAM_SAM),
        (layer_normalization, BAM_SAM),
        (layer_normalization, BAM_HVP),
    ],
)


@_TRACED
def test_a_row_contributes_the_same_whatever_the_other_rows_are(
    make: Callable[[], Any], variant: str, rows: Any
) -> None:
    data, gradient_sum = rows(NUM_ROWS), _shared(make, variant)
    alone = arrays(gradient_sum(*batch(data[:1], padding=NUM_ROWS + 3)))
    for others in (data[1:], rows(NUM_ROWS - 1, seed=7)):
        joined = np.concatenate([data[:1], others])
        together = arrays(gradient_sum(*batch(joined, padding=4)))
        rest = arrays(gradient_sum(*batch(others, padding=5)))
        assert_close([a - b for a, b in zip(together, rest, strict=True)], alone, 1e-6)


@_TRACED
def test_each_row_contributes_at_most_the_clip(
    make: Callable[[], Any], variant: str, rows: Any
) -> None:
    data, gradient_sum = rows(NUM_ROWS), _shared(make, variant)
    norms = [
        norm_of(arrays(gradient_sum(*batch(data[i : i + 1], padding=NUM_ROWS + 3))))
        for i in range(NUM_ROWS)
    ]
    assert max(norms) <= CLIP * (1 + 1e-5)
    assert max(norms) >= CLIP * (1 - 1e-5), "the test needs a row that is clipped"


@pytest.mark.parametrize("make", [linear, layer_normalization])
@pytest.mark.parametrize("variant", [BAM_SAM, BAM_HVP])
def test_a_row_without_a_finite_gradient_contributes_nothing(
    make: Callable[[], Any], variant: str, rows: Any
) -> None:
    model, data = make_model(make), rows(NUM_ROWS)
    spoiled, gradient_sum = np.concatenate([data, data[:1]]), _shared(make, variant)
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


class Hidden(keras.layers.Layer):
    """Reads the tf.Variable of its weight, which cannot be replaced."""

    def build(self, input_shape: Any) -> None:
        kernel = self.add_weight((input_shape[-1], 1), name="kernel").value
        # Nor does the path "operations" take it: the kernel is changed before its use.
        self.product = lambda values: tf.matmul(values, tf.sinh(kernel))

    def call(self, values: Any) -> Any:
        return self.product(values)


def _own(layer: type) -> Callable[[], Any]:
    def make() -> Any:
        integers, values = numbers()
        return keras.Model(integers, layer()(values))

    return make


class Raw(keras.layers.Layer):
    """Reads the handle of its weight, which no tape sees."""

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight((input_shape[-1], 1), name="kernel")

    def call(self, values: Any) -> Any:
        handle = self.kernel._value.handle
        return tf.matmul(
            values, tf.raw_ops.ReadVariableOp(resource=handle, dtype="float32")
        )


@pytest.mark.parametrize("layer", [Hidden, Raw])
def test_weights_that_cannot_be_replaced_are_refused_with_what_to_do(
    layer: type, rows: Any
) -> None:
    model, data = make_model(_own(layer)), batch(rows(NUM_ROWS))
    with pytest.raises(InputError, match="bam_variant='hvp'"):
        bam_sum(model, l2_norm_clip=CLIP, radius=RADIUS, path=SINGLE_EXAMPLES)
    found = bam_sum(model, l2_norm_clip=CLIP, radius=RADIUS, variant=BAM_HVP)(*data)
    assert any(array.any() for array in arrays(found))
