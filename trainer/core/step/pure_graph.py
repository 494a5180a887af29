"""Refuses traced functions that write, draw, or keep state outside of their results.

A model's loss is a function of one example and of the weights.  A graph shows whether
that is true of the code behind it: an assignment, a random number, a queue, a hash
table that grows, and Python that TensorFlow calls back are operations of the graph,
also where no result depends on them, and also in the bodies of loops and branches.

Formal guarantees:
  - ``impurity`` finds every operation with a state of its own, in the whole graph and
    in all functions that it calls, except reads of variables and tables.  Since nothing
    in the graph writes, what is read is constant while the graph runs.
  - It finds operations that call Python or use files, which TensorFlow may take for
    stateless: a file may be another one in the next step, or when a step is repeated.
    It also finds operations that wait for other calls and take their rows together.
  - ``check_state`` finds the same in a step, except assignments of variables.
  - An assertion is allowed: it writes nothing.  If it fails it ends the run, as a
    division of integers by zero does.

Not found: state within a custom kernel that its author declared stateless.

``trace_eagerly`` traces a function once, before any step runs.

Public: graphs.  Sensitive: what they are called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accounting.core.validation import InputError
from trainer.core.step.kernels import row_by_row
from trainer.core.tf_compat import tf

#: Operations that read a variable.
VARIABLE_READS = frozenset(
    ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp",
     "VariableShape")
)  # fmt: skip

#: Beginnings of the types of operations that write a variable.
_VARIABLE_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")

#: Operations that read a lookup table.
TABLE_READS = frozenset(("LookupTableFindV2", "LookupTableSizeV2"))

#: Operations that end a run, and write nothing.
ASSERTIONS = frozenset(("Assert", "CheckNumerics"))

#: Operations that call Python, use files, run a graph that is given as text, or wait
#: for other calls.  TensorFlow calls some of them stateless.
OUTSIDE = frozenset(
    ("EagerPyFunc", "PyFunc", "PyFuncStateless", "MatchingFiles", "ReadFile",
     "DebugIdentity", "DebugNanCount", "DebugNumericSummary", "DecodeProtoV2",
     "EncodeProto", "DatasetFromGraph", "Batch", "BatchFunction", "Unbatch",
     "UnbatchGrad")
)  # fmt: skip

#: Operations that call functions, which are examined themselves.
_CALLS = frozenset(("Case", "If", "StatefulPartitionedCall", "While"))

_ALLOWED = VARIABLE_READS | TABLE_READS | ASSERTIONS | _CALLS

#: Parts of the names of operations -> what they do, in words, and a remedy.
_REASONS = (
    (
        ("PyFunc",),
        "calls Python, whose state no graph shows",
        "Use TensorFlow's operations instead of py_function and numpy_function.",
    ),
    (
        ("Random", "Multinomial", "StatefulUniform", "StatefulStandard", "RngRead"),
        "draws random numbers that do not follow from the secret of the run",
        "Use Keras's Dropout, or tf.random.stateless_... with the seed of --augment.",
    ),
)
_WRITES = (
    "has a state of its own, which one example could leave to the next without noise",
    "Remove what assigns, counts, prints, reads files or remembers; a layer may only "
    "read its variables.",
)


def check_pure(graph: Any, what: str) -> None:
    """Checks that a traced function only computes its results.

    Args:
      graph: Graph of a traced function.
      what: The function, in words.

    Raises:
      InputError: an operation has a state of its own, or calls Python.
    """
    found = impurity(graph)
    if found is not None:
        raise InputError(f"Expected {what} to be a function of its inputs; {found}")


def impurity(graph: Any) -> str | None:
    """Returns which operation is more than a function, and a remedy; None without one.

    Args:
      graph: Graph of a traced function.
    """
    for kind, name in _operations(graph):
        if kind in OUTSIDE or _has_state(graph, kind):
            why, remedy = next(
                (found for parts, *found in _REASONS if any(x in kind for x in parts)),
                _WRITES,
            )
            return f"{kind} ({name}) {why}. {remedy}"
    return None


def variables_read(graph: Any) -> list[Any]:
    """Returns the variables that a traced function reads, in the order of its reads.

    ``graph.variables`` has the order of their addresses, another one in each process.

    Args:
      graph: Graph of a traced function.
    """
    places = {id(handle): place for place, (handle, _) in enumerate(graph.captures)}
    found = [one for one in graph.variables if id(one.handle) in places]
    return sorted(found, key=lambda one: places[id(one.handle)])


def check_state(graph: Any) -> None:
    """Checks that a traced step keeps its state in variables alone.

    Args:
      graph: Graph of a traced step, which may assign variables.

    Raises:
      InputError: an operation has other state, which no checkpoint holds.
    """
    for kind, name in _operations(graph):
        if kind in OUTSIDE or (
            _has_state(graph, kind) and not kind.startswith(_VARIABLE_WRITES)
        ):
            raise InputError(
                "Expected a step whose state is in variables, which a checkpoint "
                f"holds; {kind} ({name}) has state elsewhere. Keep it in a "
                "tf.Variable, and draw random numbers by tf.random.stateless_..., in "
                "an optimizer with its iterations as the seed."
            )


def _operations(graph: Any) -> Iterator[tuple[str, str]]:
    """Yields type and name of all operations, also of functions that are called."""
    for op in graph.get_operations():
        yield op.type, op.name
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            yield node.op, node.name


def _has_state(graph: Any, kind: str) -> bool:
    if kind in _ALLOWED or graph._is_function(kind):
        return False
    return bool(graph.op_def_for_type(kind).is_stateful)


#: (columns, weight) -> tensors.
_OfBatch = Callable[[Mapping[str, Any], Any], list[Any]]


def check_eager() -> None:
    """Checks that no function is being traced.

    Raises:
      RuntimeError: a function is being traced.  Its tensors would be captured, and a
        gradient tape within ``tf.init_scope`` records nothing.
    """
    if not tf.executing_eagerly():
        raise RuntimeError("Expected a gradient sum to be made outside of tf.function.")


def trace_eagerly(function: Callable[..., Any], specs: Any) -> Any:
    """Returns the concrete function of the only trace of a function.

    Args:
      function: Function of nested tensors.
      specs: Shapes and types of the tensors.

    Raises:
      RuntimeError: as for `check_eager`.
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
