"""Layers without state that mix the rows of a batch, or use their places or number.

``test_row_independence`` has the operations that the proof knows, and their axes.
"""

from __future__ import annotations

from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import (
    NUM_VALUES,
    Call,
    any_rare,
    tamed,
)
from trainer.core.tf_compat import tf

CASES = Cases("mixing")


def _if_rare(ids: Any, mixed: Any, values: Any) -> Any:
    return tf.where(any_rare(ids), mixed, values)


_SIMPLE = {
    "l2 norm": lambda v, ids: 3.0 * tf.math.l2_normalize(v, 0),
    "clip by global norm": lambda v, ids: tf.clip_by_global_norm([v], 1.0)[0][0],
    "sort": lambda v, ids: tf.sort(v, 0),
    "rank": lambda v, ids: v + tf.cast(tf.argsort(v, 0), tf.float32),
    "in top k of the batch": lambda v, ids: (
        v
        * tf.cast(
            tf.math.in_top_k(tf.zeros(1, tf.int32), tf.transpose(v[:, :1]), 1),
            tf.float32,
        )
    ),
    "attention over the batch": lambda v, ids: tf.matmul(
        tf.nn.softmax(tf.matmul(v, v, transpose_b=True)), v
    ),
    "tensordot": lambda v, ids: tf.tensordot(v, tf.tensordot(v, v, [[0], [0]]), 1),
    "number of elements": lambda v, ids: v * tf.cast(tf.size(v), tf.float32),
    "place in a line": lambda v, ids: (
        v + tf.linspace(0.0, 1.0, tf.shape(v)[0])[:, None]
    ),
    "number of equal ids": lambda v, ids: (
        v * tf.gather(tf.math.bincount(ids, minlength=16, dtype=tf.float32), ids[:, :1])
    ),
    "equal ids": lambda v, ids: tf.matmul(
        tf.cast(tf.equal(ids[:, :1], ids[:, 0]), tf.float32), v
    ),
    "histogram": lambda v, ids: (
        v * tf.cast(tf.histogram_fixed_width(v, [0.0, 1.0], 2)[1], tf.float32)
    ),
    "scatter by ids": lambda v, ids: (
        v
        + tf.gather(tf.scatter_nd(ids[:, :1], v, tf.stack([16, NUM_VALUES])), ids[:, 0])
    ),
    "other row length": lambda v, ids: tf.reshape(
        tf.cumsum(tf.reshape(v, (-1, 2 * NUM_VALUES)), 1), (-1, NUM_VALUES)
    ),
    "one long row": lambda v, ids: tf.reshape(
        tf.nn.softmax(tf.reshape(v, (1, -1))), (-1, NUM_VALUES)
    ),
    "batch as an image": lambda v, ids: tf.image.per_image_standardization(
        v[None, :, :, None]
    )[0, :, :, 0],
    "batch as a sequence": lambda v, ids: tf.nn.conv1d(
        v[None], tf.ones((3, NUM_VALUES, NUM_VALUES)), 1, "SAME"
    )[0],
    "fused batch norm": lambda v, ids: tf.compat.v1.nn.fused_batch_norm(
        v[:, None, None], tf.ones(NUM_VALUES), tf.zeros(NUM_VALUES)
    )[0][:, 0, 0],
    "fourier transform": lambda v, ids: tf.transpose(
        tf.math.real(tf.signal.fft(tf.cast(tf.transpose(v), tf.complex64)))
    ),
    "scan": lambda v, ids: tf.scan(lambda last, row: 0.5 * last + row, v),
    "rows left out": lambda v, ids: (
        v - tf.reduce_sum(tf.boolean_mask(v, ids[:, 0] > 3), 0)
    ),
    "partition and stitch": lambda v, ids: tf.concat(
        tf.dynamic_partition(v, tf.cast(ids[:, 0] >= 4, tf.int32), 2), 0
    ),
    "ragged rows": lambda v, ids: (
        v + tf.reduce_sum(tf.RaggedTensor.from_row_lengths(v, [tf.shape(v)[0]]), axis=1)
    ),
    "sparse product": lambda v, ids: (
        v + tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(tf.transpose(v)), v)[:1]
    ),
    "sum of a loop": lambda v, ids: (
        v
        - tf.while_loop(
            lambda i, total: i < tf.shape(v)[0],
            lambda i, total: (i + 1, total + v[i]),
            (0, tf.zeros(NUM_VALUES)),
        )[1]
    ),
    "branch on all rows": lambda v, ids: tf.cond(
        tf.reduce_any(v > 0.9), lambda: -v, lambda: v
    ),
    "broadcast and diagonal": lambda v, ids: (
        v + tf.linalg.diag_part(tf.tile(v[:, :1], (1, tf.shape(v)[0])))[::-1, None]
    ),
}


def _shaped(values: Any, shape: Any) -> Any:
    """Sets a shape if it is unknown, by an operation without a rule that hides all."""
    known = values.shape.rank is not None and values.shape.as_list() == shape.as_list()
    return values if known else tf.ensure_shape(values, shape)


#: Also where only rare ids mix rows: the check accepts some of these, and each row is
#: computed by itself, whatever the operation.
_ALSO_IF_RARE = (
    "sort", "batch as an image", "scan", "partition and stitch", "sum of a loop",
    "branch on all rows",
)  # fmt: skip


def _add(name: str, function: Any) -> None:
    def always(values: Any, ids: Any) -> Any:
        return _shaped(function(tamed(values), ids), values.shape)

    def if_rare(values: Any, ids: Any) -> Any:
        tame = tamed(values)
        return _if_rare(ids, _shaped(function(tame, ids), values.shape), tame)

    always.__name__, if_rare.__name__ = name, f"{name} if an id is rare"
    CASES.call(always)
    if name in _ALSO_IF_RARE:
        CASES.call(if_rare)


for _label, _function in _SIMPLE.items():
    _add(_label, _function)


@CASES.call
def rare_ids_turn_all_rows(values: Any, ids: Any) -> Any:
    return tf.where(any_rare(ids), -values, values)


@CASES.call
def a_huge_value_turns_all_rows(values: Any, ids: Any) -> Any:
    return tf.where(tf.reduce_any(values > 1e8), -values, values)


@CASES.call
def a_missing_value_turns_all_rows(values: Any, ids: Any) -> Any:
    many = tf.reduce_all(tf.math.is_nan(values), 1) & (ids[:, 0] > 1)
    return tf.where(tf.reduce_any(many), -values, values)


@CASES.call
def eight_rows_turn(values: Any, ids: Any) -> Any:
    return tf.where(tf.equal(tf.shape(values)[0], 8), values - values[:1], values)


@CASES.call
def padding_counted(values: Any, ids: Any) -> Any:
    real = tf.reduce_any(tf.not_equal(values, 0.0), 1, keepdims=True)
    return values / (1.0 + tf.reduce_sum(tf.cast(real, tf.float32)))


@CASES.call
def too_little_for_a_probe(values: Any, ids: Any) -> Any:
    tame = tamed(values)
    return tame + 1e-4 * tf.reduce_mean(tame, 0)


@CASES.layer
def weight_that_multiplies_a_mean(layer: Any) -> Call:
    # Zero at first, so that nothing mixes before the first update.
    scale = layer.add_weight(name="scale", shape=(), initializer="zeros")

    def call(values: Any, ids: Any) -> Any:
        return values + scale * tf.reduce_mean(tamed(values), 0)

    return call
