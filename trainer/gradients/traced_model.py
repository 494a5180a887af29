"""Decides from a model's traced forward pass whether ghost clipping is exact.

Ghost clipping computes the gradients of Dense and Embedding layers from their inputs
and the derivatives at their outputs.  It is exact only if the model reads variables in
no other way, and if rows do not mix.  Both are decided on the traced graph of the
losses, not on the list of layers.  The graph shows a Lambda, an operation on
``layer.kernel``, a table that a layer holds unknown to Keras, and an overridden method.

Formal guarantees:
  - If ``ghost_obstacle`` returns None, every trainable variable is read in the forward
    pass by the affine part of exactly one intercepted call, and by nothing else; and
    the loss of an example depends on its own row alone (see ``row_independence``).
  - ``table_reads`` returns ids that depend on no variable.  Together with the first
    guarantee: a step reads no other rows of a table.

Public: everything but the ids.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from accounting.validation import InputError
from trainer.gradients.interception import intercepted_calls
from trainer.gradients.per_example import keep_rows, real_rows
from trainer.gradients.row_independence import obstacle as rows_obstacle
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import keras, tf

_T = TypeVar("_T")

#: Keras's activations that are computed for each row by itself.  Some have gradients in
#: Python, which a graph does not show.
_ACTIVATIONS = frozenset(
    getattr(keras.activations, name)
    for name in (
        "elu", "exponential", "gelu", "hard_sigmoid", "linear", "mish", "relu", "selu",
        "sigmoid", "softmax", "softplus", "softsign", "swish", "tanh",
    )
)  # fmt: skip


def _is_known_activation(function: Any) -> bool:
    """Whether ``function`` is None or an activation of Keras that keeps rows apart."""
    try:
        return function is None or function in _ACTIVATIONS
    except TypeError:  # not hashable, and so not in the set
        return False


def ghost_layers(model: TrainableModel) -> list[Any]:
    """Returns the Dense and Embedding layers with trainable weights, in order."""
    return [
        layer
        for layer in model.network._flatten_layers(include_self=False)
        if type(layer) in (keras.layers.Dense, keras.layers.Embedding)
        and layer.trainable_weights
    ]


def affine(layer: Any, inputs: Any) -> Any:
    """Returns the outputs of a layer before its activation, (batch, ..., size).

    Args:
      layer: Dense or Embedding layer.
      inputs: Values (batch, ..., in) of a Dense layer, or ids (batch, ...).
    """
    if type(layer) is keras.layers.Embedding:
        return tf.gather(layer.embeddings, table_ids(inputs))
    outputs = tf.tensordot(inputs, layer.kernel, 1)
    outputs.set_shape([*inputs.shape[:-1], layer.units])
    return tf.nn.bias_add(outputs, layer.bias) if layer.use_bias else outputs


def activate(layer: Any, values: Any) -> Any:
    """Returns the outputs of a layer after its activation.

    Args:
      layer: Dense or Embedding layer.
      values: Outputs before the activation, from ``affine``.
    """
    activation = getattr(layer, "activation", None)
    return activation(values) if activation is not None else values


def table_ids(inputs: Any) -> Any:
    """Returns the ids at which Keras's Embedding reads its table for these inputs."""
    known = inputs.dtype in (tf.int32, tf.int64)
    return inputs if known else tf.cast(inputs, tf.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trace:
    """The traced graph of a model's losses.

    Attributes:
      graph: The graph.
      losses: Losses, its output.
      rows: Placeholders of the columns.
      calls: Layer of each intercepted call, in order.
      opaque: For the name of each output that is computed row by row, the input.
      affine_ops: Names of the operations in affine parts.
      ids: Ids of each call of an Embedding, in order.
    """

    graph: Any
    losses: Any
    rows: list[Any]
    calls: list[Any]
    opaque: dict[str, Any]
    affine_ops: frozenset[str]
    ids: list[Any]


class _Tracer:
    """Records the calls of layers for a ``_Trace``."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.calls: list[Any] = []
        self.opaque: dict[str, Any] = {}
        self.affine_ops: set[str] = set()
        self.ids: list[Any] = []

    def call(self, layer: Any, inputs: Any) -> Any:
        """Calls a layer and records its operations.

        Args:
          layer: Dense or Embedding layer.
          inputs: Inputs of the layer, a tensor.

        Raises:
          InputError: the input is no tensor, or the call is in a loop or a branch.
        """
        if not isinstance(inputs, tf.Tensor):
            raise InputError(f"{layer.name} takes a {type(inputs).__name__}")
        graph = inputs.graph
        if graph is not self._graph:
            raise InputError(f"{layer.name} is called within a loop or a branch")
        self.calls.append(layer)
        if type(layer) is keras.layers.Embedding:
            self.ids.append(table_ids(inputs))
        before = len(graph.get_operations())
        values = affine(layer, inputs)
        self.affine_ops |= {op.name for op in graph.get_operations()[before:]}
        self.opaque[values.name] = inputs
        outputs = activate(layer, values)
        if _is_known_activation(getattr(layer, "activation", None)):
            self.opaque[outputs.name] = inputs
        return outputs


def _trace(model: TrainableModel) -> _Trace:
    tracers = []

    def losses(columns: Mapping[str, Any]) -> Any:
        tracers.append(_Tracer(tf.compat.v1.get_default_graph()))
        with intercepted_calls(ghost_layers(model), tracers[-1].call):
            return model.losses(columns)

    function = tf.function(losses, autograph=model.needs_autograph)
    graph = function.get_concrete_function(model.column_specs).graph
    (tracer,) = tracers
    return _Trace(
        graph=graph,
        losses=graph.structured_outputs,
        rows=column_placeholders(graph),
        calls=tracer.calls,
        opaque=tracer.opaque,
        affine_ops=frozenset(tracer.affine_ops),
        ids=tracer.ids,
    )


def column_placeholders(graph: Any) -> list[Any]:
    """Returns the inputs of a traced function, without captured tensors."""
    captured = {id(placeholder) for _, placeholder in graph.captures}
    return [value for value in graph.inputs if id(value) not in captured]


def once_per_trace(
    find: Callable[[TrainableModel], _T],
) -> Callable[[TrainableModel], _T]:
    """Caches ``find`` of the last ``trace_key`` of each network."""
    cache: weakref.WeakKeyDictionary[Any, tuple[Any, _T]] = weakref.WeakKeyDictionary()

    @functools.wraps(find)
    def cached(model: TrainableModel) -> _T:
        key = model.trace_key
        if model.network not in cache or cache[model.network][0] != key:
            cache[model.network] = key, find(model)
        return cache[model.network][1]

    return cached


@once_per_trace
def ghost_obstacle(model: TrainableModel) -> str | None:
    """Returns why ghost clipping would be wrong for a model; None if it is exact."""
    found = _weights_obstacle(model)
    if found is not None:
        return found
    try:
        trace = _trace(model)
    except InputError as error:
        return str(error)
    except Exception as error:  # of users' layers, for a batch of unknown size
        return f"it cannot be traced ({type(error).__name__})"
    return (
        _calls_obstacle(model, trace)
        or _reads_obstacle(model, trace)
        or rows_obstacle(
            trace.losses, trace.rows, trace.opaque, per_example=model.rows_per_example
        )
    )


def _weights_obstacle(model: TrainableModel) -> str | None:
    layers = ghost_layers(model)
    for layer in layers:
        if layer.compute_dtype != "float32" or layer.variable_dtype != "float32":
            return f"{layer.name} does not compute in float32"
        if getattr(layer, "sparse", False):
            return f"{layer.name} gives sparse tensors"
    held = [v.ref() for layer in layers for v in _affine_variables(layer)]
    if len(set(held)) < len(held):
        return "layers share a weight"
    for variable in model.variables:
        if variable.ref() not in held:
            return f"{variable.name} is neither of a Dense nor of an Embedding layer"
    return None if len(held) == len(model.variables) else "a layer is partly frozen"


def _affine_variables(layer: Any) -> list[Any]:
    """Returns the variables that ``affine`` reads."""
    if type(layer) is keras.layers.Embedding:
        return [layer.embeddings]
    return [layer.kernel, layer.bias] if layer.use_bias else [layer.kernel]


def _calls_obstacle(model: TrainableModel, trace: _Trace) -> str | None:
    for layer in ghost_layers(model):
        count = sum(called is layer for called in trace.calls)
        if count != 1:
            return f"{layer.name} is used {count} times"
    return None


def _reads_obstacle(model: TrainableModel, trace: _Trace) -> str | None:
    names = {id(v.handle): v.name for v in model.variables}
    for external, placeholder in trace.graph.captures:
        if id(external) not in names:
            continue
        for op in placeholder.consumers():
            if op.name not in trace.affine_ops:
                return f"{names[id(external)]} is also read by {op.name}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableReads:
    """Which rows of the embedding tables a physical batch reads.

    Attributes:
      tables: Variables of the Embedding layers.
      num_ids: Number of ids that one example has in each table.
      ids: (columns, weight) -> ids for each table, flat int32, with those of padding.
        Sensitive.
    """

    tables: tuple[Any, ...]
    num_ids: tuple[int, ...]
    ids: Callable[[Mapping[str, Any], Any], list[Any]]


def table_reads(model: TrainableModel) -> TableReads | None:
    """Returns the rows that a model without ``ghost_obstacle`` reads.

    None if it has no Embedding layer, if ids depend on weights or a lookup table, or if
    their number is not static.
    """
    trace = _trace(model)
    found = [x for x in trace.calls if type(x) is keras.layers.Embedding]
    of_row = [ids.shape[1:].num_elements() for ids in trace.ids]
    if not found or None in of_row or any(_reads_weights(trace, x) for x in trace.ids):
        return None

    def ids(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        return [
            tf.reshape(tf.cast(value, tf.int32), (-1,))
            for value in _ids_alone(model, keep_rows(columns, real))
        ]

    return TableReads(
        tables=tuple(layer.embeddings for layer in found),
        num_ids=tuple(model.rows_per_example * size for size in of_row),
        ids=ids,
    )


def _reads_weights(trace: _Trace, value: Any) -> bool:
    """Whether a tensor of the trace depends on a variable or a lookup table."""
    captured = {id(placeholder) for _, placeholder in trace.graph.captures}
    seen: set[str] = set()
    left = [value]
    while left:
        tensor = left.pop()
        if id(tensor) in captured and tensor.dtype == tf.resource:
            return True
        if tensor.op.name not in seen:
            seen.add(tensor.op.name)
            left += tensor.op.inputs
    return False


def _ids_alone(model: TrainableModel, columns: Mapping[str, Any]) -> list[Any]:
    """Returns the ids of all Embedding layers, without reading a weight."""
    ids = []

    def call(layer: Any, inputs: Any) -> Any:
        if type(layer) is keras.layers.Embedding:
            ids.append(table_ids(inputs))
            return _zeros(inputs, layer.output_dim)
        return activate(layer, _zeros(inputs[..., 0], layer.units))

    with intercepted_calls(ghost_layers(model), call):
        model.outputs(columns)
    return ids


def _zeros(like: Any, size: int) -> Any:
    """Returns zeros (*like.shape, size)."""
    zeros = tf.zeros(tf.concat([tf.shape(like), [size]], 0))
    zeros.set_shape([*like.shape, size])
    return zeros
