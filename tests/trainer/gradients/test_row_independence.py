"""The proof that rows do not mix accepts good operations, and none that mixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainer.core.step.kernels import row_by_row
from trainer.core.tf_compat import gradient_registry, tf
from trainer.gradients import row_independence
from trainer.gradients.row_independence import classify, losses_obstacle

SHAPE = (4, 3)
LENGTH = tf.Variable(3, trainable=False)


def _long(values: Any) -> Any:
    """Returns rows of 27,012 values, which is no multiple of 8."""
    return tf.reshape(tf.tile(values, (1, 2251, 1)), (-1, 27012))


#: (batch, 4, 3) -> (batch, ...), each row by itself.
APART: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda v: tf.exp(-v) * 2.0 + v / 3.0,
    "a constant of fewer axes": lambda v: v + tf.constant(np.eye(4, 3), tf.float32),
    "a constant of one row": lambda v: v + tf.ones((1, 4, 3)),
    "mean of a row": lambda v: tf.reduce_mean(v, (1, 2)),
    "mean of the last axis": lambda v: tf.reduce_mean(v, -1, keepdims=True) - v,
    "softmax": tf.nn.softmax,
    "cumulative sum": lambda v: tf.cumsum(v, 1),
    "reverse": lambda v: tf.reverse(v, [2]),
    "argmax": lambda v: tf.cast(tf.argmax(v, 1), tf.float32),
    "best two": lambda v: tf.math.top_k(v, 2).values,
    "flatten": lambda v: tf.reshape(v, (-1, 12)),
    "flatten by the batch size": lambda v: tf.reshape(v, (tf.shape(v)[0], -1)),
    "reshape by a shape": lambda v: tf.reshape(
        v, tf.concat([tf.shape(v)[:1], [12]], 0)
    ),
    "positions as rows and back": lambda v: tf.reshape(
        tf.tanh(tf.reshape(v, (-1, 3))), (-1, 4, 3)
    ),
    "transpose of a row": lambda v: tf.transpose(v, (0, 2, 1)),
    "stack": lambda v: tf.stack([v, v + 1.0], 1),
    "unstack": lambda v: tf.add_n(tf.unstack(v, axis=1)),
    "split": lambda v: tf.split(v, 2, axis=1)[0],
    "split by sizes": lambda v: tf.split(v, [1, 3], axis=1)[1],
    "concatenate": lambda v: tf.concat([v, v], 2),
    "slice": lambda v: v[:, 1:, 0],
    "slice from the end": lambda v: v[..., -1],
    "pad": lambda v: tf.pad(v, [[0, 0], [1, 1], [0, 0]]),
    "tile": lambda v: tf.tile(v, (1, 2, 1)),
    "new axis": lambda v: tf.squeeze(v[:, tf.newaxis], [1]),
    "product with weights": lambda v: tf.matmul(v[:, 0], tf.ones((3, 2))),
    "product within a row": lambda v: tf.matmul(v, v, transpose_b=True),
    "einsum": lambda v: tf.einsum("bij,bkj->bik", v, v),
    "einsum with weights": lambda v: tf.einsum("bij,jk->bik", v, tf.ones((3, 2))),
    "table": lambda v: tf.gather(tf.ones((9, 2)), tf.cast(v[:, 0] > 0, tf.int32)),
    "gather of places": lambda v: tf.gather(v, [2, 0], axis=1),
    "gather within rows": lambda v: tf.gather(
        v, tf.cast(v[:, :, 0] > 0, tf.int32), axis=1, batch_dims=1
    ),
    "one hot": lambda v: tf.one_hot(tf.cast(v[:, 0] > 0, tf.int32), 2),
    "number at a size of a row": lambda v: (
        v * tf.gather(tf.range(9.0), tf.shape(v)[1:2]) + tf.range(9.0)[tf.shape(v)[1]]
    ),
    "choice": lambda v: tf.where(v > 0, v, 0.1 * v),
    "zeros of the batch size": lambda v: tf.zeros((tf.shape(v)[0], 4, 3)) + v,
    "a number for all": lambda v: v + tf.broadcast_to(2.0, tf.shape(v)),
    "size of a row": lambda v: v / tf.cast(tf.shape(v)[1], v.dtype),
    "labels below a size": lambda v: tf.cast(
        tf.cast(v[:, 0, 0], tf.int32) < tf.shape(v)[-1], tf.float32
    ),
    "time first and back": lambda v: tf.transpose(
        tf.stack([tf.tanh(x) * 2.0 for x in tf.unstack(tf.transpose(v, (1, 0, 2)))]),
        (1, 0, 2),
    ),
    "bins": lambda v: tf.cast(tf.raw_ops.Bucketize(input=v, boundaries=[0.0]), v.dtype),
    "product of sizes": lambda v: tf.reshape(v, (-1, tf.shape(v)[1] * tf.shape(v)[2])),
    "pool": lambda v: tf.nn.max_pool2d(v[..., tf.newaxis], 2, 1, "SAME"),
    "long sum": lambda v: tf.reduce_sum(_long(v), 1),
    "long mean": lambda v: tf.reduce_mean(_long(v), 1, keepdims=True),
    "long log-softmax": lambda v: tf.nn.log_softmax(_long(v)),
    "long cross-entropy": lambda v: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(v[:, 0, 0] > 0, tf.int32), _long(v)
    ),
    "squares of rows flattened by the batch size": lambda v: tf.square(
        tf.reshape(v, (tf.shape(v)[0], -1))
    ),
    "powers of one shape": lambda v: tf.pow(v[:, 0], tf.nn.relu(v[:, 1])),
}  # fmt: skip


@tf.custom_gradient
def _gradient_that_mixes(value: Any) -> Any:
    return tf.identity(value), lambda slope: slope + tf.reduce_sum(slope, 0)


def _first_by_masks(values: Any) -> Any:
    """Returns the first of (batch, 1, n) by a slice whose first place looks whole."""
    return tf.raw_ops.StridedSlice(
        input=values,
        begin=[0] * 4,
        end=[1] * 4,
        strides=[1] * 4,
        begin_mask=12,
        end_mask=12,
        ellipsis_mask=1,
        new_axis_mask=1,
        shrink_axis_mask=2,
    )


#: What the proof must not accept: it mixes rows in values or in gradients, depends on
#: their places or number, or hides what it computes.
MIXING: dict[str, Callable[[Any], Any]] = {
    "mean over all": lambda v: v - tf.reduce_mean(v),
    "mean over the batch": lambda v: v - tf.reduce_mean(v, 0),
    "mean by a negative axis": lambda v: v - tf.reduce_mean(v, -3, keepdims=True),
    "batch maximum": lambda v: v / tf.reduce_max(tf.abs(v)),
    "softmax over the batch": lambda v: tf.nn.softmax(v, 0),
    "cumulative over the batch": lambda v: tf.cumsum(v, 0),
    "reversed batch": lambda v: v + tf.reverse(v, [0]),
    "rolled": lambda v: v + tf.roll(v, 1, 0),
    "rolled by all": lambda v: v + tf.roll(v, 4, 0),
    "shifted": lambda v: tf.concat([v[1:], v[:1]], 0),
    "first row": lambda v: v - v[:1],
    "first row by index": lambda v: v - v[0],
    "every second row": lambda v: v + tf.repeat(v[::2], 2, 0),
    "places": lambda v: v + tf.cast(tf.range(tf.shape(v)[0]), v.dtype)[:, None, None],
    "batch size": lambda v: v / tf.cast(tf.shape(v)[0], v.dtype),
    "numbers for places": lambda v: (
        tf.broadcast_to(tf.ones((4, 4, 3)), tf.shape(v)) + v
    ),
    "batch size among sizes": lambda v: v / tf.cast(tf.shape(v)[:1], v.dtype),
    "batch size in an ellipsis": lambda v: v * tf.cast(tf.shape(v)[...], v.dtype),
    "batch size in a stack of columns": lambda v: (
        v
        / tf.cast(
            tf.reshape(tf.stack([[4, tf.shape(v)[0]], [5, 6]], 1), [-1])[2], v.dtype
        )
    ),
    "batch size in a row of sizes": lambda v: (
        v / tf.cast(tf.stack([[4, 5], [tf.shape(v)[0], 6]])[1], v.dtype)[0]
    ),
    "number for the batch size": lambda v: (
        v * tf.cast(tf.gather(tf.range(100), tf.shape(v)[0]), v.dtype)
    ),
    "number at the batch size": lambda v: (
        v * tf.cast(tf.range(100)[: tf.shape(v)[0]][-1], v.dtype)
    ),
    "size that leaves its type": lambda v: tf.reshape(
        v, tf.stack([tf.shape(v)[0], tf.shape(v)[1] * 2**29 // 2**29, 3])
    ),
    "size beyond the shape": lambda v: v * tf.cast(tf.gather(tf.shape(v), 9), v.dtype),
    "batch size by a sum": lambda v: v / tf.reduce_sum(tf.ones_like(v[:, 0, 0])),
    "all pairs": lambda v: tf.matmul(
        tf.reshape(v, (-1, 12)), tf.reshape(v, (-1, 12)), transpose_b=True
    ),
    "batch as columns": lambda v: tf.matmul(
        tf.reshape(v, (12, -1)), tf.reshape(v, (12, -1)), transpose_a=True
    ),
    "transposed": lambda v: tf.transpose(v, (1, 0, 2)),
    "sum over a moved batch": lambda v: tf.reduce_sum(tf.transpose(v, (1, 0, 2)), 1),
    "softmax over a moved batch": lambda v: tf.transpose(
        tf.nn.softmax(tf.transpose(v, (1, 2, 0))), (2, 0, 1)
    ),
    "stacked before the batch": lambda v: tf.reshape(tf.stack([v, v]), (-1, 12)),
    "batch of one size": lambda v: tf.zeros_like(tf.reshape(v[:, 0, 0], [1])),
    "misaligned reshape": lambda v: tf.reshape(v, (3, -1, 4)),
    "rows across the batch": lambda v: tf.reshape(tf.transpose(v, (1, 0, 2)), (-1, 12)),
    "positions as rows": lambda v: tf.reduce_sum(tf.reshape(v, (-1, 3)), 1),
    "batch against positions": lambda v: v[:, 0, 0] + v[:, :1, 0],
    "gather of rows": lambda v: tf.gather(v, tf.argsort(v[:, 0, 0])),
    "gather of rows at ids of rows": lambda v: tf.gather(
        v, tf.cast(v[:, 0, 0] > 0, tf.int32)
    ),
    "gather within rows, behind another axis": lambda v: tf.gather(
        v, tf.cast(v[:, :, 0] > 0, tf.int32), axis=2, batch_dims=1
    ),
    "sorted batch": lambda v: tf.sort(v, axis=0),
    "unique": lambda v: tf.cast(tf.unique(v[:, 0, 0]).idx, v.dtype),
    "segments": lambda v: tf.math.unsorted_segment_sum(
        v, tf.cast(v[:, 0, 0] > 0, tf.int32), 2
    ),
    "einsum over the batch": lambda v: tf.einsum("bij,cij->bc", v, v),
    "matching batches": lambda v: tf.einsum("bij,bij->ij", v, v),
    "norm of the batch": lambda v: v / tf.norm(v),
    "constant for each place": lambda v: v * tf.reshape(tf.range(8.0), (8, 1, 1)),
    "choice for each place": lambda v: tf.raw_ops.Select(
        condition=tf.constant([True, False] * 4), x=v, y=-v
    ),
    "counts weighed for each place": lambda v: tf.raw_ops.DenseBincount(
        input=tf.cast(v[:, 0], tf.int32),
        size=5,
        weights=tf.reshape(tf.range(24.0), (8, 3)),
        binary_output=False,
    ),
    "first row by a mask of no place": lambda v: (
        v[:, :, 0]
        + tf.raw_ops.StridedSlice(
            input=v[:, :, 0],
            begin=[0] * 3,
            end=[0, 1, 4],
            strides=[1] * 3,
            ellipsis_mask=1,
            new_axis_mask=32,
        )
    ),
    "labels of rows as classes": lambda v: (
        tf.raw_ops.SoftmaxCrossEntropyWithLogits(
            features=v[:, :, 0], labels=v[:, 0, 0]
        ).loss
    ),
    # Their last bits tell the place of a row.
    "cross-entropy with shares": lambda v: (
        tf.raw_ops.SoftmaxCrossEntropyWithLogits(
            features=v[:, 1], labels=tf.nn.softmax(v[:, 0])
        ).loss
    ),
    "sum before the last axis": lambda v: tf.raw_ops.Sum(input=v, axis=1),
    "long sum of raw ops": lambda v: tf.raw_ops.Sum(input=_long(v), axis=1),
    "long log-softmax of raw ops": lambda v: tf.raw_ops.LogSoftmax(logits=_long(v)),
    "softmax of raw ops": lambda v: tf.raw_ops.Softmax(logits=v),
    "sum of a length that a variable says": lambda v: tf.reduce_sum(v[:, :LENGTH], 1),
    "powers of a row broadcast": lambda v: tf.pow(v, v[:, :1]),
    "first row of an ellipsis that is a new axis": lambda v: (
        v[:, 0] + _first_by_masks(v[:, :1])
    ),
    "batch size in an einsum": lambda v: tf.einsum(
        "bij,j->b", v, tf.cast(tf.stack([tf.shape(v)[0], 1, 1]), v.dtype)
    ),
    "parts as long as the batch": lambda v: tf.split(v, [tf.shape(v)[0], -1], 1)[0],
    "batch size by a sum along rows": lambda v: (
        v[:, 0]
        / tf.reduce_sum(
            tf.ones(tf.stack([tf.shape(v)[0], tf.shape(v)[0]])), 1, keepdims=True
        )
    ),
    "chance": lambda v: v + tf.random.normal(tf.shape(v), seed=1),
    "loop": lambda v: tf.map_fn(lambda row: row * 2.0, v),
    "python": lambda v: tf.numpy_function(lambda a: a - a.mean(0), [v], tf.float32),
    "gradient that mixes": _gradient_that_mixes,
}


def _trace(function: Callable[[Any], Any]) -> tuple[Any, str | None]:
    def losses(values: Any) -> Any:
        found = function(values)
        if found.shape.rank is None or found.shape.rank < 2:
            return found
        return tf.reduce_sum(found, list(range(1, found.shape.rank)))

    traced = tf.function(row_by_row(losses), autograph=False)
    spec = tf.TensorSpec((None, *SHAPE), tf.float32)
    graph = traced.get_concrete_function(spec).graph
    kinds = classify(graph, graph.inputs)
    return losses, losses_obstacle(graph.structured_outputs, kinds)


@pytest.mark.parametrize("name", APART)
def test_operations_within_rows_are_proven(name: str) -> None:
    losses, why = _trace(APART[name])
    assert why is None
    random = np.random.default_rng(0)
    rows, others = random.normal(size=(2, 8, *SHAPE)).astype("f4")
    order = random.permutation(8)
    mixed = np.where(np.arange(8)[:, None, None] < 4, rows, others)[order]
    found, again = losses(tf.constant(rows)), losses(tf.constant(mixed))
    kept = np.argsort(order)[:4]
    np.testing.assert_allclose(
        np.asarray(found)[:4], np.asarray(again)[kept], rtol=1e-5
    )


@pytest.mark.parametrize("name", MIXING)
def test_no_mixing_is_proven(name: str) -> None:
    assert _trace(MIXING[name])[1] is not None


def test_operations_of_numbers_have_the_gradient_of_tensorflow() -> None:
    """A user may register one where there is none, and it may mix rows."""
    no_numbers = {
        "All", "Any", "Bucketize", "DenseBincount", "IsFinite", "IsInf", "IsNan"
    }  # fmt: skip
    without = set()
    for kind in row_independence._RULES:
        try:
            code = gradient_registry.lookup(kind)  # None: it has no derivative
        except LookupError:
            without.add(kind)
        else:
            assert code is None or code.__module__.startswith("tensorflow.")
    assert without == no_numbers


def test_silu_is_known_by_the_code_of_its_gradient() -> None:
    """TensorFlow gives it a gradient of its own; another one is not known."""

    @tf.custom_gradient
    def reversed_(values: Any) -> Any:
        def grad(slope: Any) -> Any:
            return tf.reverse(slope, [0])

        return values * tf.sigmoid(values), grad

    assert _trace(tf.nn.silu)[1] is None
    why = _trace(reversed_)[1]
    assert why is not None
    assert "has a gradient of its own" in why
