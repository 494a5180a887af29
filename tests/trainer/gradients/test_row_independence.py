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
    "a constant of fewer axes": lambda v: v + tf.constant(np.eye(4, 3), tf.float32),
    "softmax": tf.nn.softmax,
    "best two": lambda v: tf.math.top_k(v, 2).values,
    "flatten by the batch size": lambda v: tf.reshape(v, (tf.shape(v)[0], -1)),
    "reshape by a shape": lambda v: tf.reshape(
        v, tf.concat([tf.shape(v)[:1], [12]], 0)
    ),
    "positions as rows and back": lambda v: tf.reshape(
        tf.tanh(tf.reshape(v, (-1, 3))), (-1, 4, 3)
    ),
    "product within a row": lambda v: tf.matmul(v, v, transpose_b=True),
    "einsum": lambda v: tf.einsum("bij,bkj->bik", v, v),
    "gather within rows": lambda v: tf.gather(
        v, tf.cast(v[:, :, 0] > 0, tf.int32), axis=1, batch_dims=1
    ),
    "number at a size of a row": lambda v: (
        v * tf.gather(tf.range(9.0), tf.shape(v)[1:2]) + tf.range(9.0)[tf.shape(v)[1]]
    ),
    "labels below a size": lambda v: tf.cast(
        tf.cast(v[:, 0, 0], tf.int32) < tf.shape(v)[-1], tf.float32
    ),
    "time first and back": lambda v: tf.transpose(
        tf.stack([tf.tanh(x) * 2.0 for x in tf.unstack(tf.transpose(v, (1, 0, 2)))]),
        (1, 0, 2),
    ),
    "pool": lambda v: tf.nn.max_pool2d(v[..., tf.newaxis], 2, 1, "SAME"),
    "long sum": lambda v: tf.reduce_sum(_long(v), 1),
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
    "mean over the batch": lambda v: v - tf.reduce_mean(v, 0),
    "places": lambda v: v + tf.cast(tf.range(tf.shape(v)[0]), v.dtype)[:, None, None],
    "batch size": lambda v: v / tf.cast(tf.shape(v)[0], v.dtype),
    "numbers for places": lambda v: (
        tf.broadcast_to(tf.ones((4, 4, 3)), tf.shape(v)) + v
    ),
    "batch size in a stack of columns": lambda v: (
        v
        / tf.cast(
            tf.reshape(tf.stack([[4, tf.shape(v)[0]], [5, 6]], 1), [-1])[2], v.dtype
        )
    ),
    "number at the batch size": lambda v: (
        v * tf.cast(tf.range(100)[: tf.shape(v)[0]][-1], v.dtype)
    ),
    "size that leaves its type": lambda v: tf.reshape(
        v, tf.stack([tf.shape(v)[0], tf.shape(v)[1] * 2**29 // 2**29, 3])
    ),
    "size beyond the shape": lambda v: v * tf.cast(tf.gather(tf.shape(v), 9), v.dtype),
    "all pairs": lambda v: tf.matmul(
        tf.reshape(v, (-1, 12)), tf.reshape(v, (-1, 12)), transpose_b=True
    ),
    "sum over a moved batch": lambda v: tf.reduce_sum(tf.transpose(v, (1, 0, 2)), 1),
    "stacked before the batch": lambda v: tf.reshape(tf.stack([v, v]), (-1, 12)),
    "batch of one size": lambda v: tf.zeros_like(tf.reshape(v[:, 0, 0], [1])),
    "rows across the batch": lambda v: tf.reshape(tf.transpose(v, (1, 0, 2)), (-1, 12)),
    "batch against positions": lambda v: v[:, 0, 0] + v[:, :1, 0],
    "gather within rows, behind another axis": lambda v: tf.gather(
        v, tf.cast(v[:, :, 0] > 0, tf.int32), axis=2, batch_dims=1
    ),
    "einsum over the batch": lambda v: tf.einsum("bij,cij->bc", v, v),
    "batch size in an einsum": lambda v: tf.einsum(
        "bij,j->b", v, tf.cast(tf.stack([tf.shape(v)[0], 1, 1]), v.dtype)
    ),
    "constant for each place": lambda v: v * tf.reshape(tf.range(8.0), (8, 1, 1)),
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
    # Their last bits tell the place of a row.
    "cross-entropy with shares": lambda v: (
        tf.raw_ops.SoftmaxCrossEntropyWithLogits(
            features=v[:, 1], labels=tf.nn.softmax(v[:, 0])
        ).loss
    ),
    "long sum of raw ops": lambda v: tf.raw_ops.Sum(input=_long(v), axis=1),
    "softmax of raw ops": lambda v: tf.raw_ops.Softmax(logits=v),
    "sum of a length that a variable says": lambda v: tf.reduce_sum(v[:, :LENGTH], 1),
    "powers of a row broadcast": lambda v: tf.pow(v, v[:, :1]),
    "first row of an ellipsis that is a new axis": lambda v: (
        v[:, 0] + _first_by_masks(v[:, :1])
    ),
    "parts as long as the batch": lambda v: tf.split(v, [tf.shape(v)[0], -1], 1)[0],
    "chance": lambda v: v + tf.random.normal(tf.shape(v), seed=1),
    "loop": lambda v: tf.map_fn(lambda row: row * 2.0, v),
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
