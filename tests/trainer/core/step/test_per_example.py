"""Rows that may not contribute become exact zeros; others are clipped, by hand.

Each test was seen to fail on a planted fault: a product instead of a choice, a norm of
some variables or axes alone, a missing root, a cap on one side, a chunk left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainer.core.step import clipping
from trainer.core.step.clipping import (
    ExampleGradients,
    cap_coordinates,
    clip_scale,
    clipped,
    concat_in_chunks,
    keep_rows,
    real_rows,
    scale_rows,
    squared_norms,
    sum_in_chunks,
)
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import SINGLE_EXAMPLES, clipped_sum
from trainer.model.trainable_model import TrainableModel


class _AcceptsBits:
    """Stands in for a model whose loss accepts labels 0 and 1."""

    def accepts(self, columns: Any) -> Any:
        return columns["label"] <= 1


def test_a_row_may_contribute_if_its_weight_is_above_0_and_its_label_accepted() -> None:
    columns = {"label": tf.constant([0, 1, 2, 0, 2])}
    weight = tf.constant([1.0, 0.5, 1.0, 0.0, 0.0])
    found = real_rows(_AcceptsBits(), columns, weight)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, [True, True, False, False, False])


def test_other_rows_are_exactly_zero_whatever_they_held() -> None:
    columns = {
        "scalar": tf.constant([1.0, math.nan, math.inf]),
        "vector": tf.constant([[1, 2], [3, 4], [5, 6]], tf.int32),
    }
    kept = tf.constant([True, False, False])
    found = keep_rows(columns, kept)
    np.testing.assert_array_equal(found["scalar"], [1, 0, 0])
    np.testing.assert_array_equal(found["vector"], [[1, 2], [0, 0], [0, 0]])
    scaled = scale_rows(columns["scalar"], tf.constant([0.5, 0.0, 0.0]))
    np.testing.assert_array_equal(scaled, [0.5, 0, 0])


def _waves(values: Any, scale: float = 1e6) -> Any:
    return keras.ops.sin(scale * values)


def _cross_entropy(row: Any) -> Any:
    zero = keras.ops.zeros_like(row[:, 0], dtype="int32")
    found = keras.ops.sparse_categorical_crossentropy(zero, row / 1e6, True)
    return keras.ops.expand_dims(found, 1)


def _raw_mean(row: Any) -> Any:
    return tf.raw_ops.Mean(input=row + row[:, ::-1], axis=1)


RAW_MEAN = keras.layers.Lambda(_raw_mean, output_shape=(11,))
LONG_RAW_SUM = keras.layers.Lambda(
    lambda row: tf.raw_ops.Sum(input=row, axis=1, keep_dims=True), output_shape=(1,)
)
LENGTHS = np.geomspace(1e5, 1e8, 77, dtype="f")
#: Functions of a row that amplify rounding -> shape of a row.
AMPLIFY: dict[Callable[[Any], Any], tuple[int, ...]] = {
    lambda row: keras.layers.Concatenate()(
        [_waves(keras.ops.log1p(row)), keras.layers.LayerNormalization()(row)]
    ): (13,),
    # Sums over an axis before the last.
    lambda row: keras.layers.GroupNormalization(4)(row): (5, 5, 12),
    lambda row: _waves(keras.ops.mean(row + row[:, ::-1], 1)): (20, 11),
    lambda row: _waves(RAW_MEAN(row)): (20, 11),
    # Long rows, whose number of values is no multiple of 8.
    lambda row: _waves(keras.ops.sum(row, 1)): (9001, 3),
    lambda row: _waves(LONG_RAW_SUM(row)): (9003,),
    lambda row: _waves(keras.ops.log_softmax(row / 1e6)[:, :9], 1e9): (9003,),
    lambda row: _waves(_cross_entropy(row), 1e9): (9003,),
    # Gradients of that many values: of a kernel, and of a bias by its positions.
    lambda row: keras.layers.GlobalAveragePooling2D()(
        keras.layers.Conv2D(3, 3, activation="tanh")(row / 1e7)
    ): (93, 103, 1),
    # Broadcast by tiles, which end within rows.
    lambda row: _waves(keras.ops.softmax(row / 1e6), 1e9): (5, 77),
    lambda row: _waves(keras.ops.arctan2(row, LENGTHS), 1e9): (77, 77),
}


@pytest.mark.parametrize(
    "path", [None, pytest.param(SINGLE_EXAMPLES, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("amplify", AMPLIFY)
def test_what_a_row_adds_does_not_tell_its_place(
    amplify: Callable[[Any], Any], path: str | None
) -> None:
    """Seen to fail: rows that amplify rounding added others, by up to 1.6 C."""
    values = keras.Input(AMPLIFY[amplify], name="values")
    found = keras.layers.Dense(1)(keras.layers.Flatten()(amplify(values)))
    model = TrainableModel(network=keras.Model(values, found), description={})
    step = tf.function(clipped_sum(model, l2_norm_clip=1.0, path=path), autograph=False)
    row = np.random.default_rng(0).uniform(1e6, 1e7, AMPLIFY[amplify])
    row = row if row.size > 8192 else np.full_like(row, 1e7 / 3)
    columns = {
        "values": tf.constant(np.stack([row] * 37), tf.float32),
        "label": tf.ones(37, tf.int8),
    }
    # Places at both ends of chunks and tiles, and within them.
    first, *others = (
        np.concatenate([np.ravel(one) for one in step(columns, tf.one_hot(place, 37))])
        for place in (0, 1, 5, 7, 8, 15, 16, 21, 31, 32, 35, 36)
    )
    assert max(np.linalg.norm(other - first) for other in others) < 1e-6


def test_a_norm_is_of_all_values_of_all_variables() -> None:
    gradients = [
        tf.constant([[3.0], [0.0]]),
        tf.constant([[[1.0, 2.0], [4.0, 0.0]], [[0.0, 0.0], [0.0, -5.0]]]),
        tf.constant([2.0, 1.0]),
    ]
    np.testing.assert_array_equal(squared_norms(gradients), [9 + 21 + 4, 25 + 1])


@pytest.mark.parametrize("clip", [0.5, 2.0, 2, math.inf])
@pytest.mark.parametrize("installed", [True, False])
def test_factors_by_hand(
    clip: float, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not installed:  # TF Privacy
        monkeypatch.setattr(clipping, "clip_grads", None)
    norms = tf.constant([0.0, 1.0, 4.0, math.nan, math.inf, 1.0])
    real = tf.constant([True, True, True, True, True, False])
    counted, scale = clip_scale(norms, real, clip)
    np.testing.assert_array_equal(counted, [1, 1, 1, 0, 0, 0])
    wanted = [1.0, min(1.0, clip), min(1.0, clip / 4), 0.0, 0.0, 0.0]
    np.testing.assert_allclose(scale, wanted, rtol=1e-6)


def test_a_cap_is_on_both_sides_of_every_coordinate() -> None:
    values = tf.constant([[-3.0, -0.5], [0.5, 3.0]])
    np.testing.assert_array_equal(cap_coordinates(values, 1.0), [[-1, -0.5], [0.5, 1]])
    assert cap_coordinates(values, None) is values


class _Ones:
    """Gradients of norm 1."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def norms(self) -> Any:
        return tf.ones(self._num_rows)

    def scaled_sum(self, scale: Any, cap: float | None) -> list[Any]:
        return [tf.reduce_sum(scale)]


