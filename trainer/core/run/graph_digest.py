"""A digest of the computation of a traced TensorFlow function.

The digest of a node covers its operation, its attributes and the digests of its inputs.
It depends neither on names, which contain counters of the process, nor on the order of
independent nodes.

Formal guarantees:
  - Functions of equal digest execute the same operations on the same constants and
    variables (by name), with the same dependences.  The digest covers operations,
    attributes, captured values, and the inner functions of loops and branches; it does
    not cover the code of a ``tf.py_function``, entries of lookup tables, devices,
    settings of the process and values of variables.
  - The same trace has the same digest in every process.

Public: the digest, of a model that is public.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trainer.core.tf_compat import tf

#: Attributes that hold names, which differ between processes, and compute nothing.
_NAMES = (
    "api_implements", "config_proto", "container", "shared_name", "token",
    "_class", "_gradient_op_type",
)  # fmt: skip


def digest(function: Any) -> str:
    """Returns the SHA-256 of a ``ConcreteFunction``'s computation."""
    graph = function.graph
    definition = graph.as_graph_def()
    inner = _Inner({one.signature.name: one for one in definition.library.function})
    arguments = {tensor.op.name: i for i, tensor in enumerate(graph.inputs)}
    nodes = _Nodes(definition.node, arguments, inner)
    variables = {id(variable.handle): variable.name for variable in graph.variables}
    captured = [
        variables.get(id(tensor)) or _captured(tensor)
        for tensor in function.captured_inputs
    ]
    outputs = [nodes.of_input(tensor.name) for tensor in graph.outputs]
    return _hash("function", nodes.all(), outputs, captured)


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _captured(tensor: Any) -> str:
    if tensor.dtype in (tf.resource, tf.variant):
        return str(tensor.dtype.name)
    return digest_of_value(tensor)


def digest_of_value(tensor: Any) -> str:
    """Returns the SHA-256 of a value, with its type and shape.

    Args:
      tensor: Eager tensor or variable.
    """
    array = np.asarray(tensor.numpy())
    # An array of strings holds their addresses.
    data = array.tolist() if tensor.dtype == tf.string else array.tobytes()
    return _hash(tensor.dtype.name, tuple(tensor.shape), data)


class _Inner:
    """The functions that the nodes of a graph call, by name."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._known: dict[str, str] = {}

    def digest(self, name: str) -> str:
        # Ends the recursion of a function that calls itself.
        if name not in self._known:
            self._known[name] = "itself"
            self._known[name] = self._compute(self._definitions[name])
        return self._known[name]

    def _compute(self, definition: Any) -> str:
        signature = definition.signature
        arguments = {arg.name: i for i, arg in enumerate(signature.input_arg)}
        nodes = _Nodes(definition.node_def, arguments, self)
        results = [nodes.of_input(definition.ret[o.name]) for o in signature.output_arg]
        return _hash("inner", nodes.all(), results)


class _Nodes:
    """The nodes of one graph or inner function."""

    def __init__(
        self, nodes: Iterable[Any], arguments: Mapping[str, int], inner: _Inner
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._inner = inner
        self._known = {name: f"argument {i}" for name, i in arguments.items()}

    def all(self) -> list[str]:
        """Returns the digests of all nodes, since some have only side effects."""
        return sorted(self._digest(name) for name in self._nodes)

    def of_input(self, text: str) -> str:
        """Digests an input: "node", "node:2", "node:output:0" or "^node"."""
        name, _, output = text.removeprefix("^").partition(":")
        # The name of the first output may be omitted.
        return _hash(text[:1] == "^", self._digest(name), output or "0")

    def _digest(self, name: str) -> str:
        # No recursion: a chain of nodes may be longer than Python's stack.
        waiting = [name]
        while waiting:
            if waiting[-1] in self._known:
                waiting.pop()
                continue
            node = self._nodes[waiting[-1]]
            names = (one.removeprefix("^").partition(":")[0] for one in node.input)
            unknown = [one for one in names if one not in self._known]
            if unknown:
                waiting += unknown
            else:
                self._known[node.name] = self._compute(node)
        return self._known[name]

    def _compute(self, node: Any) -> str:
        data = [self.of_input(one) for one in node.input if one[0] != "^"]
        control = sorted(self.of_input(one) for one in node.input if one[0] == "^")
        attributes = [
            (key, self._attribute(node.attr[key]))
            for key in sorted(node.attr)
            if key not in _NAMES
        ]
        return _hash(node.op, data, control, attributes)

    def _attribute(self, value: Any) -> str:
        kind = value.WhichOneof("value")
        functions = [value.func] if kind == "func" else value.list.func
        if functions:
            return _hash(*(self._inner.digest(one.name) for one in functions))
        return _hash(value.SerializeToString(deterministic=True))
