"""Products that a kernel of TensorFlow computes wrongly, and how they are avoided.

TensorFlow 2.21 with oneDNN, as on processors with AVX-512: ``BatchMatMulV2`` of values
(n, 1, m, k) with a matrix that is the same for all of them reads and writes beyond its
buffers.  Rows then hold what was left in memory, possibly of other rows: no clip makes
that private.  (12 values of 26 by 3 differ by up to 4e31, or the process crashes; tiny
ones, and values of other ranks, came out right.)

Formal guarantees:
  - A model of a batch that has such a product is not known to keep rows apart.
  - A product (1, m, k) of one example becomes such a product where examples are
    computed together; with one in its gradient they are computed one after the other.

Public: everything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PRODUCTS = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")


def reads_beyond(op: Any, *, rank: int = 4) -> bool:
    """Whether an operation is such a product.

    Args:
      op: Operation of a graph.
      rank: Rank of the values: 4 in a batch, 3 in the trace of a single example.
    """
    if op.type not in _PRODUCTS:
        return False
    values, matrix = (each.shape for each in op.inputs[:2])
    if values.rank is None or matrix.rank is None:
        return True
    same_for_all = all(size == 1 for size in matrix.as_list()[:-2])
    return same_for_all and values.rank == rank and values[rank - 3] in (None, 1)


def is_safe_together(graph: Any, columns: Sequence[Any]) -> bool:
    """Whether a single example's graph may be computed for several at a time.

    Args:
      graph: Graph of one example, whose batch axis is 1.
      columns: Placeholders of the example's columns.
    """
    of_example = {value.op.name for value in columns}
    for op in graph.get_operations():  # in the order of their creation
        found = [value.op.name in of_example for value in op.inputs]
        if any(found):
            of_example.add(op.name)
        if reads_beyond(op, rank=3) and not all(found[:2]):
            return False
    inner = graph.as_graph_def().library.function
    return not any(node.op in _PRODUCTS for each in inner for node in each.node_def)