def test_a_sum_is_of_rows_that_loss_and_gradients_both_accept() -> None:
    model: Any = _AcceptsBits()
    model.variables = [tf.Variable(0.0)]

    def of_rows(columns: dict[str, Any], real: Any) -> tuple[_Ones, Any]:
        return _Ones(real.shape[0]), columns["kept"]

    gradients = ExampleGradients(model, of_rows, relies_on=["views"])
    columns = {
        "label": tf.constant([0, 1, 2, 0, 1]),  # 2 is none of the loss
        "kept": tf.constant([True, True, True, True, False]),
    }
    weight = tf.constant([1.0, 1.0, 1.0, 0.0, 1.0])
    [found] = clipped(gradients, l2_norm_clip=1.0)(columns, weight)
    assert float(found) == 2.0


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 5, 8])
def test_every_row_is_in_one_chunk_and_rows_that_fill_it_are_zeros(
    chunk_rows: int,
) -> None:
    rows = {"x": tf.range(1.0, 6.0), "y": tf.reshape(tf.range(10.0), (5, 2))}
    sizes = []

    def add(chunk: Any) -> list[Any]:
        sizes.append(chunk["x"].shape[0])
        return [tf.reduce_sum(chunk["x"] ** 2), tf.reduce_sum(chunk["y"], 0)]

    more = {"num_rows": 5, "chunk_rows": chunk_rows}
    initial = [tf.zeros(()), tf.zeros(2)]
    total, vector = sum_in_chunks(add, rows, initial=initial, **more)
    assert float(total) == 1 + 4 + 9 + 16 + 25
    np.testing.assert_array_equal(vector, [20, 25])
    assert set(sizes) == {min(5, chunk_rows)}
    found = concat_in_chunks(lambda chunk: 2 * chunk["x"], rows, **more)
    np.testing.assert_array_equal(found, [2, 4, 6, 8, 10])
