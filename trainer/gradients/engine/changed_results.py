"""Computes a result again, with changed intermediate results.

Formal guarantees:
  - No side effect occurs twice: the traced graph has none (see ``traced_losses``).
  - Results that do not depend on a change are used as they are.

Public: everything here; no example is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.gradients.engine.weight_uses import ancestors

#: Copy of an operation -> what is added to its result.
Change = Callable[[Any], Any]


def with_changes(
    result: Any, changes: Mapping[str, Change]
) -> tuple[Any, dict[str, Any]]:
    """Returns a tensor of a graph, computed with changed intermediate results.

    Args:
      result: Tensor of the graph that is being traced.
      changes: For the name of an operation of one output, the change of its result.

    Returns:
      The tensor; and for each name in ``changes`` the copy of the operation, whose
      output is the result before the addition.
    """
    graph, live = result.graph, ancestors(result)
    others: dict[str, Any] = {}
    copies: dict[str, Any] = {}
    for op in [op for op in graph.get_operations() if op.name in live]:
        if op.name not in changes and not any(v.name in others for v in op.inputs):
            continue
        copy = _copy(op, [others.get(value.name, value) for value in op.inputs])
        outputs = list(copy.outputs)
        if op.name in changes:
            copies[op.name] = copy
            outputs = [outputs[0] + changes[op.name](copy)]
        others |= {v.name: new for v, new in zip(op.outputs, outputs, strict=True)}
    return others.get(result.name, result), copies


def _copy(op: Any, inputs: list[Any]) -> Any:
    return op.graph.create_op(
        op.type,
        inputs,
        [value.dtype for value in op.outputs],
        attrs=dict(op.node_def.attr),
        name=f"{op.name}/moved",
    )
