"""Layers without state that mix the rows of a batch, or use their places or number.

``test_row_independence`` has the operations that the proof knows, and their axes.
"""

from __future__ import annotations

from typing import Any

from tests.trainer.gradients.attacks.catalogue import Cases
from tests.trainer.gradients.attacks.keras_parts import NUM_VALUES, any_rare, tamed
from trainer.core.tf_compat import tf

CASES = Cases("mixing")


def _if_rare(ids: Any, mixed: Any, values: Any) -> Any:
    return tf.where(any_rare(ids), mixed, values)


_SIMPLE = {
    "l2 norm": lambda v, ids: 3.0 * tf.math.l2_normalize(v, 0),
    "sort": lambda v, ids: tf.sort(v, 0),
    "attention over the batch": lambda v, ids: tf.matmul(
        tf.nn.softmax(tf.matmul(v, v, transpose_b=True)), v
    ),
    "number of equal ids": lambda v, ids: (
        v * tf.gather(tf.math.bincount(ids, minlength=16, dtype=tf.float32), ids[:, :1])
    ),
    "scatter by ids": lambda v, ids: (
        v
        + tf.gather(tf.scatter_nd(ids[:, :1], v, tf.stack([16, NUM_VALUES])), ids[:, 0])
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
    "scan": lambda v, ids: tf.scan(lambda last, row: 0.5 * last + row, v),
    "rows left out": lambda v, ids: (
        v - tf.reduce_sum(tf.boolean_mask(v, ids[:, 0] > 3), 0)
    ),
    "partition and stitch": lambda v, ids: tf.concat(
        tf.dynamic_partition(v, tf.cast(ids[:, 0] >= 4, tf.int32), 2), 0
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
def too_little_for_a_probe(values: Any, ids: Any) -> Any:
    tame = tamed(values)
    return tame + 1e-4 * tf.reduce_mean(tame, 0)
