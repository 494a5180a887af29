"""Values of tensors of a graph that are the same whenever it runs.

Formal guarantees:
  - ``static_value`` follows from constants and static shapes alone, through operations
    without a state: no variable, no column and no captured tensor has a part in it.
  - Sizes of ``with_known_sizes`` are those of every batch of that many rows.

Public: everything here; no example is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.core.tf_compat import tf

#: Most operations of such a value; values that models compute with have more.
_MOST_OPERATIONS = 64


class _NotStaticError(Exception):
    """A value is not known before the graph runs."""


def static_value(value: Any) -> Any:
    """Returns the value of a tensor of a graph as an array; None if it is not known.

    Args:
      value: Tensor of a graph that is pure (see ``core.step.pure_graph``).
    """
    found = tf.get_static_value(value)
    if found is not None:
        return found
    with tf.Graph().as_default() as graph:
        try:
            copy = _copied(value, graph, {})
            with tf.compat.v1.Session() as session:
                return session.run(copy)
        # An operation that calls a function, which this graph does not have.
        except (_NotStaticError, ValueError, tf.errors.OpError):
            return None


def with_known_sizes(
    graph: Any, inputs: Sequence[Any], num_rows: int = 16
) -> dict[str, Any]:
    """Returns copies of the operations of a graph, by name, for one size of the batch.

    TensorFlow infers from it sizes that it does not know for any batch.  There are no
    operations if they do not fit that size.

    Args:
      graph: Graph of a batch of unknown size.
      inputs: Placeholders of the columns, whose axis 0 is the batch.
      num_rows: Size of the batch.
    """
    definition = graph.as_graph_def(add_shapes=True)
    with tf.Graph().as_default() as copy:
        columns = {
            value.name: tf.compat.v1.placeholder(
                value.dtype, [num_rows, *value.shape[1:]]
            )
            for value in inputs
        }
        try:
            tf.graph_util.import_graph_def(definition, input_map=columns, name="")
        except ValueError:
            return {}
    return {op.name: op for op in copy.get_operations()}


def _copied(value: Any, graph: Any, copies: dict[str, Any]) -> Any:
    """Returns a tensor of ``graph`` that computes a value from constants.

    Args:
      value: Tensor of another graph.
      graph: Graph to which operations are added.
      copies: What was copied before, by name.

    Raises:
      _NotStaticError: it depends on more than constants, or on too many operations.
    """
    op, found = value.op, tf.get_static_value(value)
    if found is not None:
        return tf.constant(found, value.dtype)
    if op.op_def.is_stateful or not op.inputs or len(copies) >= _MOST_OPERATIONS:
        raise _NotStaticError
    if op.name not in copies:
        copies[op.name] = None  # counts
        inputs = [_copied(each, graph, copies) for each in op.inputs]
        dtypes = [each.dtype for each in op.outputs]
        attributes = dict(op.node_def.attr)
        copies[op.name] = graph.create_op(op.type, inputs, dtypes, attrs=attributes)
    return copies[op.name].outputs[value.value_index]
