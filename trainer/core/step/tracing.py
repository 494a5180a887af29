"""Functions that TensorFlow traces once, before any step runs.

Public: graphs.  Sensitive: what they are called with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.core.step.row_sums import row_by_row
from trainer.core.tf_compat import tf

#: (columns, weight) -> tensors.
_OfBatch = Callable[[Mapping[str, Any], Any], list[Any]]


def check_eager() -> None:
    """Checks that no function is being traced.

    Raises:
      RuntimeError: the tensors of another trace would be captured; and a gradient tape
        within ``tf.init_scope`` records nothing.
    """
    if not tf.executing_eagerly():
        raise RuntimeError("Expected a gradient sum to be made outside of tf.function.")


def trace_eagerly(function: Callable[..., Any], specs: Any) -> Any:
    """Returns the concrete function of the only trace of a function.

    Args:
      function: Function of nested tensors.
      specs: Their shapes and types.

    Raises:
      RuntimeError: as ``check_eager``.
    """
    check_eager()
    traced = tf.function(row_by_row(function), autograph=False)
    return traced.get_concrete_function(specs)


def in_graph(function: _OfBatch) -> _OfBatch:
    """Returns a function of a graph that may also be called eagerly.

    Args:
      function: Function of columns and weight, for a graph.
    """
    traced = tf.function(row_by_row(function), autograph=False)

    def called(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        given = traced if tf.executing_eagerly() else row_by_row(function)
        return given(dict(columns), weight)

    return called
