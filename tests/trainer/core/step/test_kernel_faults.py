"""Products that TensorFlow's kernels compute wrongly are never computed in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.gradients.test_clipping import naive_sum
from tests.trainer.zoo import arrays, assert_close, batch, make_model, numbers
from trainer.gradients.clipping import (
    ONE_PASS,
    SINGLE_EXAMPLES,
    choose_path,
    clipped_sum,
)
from trainer.tf_compat import keras, tf


class _Product(keras.layers.Layer):
    """A product of each of several rows of values with one matrix."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self._shape = shape

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(13, 4), name="kernel")

    def call(self, values: Any) -> Any:
        rows = tf.stack([tf.tanh(values * (i + 1) / 26) for i in range(26)], 1)
        rows = tf.reshape(rows, (-1, *self._shape, 26, 13))
        product = tf.matmul(rows, tf.convert_to_tensor(self.kernel))
        return tf.reduce_mean(tf.tanh(product), list(range(1, len(self._shape) + 2)))


def _network(*shape: int) -> Callable[[], Any]:
    def make() -> Any:
        integers, values = numbers()
        return keras.Model(integers, keras.layers.Dense(1)(_Product(*shape)(values)))

    return make


@pytest.mark.parametrize(
    ("shape", "path"), [((), ONE_PASS), ((), SINGLE_EXAMPLES), ((1,), SINGLE_EXAMPLES)]
)
def test_the_sum_is_that_of_a_loop(
    shape: tuple[int, ...], path: str, rows: Any
) -> None:
    model, data = make_model(_network(*shape)), rows(12)
    step = tf.function(clipped_sum(model, l2_norm_clip=0.3, path=path), autograph=False)
    wanted = naive_sum(model, data, 0.3)
    for _ in range(3):  # what is left in memory differs
        assert_close(arrays(step(*batch(data))), wanted)


def test_a_product_that_reads_beyond_its_rows_is_not_known_to_keep_them_apart() -> None:
    assert choose_path(make_model(_network())) == ONE_PASS
    assert choose_path(make_model(_network(1))) == SINGLE_EXAMPLES
