"""A part of a traced graph once more, with other values on the way.

Formal guarantees:
  - Nothing is executed twice for a side effect: operations that `row_independence`
    knows have none.
  - What does not follow from a changed outcome is used as it is.

Public: everything here; no example is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.gradients.operations.weight_uses import ancestors

#: A copy of an operation -> what is added to its outcome.
Change = Callable[[Any], Any]


def with_changes(
    result: Any, changes: Mapping[str, Change]
) -> tuple[Any, dict[str, Any]]:
    """Returns ``result`` for changed outcomes, and the copies of the operations.

    Args:
      result: Tensor of the graph that is made at the moment.
      changes: Name of an operation -> what is added to its only output.

    Returns:
      The tensor; and name of an operation of ``changes`` -> its copy, whose output is
      the one without the addition.
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
