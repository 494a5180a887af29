"""Sums within a row of a batch, whose bits do not tell the row's place.

TensorFlow adds up several numbers at a time, of all rows laid end to end.  Where an
axis that remains follows one that is summed, those of them that lie in two rows are
added up in another order.

Formal guarantees:
  - In what ``row_by_row`` traces, axes of a sum, mean or product come last, unless the
    last axis remains and is a multiple of 16; all but those of ``tf.raw_ops``.

Public: graphs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from trainer.core.tf_compat import gen_math_ops, tf


def _over_last_axes(
    kernel: Any, input: Any, axis: Any, keep_dims: bool = False, name: Any = None
) -> Any:
    """Returns a sum, mean or product, whose axes come last."""
    value, axes = tf.convert_to_tensor(input), tf.get_static_value(axis)
    rank = value.shape.rank
    if rank is None or axes is None:
        return kernel(value, axis, keep_dims, name)
    gone = sorted({one % rank for one in np.ravel(axes).tolist()})
    kept = [one for one in range(rank) if one not in gone]
    moved = [one for one in kept if one > min(gone, default=rank)]
    groups = moved[-1:] == [rank - 1] and (value.shape[-1] or 1) % 16 == 0
    if groups or all(value.shape[one] == 1 for one in moved):
        return kernel(value, axis, keep_dims, name)
    last = list(range(len(kept), rank))
    found = kernel(tf.transpose(value, kept + gone), last, False, name)
    for one in gone if keep_dims else ():
        found = tf.expand_dims(found, one)
    return found


_SUMS: dict[str, Any] = {
    name: functools.partial(_over_last_axes, getattr(gen_math_ops, name))
    for name in ("_sum", "mean", "prod")
}
_summing = threading.RLock()


def row_by_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function to trace, whose sums within a row do not tell its place.

    Args:
      function: Function of tensors.
    """

    @functools.wraps(function)
    def traced(*values: Any, **more: Any) -> Any:
        with _summing, mock.patch.multiple(gen_math_ops, **_SUMS):
            return function(*values, **more)

    return traced
