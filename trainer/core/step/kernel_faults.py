"""Operations that TensorFlow computes wrongly, and how they are avoided.

TensorFlow 2.21 with oneDNN, as on processors with AVX-512: ``BatchMatMulV2`` of values
(n, 1, m, k) with a matrix that is the same for all of them reads and writes beyond its
buffers.  Rows then hold what was left in memory, possibly of other rows: no clip makes
that private.  (12 values of 26 by 3 differ by up to 4e31, or the process crashes; tiny
ones, and values of other ranks, came out right.)

``tf.vectorized_map`` computes the segments of all examples at once, each at an offset:
what an example adds to a segment beyond its last, which is an error of that example
alone, goes to the next example.  ``PadV2`` pads with zeros there, whatever was given.

Formal guarantees:
  - A model of a batch that has such a product is not known to keep rows apart.
  - A product (1, m, k) of one example becomes such a product where examples are
    computed together; with one in its gradient they are computed one after the other.
  - So are they with sums by segments, unless which ones is constant or, as in
    ``dense``, those beyond the last are dropped; and so are they with ``PadV2``.

Public: everything here; the gradients of ``dense`` are sensitive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.tf_compat import tf

#: Beginnings of the types of operations.
_PRODUCTS = ("BatchMatMul",)
_SEGMENTS = ("UnsortedSegment", "SparseSegment")


def reads_beyond(op: Any, *, rank: int = 4) -> bool:
    """Whether an operation is such a product.

    Args:
      op: Operation of a graph.
      rank: Rank of the values: 4 in a batch, 3 in the trace of a single example.
    """
    if not op.type.startswith(_PRODUCTS):
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
    of_example, varying = {value.op.name for value in columns}, set[str]()
    for op in graph.get_operations():  # in the order of their creation
        found = [value.op.name in of_example for value in op.inputs]
        if any(found):
            of_example.add(op.name)
        if op.type == "Placeholder" or any(x.op.name in varying for x in op.inputs):
            varying.add(op.name)
        if op.type == "PadV2" or (reads_beyond(op, rank=3) and not all(found[:2])):
            return False
        if op.type.startswith(_SEGMENTS) and not _stays_within(op, varying):
            return False
    inner = graph.as_graph_def().library.function
    wrong = (*_PRODUCTS, *_SEGMENTS, "PadV2")
    return not any(
        node.op.startswith(wrong) for each in inner for node in each.node_def
    )


def dense(gradient: Any, source: Any) -> Any:
    """Returns a gradient as a tensor; rows beyond those of its source are dropped.

    Args:
      gradient: Tensor or ``tf.IndexedSlices``.
      source: Variable or tensor whose gradient it is.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    values, ids, size = gradient.values, gradient.indices, source.shape[0]
    return tf.math.unsorted_segment_sum(values, tf.where(ids < size, ids, -1), size)


def _stays_within(op: Any, varying: set[str]) -> bool:
    """Whether sums are by constants, or drop segments beyond the last as ``dense``."""
    if not any(value.op.name in varying for value in op.inputs[1:]):
        return True
    chosen, size = op.inputs[1].op, tf.get_static_value(op.inputs[2])
    if op.type != "UnsortedSegmentSum" or chosen.type != "SelectV2" or size is None:
        return False
    below, ids, other = chosen.inputs
    less = below.op.type == "Less" and below.op.inputs[0] is ids
    limits = [tf.get_static_value(value) for value in (*below.op.inputs[1:], other)]
    return bool(less and limits == [size, -1])
