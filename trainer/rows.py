"""What every way of clipping does to rows: keep some, zero the others, scale.

Formal guarantees:
  - ``real_rows`` are those of weight above 0 with a label that the loss takes: a
    function of the row alone.  All others contribute exactly nothing, padding and
    rows of another label alike, and nobody is told how many there were.
  - ``keep_rows`` gives exact zeros for all other rows, NaN or not.
  - ``clip_scale`` gives a factor s with ``s * norm <= l2_norm_clip`` (up to float32
    rounding) to real rows of finite norm, and exactly 0 to all others.

Sensitive: everything here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.models import TrainableModel
from trainer.tf_privacy import clip_grads, tf


def real_rows(model: TrainableModel, columns: Mapping[str, Any], weight: Any) -> Any:
    """Returns which rows may contribute, bool of shape (batch,)."""
    return tf.logical_and(weight > 0, model.accepts(columns))


def align(rows: Any, value: Any) -> Any:
    """Returns (batch,) values shaped (batch, 1, ..., 1) to broadcast with ``value``."""
    return tf.reshape(rows, [-1] + [1] * (len(value.shape) - 1))


def zero_others(value: Any, kept: Any) -> Any:
    """Returns ``value`` with zeros in the rows that are not ``kept``."""
    # 0 times NaN is NaN: a product with 0 would not do.
    return tf.where(align(kept, value), value, tf.zeros_like(value))


def keep_rows(columns: Mapping[str, Any], kept: Any) -> dict[str, Any]:
    """Returns the columns with zeros in the rows that are not ``kept``."""
    return {name: zero_others(value, kept) for name, value in columns.items()}


def clip_scale(norms: Any, real: Any, l2_norm_clip: float) -> tuple[Any, Any]:
    """Returns which rows contribute, and the factor of each."""
    counted = real & tf.math.is_finite(norms)
    scale = (
        tf.ones_like(norms)
        if math.isinf(l2_norm_clip)
        else clip_grads.compute_clip_weights(float(l2_norm_clip), norms)
    )
    return counted, tf.where(counted, scale, 0.0)
