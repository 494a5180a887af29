"""Operations that TensorFlow computes wrongly, and how they are avoided.

TensorFlow 2.21 with oneDNN, as on processors with AVX-512: ``BatchMatMulV2`` of values
(n, 1, m, k), n > 1, with a matrix that is the same for all of them reads and writes
beyond its buffers.  Rows then hold what was left in memory, possibly of other rows: no
clip makes that private.  (12 values of 26 by 3 differ by up to 4e31, or the process
crashes; tiny ones, n = 1 and values of other ranks came out right.)

``tf.vectorized_map`` computes the segments of all examples at once, each at an offset:
what an example adds to a segment beyond its last, which is an error of that example
alone, goes to the next example.  ``Roll`` along axis -1 moves values from each example
to the next, and ``PadV2`` pads with zeros, whatever was given.  A ``Slice`` to the end
from a place of the example's own is as long as that of the other example with the most.

Not wrong, but in bits that tell the place of a row in its batch: powers and others of
values that are broadcast, and cross entropy with shares of classes, which TensorFlow
computes by tiles that end within rows; and sums (see ``row_sums``).

Formal guarantees:
  - ``check_products`` finds every such product of a graph, before it is computed.
  - A product (1, m, k) of one example becomes such a product where examples are
    computed together; with one in its gradient they are computed one after the other.
  - So are they with sums by segments and with slices, unless which ones is constant or,
    as in ``dense``, segments beyond the last are dropped.
  - So are they with any operation that is not in ``KNOWN``: tests compare those with
    each example alone, by random calls or in models.

Public: everything here; the gradients of ``dense`` are sensitive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.core.step.row_sums import is_row_by_row
from trainer.core.tf_compat import tf

#: Beginnings of the types of operations.
_PRODUCTS = ("BatchMatMul",)
_CHOICES = ("Slice", "UnsortedSegment", "SparseSegment")
#: Operations that ``tf.vectorized_map`` computes for each example as for one alone.
KNOWN = frozenset("""
    Abs Acos Acosh AddN AddV2 All Any ArgMax ArgMin AsString Asin Asinh Atan Atanh
    AvgPool AvgPoolGrad BatchMatMulV2 BatchToSpaceND BiasAdd BiasAddGrad BitwiseAnd
    BitwiseOr BitwiseXor BroadcastTo Bucketize Cast Ceil ClipByValue ConcatV2 Conv2D
    Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2
    Conv3DBackpropInputV2 Cos Cosh Cumprod Cumsum DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Digamma
    DivNoNan Einsum Elu EluGrad Equal Erf Erfc Exp ExpandDims Expm1 Floor FloorDiv
    FloorMod GatherV2 Greater GreaterEqual Identity IdentityN IsFinite IsInf IsNan
    L2Loss LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p LogSoftmax
    LogicalAnd LogicalNot LogicalOr LookupTableFindV2 MatMul Max MaxPool MaxPoolGrad
    Maximum Mean Min Minimum MirrorPad MirrorPadGrad Mul Neg NotEqual OneHot OnesLike
    Pack Pad Prod Rank RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad
    Reshape ResizeBilinear ReverseV2 RightShift Round Rsqrt RsqrtGrad Select SelectV2
    Selu SeluGrad Shape ShapeN Sigmoid SigmoidGrad Sign Sin Sinh Size Softmax Softplus
    SoftplusGrad Softsign SoftsignGrad SpaceToBatchND
    SparseSoftmaxCrossEntropyWithLogits Split Sqrt SqrtGrad Square SquaredDifference
    Squeeze StopGradient StridedSlice StridedSliceGrad StringToHashBucketFast
    StringToHashBucketStrong Sub Sum Tan Tanh TanhGrad Tile TopKV2 Transpose Unpack
    ZerosLike
    """.split())  # noqa: SIM905  # fmt: skip


def check_products(operations: Iterable[Any]) -> None:
    """Checks that a graph has no product that reads and writes beyond its buffers.

    Args:
      operations: Operations of a graph that is to be computed as it is.

    Raises:
      InputError: it has one.
    """
    for op in operations:
        if _has_one_matrix(op, rank=4) and op.inputs[0].shape[0] != 1:
            raise InputError(
                "Expected no product of values (n, 1, m, k), n > 1, with one matrix, "
                f"which may end the process where TensorFlow uses oneDNN; {op.name} is "
                "one, in a batch or for one row. Reshape its values to (-1, m, k), and "
                "the product back."
            )


def _has_one_matrix(op: Any, *, rank: int) -> bool:
    """Whether an operation is a product (..., 1, m, k) of this rank with one matrix."""
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
        if op.type == "Placeholder" or any(x.op.name in varying for x in op.inputs):
            varying.add(op.name)
        if _has_one_matrix(op, rank=3) and not all(found[:2]):
            return False
        if any(found):  # others are not converted
            of_example.add(op.name)
            if op.type not in KNOWN and not _stays_within(op, varying):
                return False
            if not is_row_by_row(op):
                return False
    return True


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
    """Whether choices are constant, or drop segments beyond the last as ``dense``."""
    if not op.type.startswith(_CHOICES):
        return False
    if not any(value.op.name in varying for value in op.inputs[1:]):
        return True
    chosen, size = op.inputs[1].op, tf.get_static_value(op.inputs[2])
    if op.type != "UnsortedSegmentSum" or chosen.type != "SelectV2" or size is None:
        return False
    below, ids, other = chosen.inputs
    less = below.op.type == "Less" and below.op.inputs[0] is ids
    limits = [tf.get_static_value(value) for value in (*below.op.inputs[1:], other)]
    return bool(less and limits == [size, -1])
