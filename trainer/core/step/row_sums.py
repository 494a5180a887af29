"""Sums within a row of a batch, whose bits do not tell the row's place.

TensorFlow adds up several numbers at a time, of all rows laid end to end.  Where an
axis that remains follows one that is summed, those of them that lie in two rows are
added up in another order.

Formal guarantees:
  - In what ``row_by_row`` traces, axes of a sum, mean or product come last, unless the
    last axis remains and is a multiple of 16.
  - ``is_row_by_row`` finds all others in a graph, such as those of ``tf.raw_ops``:
    examples with one of them are computed one after the other.

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


def _to_move(value: Any, axis: Any) -> tuple[list[int], list[int]] | None:
    """Returns the axes that remain and those that are summed; None if none need move.

    Raises:
      ValueError: the axes or their number are not known.
    """
    rank, axes = value.shape.rank, tf.get_static_value(axis)
    if rank is None or axes is None:
        raise ValueError
    gone = sorted({one % rank for one in np.ravel(axes).tolist()})
    kept = [one for one in range(rank) if one not in gone]
    moved = [one for one in kept if one > min(gone, default=rank)]
    groups = moved[-1:] == [rank - 1] and (value.shape[-1] or 1) % 16 == 0
    if groups or all(value.shape[one] == 1 for one in moved):
        return None
    return kept, gone


def _over_last_axes(
    kernel: Any, input: Any, axis: Any, keep_dims: bool = False, name: Any = None
) -> Any:
    """Returns a sum, mean or product, whose axes come last."""
    value = tf.convert_to_tensor(input)
    try:
        found = _to_move(value, axis)
    except ValueError:
        found = None  # is_row_by_row refuses it
    if found is None:
        return kernel(value, axis, keep_dims, name)
    kept, gone = found
    last = list(range(len(kept), len(kept) + len(gone)))
    result = kernel(tf.transpose(value, kept + gone), last, False, name)
    for one in gone if keep_dims else ():
        result = tf.expand_dims(result, one)
    return result


def is_row_by_row(op: Any) -> bool:
    """Whether an operation of a graph is no sum whose bits may tell a row's place.

    Args:
      op: Operation of a graph of a batch, or of one example.
    """
    if op.type not in ("Sum", "Mean", "Prod"):
        return True
    try:
        return _to_move(*op.inputs) is None
    except ValueError:
        return False


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
