"""What TensorFlow computes wrongly is never computed in a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core.validation import InputError
from tests.trainer.gradients.test_clipping import naive_sum
from tests.trainer.zoo import arrays, assert_close, batch, make_model, numbers
from trainer.core.step.clipping import example_gradient
from trainer.core.step.kernels import is_safe_together
from trainer.core.step.pure_graph import trace_eagerly
from trainer.core.tf_compat import keras, tf
from trainer.gradients.paths import ONE_PASS, SINGLE_EXAMPLES, choose_path, clipped_sum
from trainer.gradients.proof import check_function


class _Product(keras.layers.Layer):
    """A product of each of several rows of values with one matrix."""

    def __init__(self, *shape: int, moved: bool = False) -> None:
        super().__init__()
        self._shape, self._moved = shape, moved

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(13, 4), name="kernel")

    def call(self, values: Any) -> Any:
        rows = tf.stack([tf.tanh(values * (i + 1) / 26) for i in range(26)], 1)
        rows = tf.reshape(rows, (-1, *self._shape, 26 // math.prod(self._shape), 13))
        matrix = tf.convert_to_tensor(self.kernel)
        if self._moved:  # (n, batch, m, k)
            rows = tf.transpose(rows, (1, 0, 2, 3))
            product = tf.transpose(tf.matmul(rows, matrix), (1, 0, 2, 3))
        else:
            product = tf.matmul(rows, matrix)
        return tf.reduce_mean(tf.tanh(product), list(range(1, len(self._shape) + 2)))


def _network(*shape: int, moved: bool = False) -> Callable[[], Any]:
    def make() -> Any:
        integers, values = numbers()
        product = _Product(*shape, moved=moved)(values)
        return keras.Model(integers, keras.layers.Dense(1)(product))

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


@pytest.mark.parametrize(("size", "moved"), [(1, False), (13, True)])
def test_a_product_that_may_end_the_process_is_refused_unseen(
    size: int, moved: bool
) -> None:
    """Seen to fail: the process ended in the probe."""
    model = make_model(_network(size, moved=moved))
    with pytest.raises(InputError, match="oneDNN"):
        check_function(model)
    if moved:  # (n, 1, m, k) for one row, too
        with pytest.raises(InputError, match="oneDNN"):
            clipped_sum(model, l2_norm_clip=0.3, path=SINGLE_EXAMPLES)


@pytest.mark.parametrize("shape", [(), (2,), (13,)])
def test_other_products_are_not(shape: tuple[int, ...]) -> None:
    assert choose_path(make_model(_network(*shape))) == ONE_PASS


def _padded(values: Any) -> Any:
    return tf.pad(values, [[0, 0], [1, 2]], constant_values=0.5)


def _rolled(values: Any) -> Any:
    return values + tf.roll(values, 1, -1)


@pytest.mark.parametrize("change", [_padded, _rolled])
def test_examples_are_not_converted_wrongly(change: Any, rows: Any) -> None:
    """Seen to fail: padded with zeros, and rolled from one example to the next."""

    class Changed(keras.layers.Layer):
        def call(self, values: Any) -> Any:
            return tf.tanh(change(values))

    def network() -> Any:
        integers, values = numbers()
        return keras.Model(integers, keras.layers.Dense(1)(Changed()(values)))

    model, data = make_model(network), rows(5)
    step = clipped_sum(model, l2_norm_clip=0.3, path=SINGLE_EXAMPLES)
    step = tf.function(step, autograph=False)
    assert_close(arrays(step(*batch(data))), naive_sum(model, data, 0.3))


def _of_ids(read: Callable[[Any], Any]) -> Any:
    """A model of ids below 7, which is computed one example at a time."""
    ids = keras.Input((26,), dtype="int32", name="categories")
    return keras.Model(ids, keras.layers.Dense(1)(read(ids)))


class _Histogram(keras.layers.Layer):
    """How many ids of a row are 0 to 3; any other is an error."""

    def __init__(self, name_of_sum: str) -> None:
        super().__init__()
        self._sum = getattr(keras.ops, name_of_sum)

    def call(self, ids: Any) -> Any:
        places = tf.reshape(4 * tf.range(tf.shape(ids)[0])[:, None] + ids, (-1,))
        ones = tf.ones_like(places, tf.float32)
        found = self._sum(ones, places, num_segments=4 * tf.shape(ids)[0])
        return keras.ops.maximum(tf.reshape(found, (-1, 4)), 0.0)


@pytest.mark.parametrize("name_of_sum", ["segment_sum", "segment_max"])
def test_no_segment_is_that_of_another_example(name_of_sum: str, rows: Any) -> None:
    model = make_model(lambda: _of_ids(_Histogram(name_of_sum)))
    step = tf.function(clipped_sum(model, l2_norm_clip=0.3), autograph=False)
    data = rows(5)
    data["categories"] %= 4
    assert_close(arrays(step(*batch(data))), naive_sum(model, data, 0.3))
    data["categories"][2, 3] = 5  # segment 1 of the next example
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(*batch(data))


class _End(keras.layers.Layer):
    """The mean from the place of the first id on, or of two values from there on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def call(self, ids: Any) -> Any:
        values = tf.cast(ids, tf.float32)

        def mean(row: Any) -> Any:
            return tf.reduce_mean(tf.slice(row[0], row[1][:1], [self._size]))

        if values.shape[0] == 1:
            return mean((values[0], ids[0]))[None, None]
        return tf.map_fn(mean, (values, ids), fn_output_signature=tf.float32)[:, None]


@pytest.mark.parametrize("size", [-1, 2])
def test_no_slice_is_as_long_as_that_of_another_example(size: int, rows: Any) -> None:
    """Seen to fail: an error of a step, and on other devices a mean with zeros."""
    model, data = make_model(lambda: _of_ids(_End(size))), rows(5)
    data["categories"][:, 0] = [5, 0, 3, 6, 1]
    step = tf.function(clipped_sum(model, l2_norm_clip=0.3), autograph=False)
    assert_close(arrays(step(*batch(data))), naive_sum(model, data, 0.3))


def test_tables_are_read_for_several_examples_at_a_time(rows: Any) -> None:
    layer = keras.layers.Embedding(7, 3)
    model = make_model(lambda: _of_ids(lambda ids: keras.ops.sum(layer(ids), 1)))
    specs = {
        name: tf.TensorSpec((1, *spec.shape[1:]), spec.dtype)
        for name, spec in model.column_specs.items()
    }
    traced = trace_eagerly(lambda columns: example_gradient(model, columns), specs)
    kinds = [op.type for op in traced.graph.get_operations()]
    assert kinds.count("UnsortedSegmentSum") == 1
    assert is_safe_together(traced.graph, traced.inputs[: len(specs)])
    data = rows(5)
    step = clipped_sum(model, l2_norm_clip=0.3, path=SINGLE_EXAMPLES)
    assert_close(arrays(step(*batch(data))), naive_sum(model, data, 0.3))
