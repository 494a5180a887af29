"""What every way of clipping does to rows: keep some, zero the others, scale.

Formal guarantees:
  - ``real_rows`` are those of weight above 0 with a label that the loss takes: a
    function of the row alone.  All others contribute exactly nothing, padding and
    rows of another label alike, and nobody is told how many there were.
  - ``keep_rows`` gives exact zeros for all other rows, NaN or not.
  - ``clip_to_norm`` gives factors of at most 1.
  - ``cap_coordinates`` gives values of at most the cap, with their signs.
  - ``clip_scale`` gives a factor s with ``s * norm <= l2_norm_clip`` (up to float32
    rounding) to real rows of finite norm, and exactly 0 to all others.
  - ``clip_weights`` gives the same bits with and without TF Privacy.

Sensitive: everything here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import clip_grads, tf


def real_rows(model: TrainableModel, columns: Mapping[str, Any], weight: Any) -> Any:
    """Returns which rows may contribute, bool of shape (batch,).

    Args:
      model: Whose loss says which labels it takes.
      columns: Name -> (batch, ...).
      weight: 1 for rows, 0 for padding, shape (batch,).
    """
    return tf.logical_and(weight > 0, model.accepts(columns))


def align(rows: Any, value: Any) -> Any:
    """Returns (batch,) values shaped (batch, 1, ..., 1) to broadcast with ``value``.

    Args:
      rows: (batch,).
      value: (batch, ...); only its rank counts.
    """
    return tf.reshape(rows, [-1] + [1] * (len(value.shape) - 1))


def zero_others(value: Any, kept: Any) -> Any:
    """Returns ``value`` with zeros in the rows that are not ``kept``.

    Args:
      value: (batch, ...).
      kept: bool of shape (batch,).
    """
    # 0 times NaN is NaN: a product with 0 would not do.
    return tf.where(align(kept, value), value, tf.zeros_like(value))


def keep_rows(columns: Mapping[str, Any], kept: Any) -> dict[str, Any]:
    """Returns the columns with zeros in the rows that are not ``kept``.

    Args:
      columns: Name -> (batch, ...).
      kept: bool of shape (batch,).
    """
    return {name: zero_others(value, kept) for name, value in columns.items()}


def cap_coordinates(value: Any, linf_norm_clip: float | None) -> Any:
    """Returns ``value`` with every entry clipped to the cap; None for no cap.

    Args:
      value: Value of any shape.
      linf_norm_clip: Above 0; infinity is no cap, either.
    """
    if linf_norm_clip is None or math.isinf(linf_norm_clip):
        return value
    return tf.clip_by_value(value, -linf_norm_clip, linf_norm_clip)


def sum_in_chunks(
    function: Callable[[Any], Any],
    rows: Any,
    *,
    num_rows: int,
    chunk_rows: int,
    initial: Any,
) -> Any:
    """Returns the sum of ``function`` over chunks of rows, one after the other.

    Args:
      function: Takes and returns nested tensors; of rows of zeros, it gives zeros.
      rows: Nested tensors with a leading dimension of ``num_rows``.
      num_rows: Known when the graph is made.
      chunk_rows: Rows of a chunk, at least 1.
      initial: Zeros of the shapes that ``function`` gives.
    """
    if num_rows <= chunk_rows:
        return function(rows)

    def add_chunk(total: Any, chunk: Any) -> Any:
        return tf.nest.map_structure(tf.add, total, function(chunk))

    return tf.foldl(
        add_chunk,
        _split(rows, num_rows, chunk_rows),
        initializer=initial,
        parallel_iterations=1,
    )


def concat_in_chunks(
    function: Callable[[Any], Any], rows: Any, *, num_rows: int, chunk_rows: int
) -> Any:
    """Returns what ``function`` gives for each row, computed chunk by chunk.

    Args:
      function: Nested tensors of some rows -> values of shape (rows,).
      rows: Nested tensors with a leading dimension of ``num_rows``.
      num_rows: Known when the graph is made.
      chunk_rows: Rows of a chunk, at least 1.
    """
    if num_rows <= chunk_rows:
        return function(rows)
    values = tf.map_fn(
        function,
        _split(rows, num_rows, chunk_rows),
        fn_output_signature=tf.TensorSpec((chunk_rows,), tf.float32),
        parallel_iterations=1,
    )
    return tf.reshape(values, (-1,))[:num_rows]


def _split(rows: Any, num_rows: int, chunk_rows: int) -> Any:
    """Returns nested tensors shaped (chunks, chunk_rows, ...), zeros at the end."""
    num_chunks = -(-num_rows // chunk_rows)

    def split(value: Any) -> Any:
        rest = [[0, 0]] * (len(value.shape) - 1)
        padded = tf.pad(value, [[0, num_chunks * chunk_rows - num_rows], *rest])
        shape = tf.concat([[num_chunks, chunk_rows], tf.shape(value)[1:]], 0)
        return tf.ensure_shape(
            tf.reshape(padded, shape), (num_chunks, chunk_rows, *value.shape[1:])
        )

    return tf.nest.map_structure(split, rows)


def clip_to_norm(squared_norms: Any, squared_bound: Any) -> Any:
    """Returns factors that bring vectors of these squared norms within a bound.

    Args:
      squared_norms: (batch,).
      squared_bound: (batch,), or one for all.
    """
    longer = squared_norms > squared_bound
    ratio = tf.math.divide_no_nan(squared_bound, squared_norms)
    return tf.where(longer, tf.sqrt(ratio), 1.0)


def clip_weights(l2_norm_clip: float, norms: Any) -> Any:
    """Returns the factors that bring gradients of these norms within the clip.

    By TF Privacy where it is installed; otherwise by its formula.

    Args:
      l2_norm_clip: Positive and finite.
      norms: L2 norm of each example's gradient, of shape (batch,).
    """
    if clip_grads is None:
        return l2_norm_clip / tf.math.maximum(l2_norm_clip, norms)
    return clip_grads.compute_clip_weights(l2_norm_clip, norms)


def clip_scale(norms: Any, real: Any, l2_norm_clip: float) -> tuple[Any, Any]:
    """Returns which rows contribute, and the factor of each.

    Args:
      norms: L2 norms, (batch,).
      real: bool of shape (batch,).
      l2_norm_clip: Above 0; infinity leaves gradients as they are.
    """
    counted = real & tf.math.is_finite(norms)
    scale = (
        tf.ones_like(norms)
        if math.isinf(l2_norm_clip)
        else clip_weights(float(l2_norm_clip), norms)
    )
    return counted, tf.where(counted, scale, 0.0)
