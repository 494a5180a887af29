"""The variables and lookup tables that a traced step captures.

A step that is repeated after a kill is the same release if its graph is the same (see
``graph_digest``), if all that the graph only reads has the same values, and if all that
it writes was in the checkpoint.  Which is which is decided on the graph that runs, not
by what an optimizer or a model declares.

Formal guarantees:
  - ``written`` returns all variables on which the step has any operation but a read.
  - The digests of ``values`` cover the values of all captured variables and the entries
    of all captured tables; ``check_unchanged`` raises if one of them has changed.
  - Any other state is refused in one line: TensorFlow's random numbers, Python, files,
    tables that the step writes.
  - Both include the inner functions of loops, branches and calls.

Public: names and digests, of a model and an optimizer that are public.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.core.run import graph_digest
from trainer.core.step.pure_graph import (
    ASSERTIONS,
    OUTSIDE,
    TABLE_READS,
    VARIABLE_READS,
)
from trainer.core.tf_compat import tf

_LOOKUP = "LookupTableFindV2"


class CapturedState:
    """The state of one traced step.

    Args:
      function: ``ConcreteFunction`` of the step.

    Attributes:
      function: The same.

    Raises:
      InputError: the step has state that is in no variable.
    """

    def __init__(self, function: Any) -> None:
        self.function, graph = function, function.graph
        uses = _Uses(graph).by_capture
        variables = {id(one.handle): one for one in graph.variables}
        self._variables: list[tuple[Any, set[str]]] = []
        self._tables: list[tuple[Any, Any]] = []
        for handle, placeholder in graph.captures:
            nodes = uses[placeholder.op.name]
            kinds = {node.op for node in nodes}
            if id(handle) in variables:
                self._variables.append((variables[id(handle)], kinds))
            elif kinds <= TABLE_READS:
                lookups = [node for node in nodes if node.op == _LOOKUP]
                self._tables += [(handle, node.attr) for node in lookups[:1]]
            else:
                _refuse(min(kinds - TABLE_READS))

    def written(self, *, but: Iterable[Any]) -> list[Any]:
        """Returns the variables that the step may write, in the order of the trace.

        Args:
          but: Variables to leave out.
        """
        known = {variable.ref() for variable in but}
        return [
            variable
            for variable, kinds in self._variables
            if not kinds <= VARIABLE_READS and variable.ref() not in known
        ]

    def values(self, *, but: Iterable[Any]) -> list[list[str]]:
        """Returns [description, SHA-256] of each variable and table, as of now.

        Args:
          but: Variables to leave out.
        """
        known = {variable.ref() for variable in but}
        found = [
            [_describe(variable), graph_digest.digest_of_value(variable)]
            for variable, _ in self._variables
            if variable.ref() not in known
        ]
        return found + self.tables()

    def tables(self) -> list[list[str]]:
        """Returns [description, SHA-256] of each lookup table, as of now."""
        return [
            [f"lookup table {place}", _digest_of_table(handle, types)]
            for place, (handle, types) in enumerate(self._tables)
        ]

    def check_unchanged(self, before: Iterable[Sequence[str]], **but: Any) -> None:
        """Refuses values that code beside the step has changed.

        Args:
          before: Earlier result of ``values``.
          **but: As of ``values``.

        Raises:
          InputError: names the first one that differs.
        """
        for (name, then), (_, now) in zip(before, self.values(**but), strict=True):
            if then != now:
                raise InputError(
                    f"Expected the {name} of the step to hold what it held when the "
                    "run began; code such as a metric has changed it, and a run that "
                    "resumes would repeat steps without that change. Let the optimizer "
                    "have the variable, or leave it as it is."
                )


def _describe(variable: Any) -> str:
    name = variable.name.partition(":")[0]
    return f"variable {name} ({variable.dtype.name}, shape {tuple(variable.shape)})"


def _digest_of_table(handle: Any, types: Mapping[str, Any]) -> str:
    keys, values = tf.raw_ops.LookupTableExportV2(
        table_handle=handle, Tkeys=types["Tin"].type, Tvalues=types["Tout"].type
    )
    # The order of entries differs between processes.
    entries = zip(keys.numpy().tolist(), values.numpy().tolist(), strict=True)
    return hashlib.sha256(repr(sorted(entries)).encode()).hexdigest()


class _Uses:
    """The stateful operations on each captured resource, also in inner functions."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        definition = graph.as_graph_def()
        library = definition.library.function
        self._functions = {one.signature.name: one for one in library}
        self._seen: set[tuple[str, tuple[str | None, ...]]] = set()
        #: Name of a capture's placeholder -> nodes.
        self.by_capture: dict[str, list[Any]] = defaultdict(list)
        captured = (inner for _, inner in graph.captures)
        names = [one.op.name for one in captured if one.dtype == tf.resource]
        self._visit(definition.node, dict(zip(names, names, strict=True)))

    def _visit(self, nodes: Iterable[Any], captures: Mapping[str, str | None]) -> None:
        """Notes the uses in one body.

        Args:
          nodes: Nodes of the body.
          captures: Name of an argument of the body -> the capture that it is.
        """
        for node in nodes:
            data = [one.partition(":")[0] for one in node.input if one[0] != "^"]
            inputs = [captures.get(name) for name in data]
            called = [self._functions[name] for name in _called(node)]
            for function in called:
                # A branch takes all inputs but the condition.
                size = len(function.signature.input_arg)
                self._enter(function, inputs[len(inputs) - size :])
            if not called:
                self._note(node, inputs)

    def _enter(self, function: Any, inputs: Sequence[str | None]) -> None:
        signature = function.signature
        key = signature.name, tuple(inputs)
        if key not in self._seen:
            self._seen.add(key)
            names = [argument.name for argument in signature.input_arg]
            self._visit(function.node_def, dict(zip(names, inputs, strict=True)))

    def _note(self, node: Any, inputs: Sequence[str | None]) -> None:
        definition = self._graph.op_def_for_type(node.op)
        if node.op in ASSERTIONS or not (definition.is_stateful or node.op in OUTSIDE):
            return
        resource = tf.resource.as_datatype_enum
        arguments = zip(definition.input_arg, inputs, strict=False)
        found = [capture for one, capture in arguments if one.type == resource]
        captured = [capture for capture in found if capture is not None]
        # Other resources are made in the graph, or passed through it.
        if not found or len(captured) < len(found):
            _refuse(node.op)
        for capture in captured:
            self.by_capture[capture].append(node)


def _called(node: Any) -> list[str]:
    """Returns the names of the functions that a node calls."""
    found = []
    for value in node.attr.values():
        functions = [value.func] if value.HasField("func") else value.list.func
        found += [function.name for function in functions]
    return found


def _refuse(kind: str) -> None:
    raise InputError(
        f"Expected a step that can be repeated after a kill; its operation {kind} has "
        "state that no checkpoint holds. Keep state in a tf.Variable, and draw random "
        "numbers by tf.random.stateless_..., in an optimizer with its iterations as "
        "the seed."
    )
