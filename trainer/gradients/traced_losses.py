"""Traces the losses of a model once, and puts copies of that graph where it runs.

A user's code runs once, for a batch of unknown size.  What is proven is proven of this
graph, and every step computes with a copy of it, operation by operation: no code runs
a second time that could give another graph.

Formal guarantees:
  - ``copy_into`` computes what the traced graph computes, for any number of rows.
  - The graph only computes its results (see ``core.step.pure_graph``).
  - In the copy, the gradient of a gather within rows drops the slope at an id that is
    out of range.  TensorFlow's own gradient takes it for an id of the row before or
    after.
  - ``static_value`` follows from constants and static shapes alone, through operations
    without a state: no variable, no column and no captured tensor has a part in it.
  - Sizes of ``with_known_sizes`` are those of every batch of that many rows.

Public: the graph.  Sensitive: columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.core.step.kernels import check_products
from trainer.core.step.pure_graph import check_pure, trace_eagerly
from trainer.core.tf_compat import tf
from trainer.model.trainable_model import TrainableModel

#: Name of the gradient of a gather within rows.
_WITHIN_ROWS = "dpsgd: values within rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedLosses:
    """The graph of a model's losses, for a batch of unknown size.

    Attributes:
      function: Concrete function, which keeps its graph alive.
      names: Names of the columns.
    """

    function: Any
    names: tuple[str, ...]

    @property
    def graph(self) -> Any:
        """The graph."""
        return self.function.graph

    @property
    def losses(self) -> Any:
        """The losses, (batch,)."""
        return self.graph.structured_outputs

    @property
    def columns(self) -> list[Any]:
        """Placeholders of the columns, in the order of ``names``."""
        return list(self.graph.inputs[: len(self.names)])


def trace(model: TrainableModel) -> TracedLosses:
    """Returns the graph of the losses of a model.

    Args:
      model: Model and its loss.

    Raises:
      InputError: the graph does more than compute losses, or TensorFlow computes one
        of its products wrongly.
      Exception: the code of the model or of its loss raised it.
    """

    def losses(columns: Mapping[str, Any]) -> Any:
        with model.unrolled():
            return model.losses(columns)

    specs = dict(sorted(model.column_specs.items()))
    concrete = trace_eagerly(losses, specs)
    check_pure(concrete.graph, "the model and its loss")
    traced = TracedLosses(function=concrete, names=tuple(specs))
    for num_rows in (1, 16):  # one by itself, as the probe computes some, and several
        check_products(
            with_known_sizes(traced.graph, traced.columns, num_rows).values()
        )
    return traced


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphCopy:
    """A copy of a traced graph within the graph that is being traced.

    Attributes:
      ops: Name of an operation of the traced graph -> its copy.
      inputs: Name of a placeholder of the traced graph -> what stands for it.
    """

    ops: Mapping[str, Any]
    inputs: Mapping[str, Any]

    def of(self, value: Any) -> Any:
        """Returns the copy of a tensor of the traced graph."""
        if value.name in self.inputs:
            return self.inputs[value.name]
        return self.ops[value.op.name].outputs[value.value_index]


def copy_into(
    traced: TracedLosses,
    columns: Mapping[str, Any],
    *,
    results: Sequence[Any] | None = None,
) -> GraphCopy:
    """Copies a traced graph into the graph that is being traced.

    Args:
      traced: The graph.
      columns: Columns by name, each (batch, ...).
      results: Tensors of the traced graph that are needed; None for all operations.
    """
    graph, here = traced.graph, tf.compat.v1.get_default_graph()
    definition = graph.as_graph_def()
    if results is not None:
        names = [value.op.name for value in results]
        definition = tf.compat.v1.graph_util.extract_sub_graph(definition, names)
    inputs = {
        value.name: columns[name]
        for name, value in zip(traced.names, traced.columns, strict=True)
    }
    inputs |= {inner.name: here.capture(outer) for outer, inner in graph.captures}
    for variable in graph.variables:
        here.watch_variable(variable)  # as if it were read here
    placeholders = {name.partition(":")[0] for name in inputs}
    kept = [node for node in definition.node if node.name not in placeholders]
    for node in kept:
        # The proof allows only a custom gradient that equals the gradient of its
        # operations; its code would differentiate the traced graph, not the copy.
        node.attr.pop("_gradient_op_type", None)
        node.attr.pop("_class", None)  # the place of a placeholder that is replaced
        if node.op == "GatherV2" and node.attr["batch_dims"].i:
            node.attr["_gradient_op_type"].s = _WITHIN_ROWS.encode()
    kept = _reading_rows(kept)
    read = {each.partition(":")[0] for node in kept for each in node.input}
    del definition.node[:]
    definition.node.extend(kept)
    copies = tf.graph_util.import_graph_def(
        definition,
        input_map={k: v for k, v in inputs.items() if k.partition(":")[0] in read},
        return_elements=[node.name for node in kept],
        name="losses",
    )
    names = [node.name for node in kept]
    return GraphCopy(ops=dict(zip(names, copies, strict=True)), inputs=inputs)


@tf.RegisterGradient(_WITHIN_ROWS)
def _of_values_within_rows(op: Any, slope: Any) -> tuple[Any, None, None]:
    """Returns the gradient of ``tf.gather``, whose axis follows its batch axes."""
    values, ids, axis = op.inputs
    size = tf.shape(values, ids.dtype)[axis]
    inside = tf.reshape(
        (ids >= 0) & (ids < size),
        tf.pad(tf.shape(ids), [[0, tf.rank(slope) - tf.rank(ids)]], constant_values=1),
    )
    read = tf.gather(
        values,
        tf.clip_by_value(ids, 0, size - 1),
        axis=axis,
        batch_dims=op.get_attr("batch_dims"),
    )
    (found,) = tf.gradients(read, [values], [tf.where(inside, slope, 0)])
    return found, None, None


def _reading_rows(nodes: Sequence[Any]) -> list[Any]:
    """Returns nodes that read only those rows of a table that are needed.

    ``GatherV2(ReadVariableOp(table), ids)`` becomes ``ResourceGather(table, ids)``.
    TensorFlow copies a variable whose rows are updated in place whenever all of it is
    read: tables of 78 million values made a step three times as long.

    Args:
      nodes: Nodes of a graph that is pure (see ``pure_graph``), changed in place.
    """
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        source = by_name.get(node.input[0].partition(":")[0]) if node.input else None
        if source is not None and _gathers_rows(node, source, by_name):
            node.op = "ResourceGather"
            node.input[:] = [source.input[0], node.input[1]]
            node.attr["dtype"].CopyFrom(node.attr.pop("Tparams"))
            del node.attr["Taxis"]
    return _without_unread(nodes)


def _gathers_rows(node: Any, source: Any, by_name: Mapping[str, Any]) -> bool:
    if (node.op, source.op, len(node.input)) != ("GatherV2", "ReadVariableOp", 3):
        return False
    axis = by_name.get(node.input[2].partition(":")[0])
    if axis is None or axis.op != "Const" or node.attr["batch_dims"].i:
        return False
    return not tf.make_ndarray(axis.attr["value"].tensor).any()


def _without_unread(nodes: Sequence[Any]) -> list[Any]:
    """Returns nodes without the reads of variables whose values none of them needs."""
    read = {each.partition(":")[0] for node in nodes for each in node.input}
    unread = {n.name for n in nodes if n.op == "ReadVariableOp" and n.name not in read}
    kept = [node for node in nodes if node.name not in unread]
    for node in kept:
        # Without an effect, an order among operations means nothing.
        node.input[:] = [x for x in node.input if x.lstrip("^") not in unread]
    return kept


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

    From this size TensorFlow infers others that it does not know for any batch.  The
    result is empty if the operations do not fit the size.

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
