"""TensorFlow's kernels that would mix rows of a batch, or tell a row's place in it.

Sums.  TensorFlow lays all rows end to end, and adds up several numbers at a time (a
packet).  In three cases the place of a row decides in which order its numbers are
added:

  - An axis that remains follows one that is summed: some packets lie in two rows.
  - A row is long (from 8,192 values of float32 on, with packets of 8): the kernel
    halves it again and again, at places that begin a packet of the whole batch.
    Kernels that sum inside, as of log-softmax, do the same.
  - The softmax of TensorFlow without oneDNN: its packets end within rows of any length.

Where the number of values of each row is a multiple of 16, which packets divide, each
row begins with a packet, and none of the three is left.

Formal guarantees of sums:
  - In what ``row_by_row`` traces, axes of a sum, mean or product come last, unless the
    last axis remains and is a multiple of 16.  Where the size of a row is known, long
    rows of sums, and all rows of a softmax, are filled up to a multiple of 16 with what
    adds nothing.
  - ``is_row_by_row`` finds all others in a graph, such as those of ``tf.raw_ops``, and
    those of unknown size: examples with one of them are computed one after the other,
    each as the only one of its batch.

Wrong results.  TensorFlow 2.21 with oneDNN, as on processors with AVX-512:
``BatchMatMulV2`` of values (n, 1, m, k), n > 1, with a matrix that is the same for all
of them reads and writes beyond its buffers.  Rows then hold what was left in memory,
possibly of other rows: no clip makes that private.  (12 values of 26 by 3 differ by up
to 4e31, or the process crashes; tiny ones, n = 1 and values of other ranks came out
right.)

``tf.vectorized_map`` computes the segments of all examples at once, each at an offset:
what an example adds to a segment beyond its last, which is an error of that example
alone, goes to the next example.  ``Roll`` along axis -1 moves values from each example
to the next, and ``PadV2`` pads with zeros, whatever was given.  A ``Slice`` to the end
from a place of the example's own is as long as that of the other example with the most.

Last bits.  The results of some operations are right, but their last bits tell the place
of a row in its batch: powers and similar operations on values that are broadcast, and
cross entropy with shares of classes, which TensorFlow computes by tiles that end within
rows.

Formal guarantees about these operations:
  - ``check_products`` finds every wrong product of a graph, before it is computed.
  - Examples are computed one after the other if their gradient has a product (1, m, k),
    which would become a wrong product if examples were computed together.
  - Examples are computed one after the other if there are sums by segments, or slices,
    unless their places are constant or, as in ``dense``, segments beyond the last are
    dropped.
  - Examples are computed one after the other if there is an operation that is not in
    ``KNOWN``: tests compare those in it with each example alone, by random calls or in
    models.

Public: graphs; the gradients of ``dense`` are sensitive.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from accounting.core.validation import InputError
from trainer.core.tf_compat import gen_math_ops, gen_nn_ops, tf

#: Every size of a packet divides it.
_MULTIPLE = 16

#: No kernel halves rows of at most as many values: it leaves 1,024 packets whole, each
#: of 4 values of float32 or more; at least 512 values of other types.
_SHORT_FLOAT32, _SHORT = 4096, 512

_SUMS = ("Sum", "Mean", "Prod")

#: Kernels that sum along the last axis of their first input.
_SPARSE = "SparseSoftmaxCrossEntropyWithLogits"
_LAST_AXIS = ("Softmax", "LogSoftmax", _SPARSE)


def is_row_by_row(op: Any) -> bool:
    """Whether an operation of a graph is no sum whose bits may tell a row's place.

    Args:
      op: Operation of a graph of a batch, or of one example.
    """
    if op.type not in _SUMS + _LAST_AXIS or _is_exact(op.inputs[0]):
        return True
    value = op.inputs[0]
    try:
        kept, summed = _axes(value, op.inputs[1] if op.type in _SUMS else -1)
    except ValueError:
        return False
    length = _length(value, summed)
    known = length is not None and _is_whole(value, length, op.type)
    return known and _come_last(value, kept, summed)


def _is_exact(value: Any) -> bool:
    """Whether numbers add up to the same in any order, as integers do."""
    return not (value.dtype.is_floating or value.dtype.is_complex)


def _axes(value: Any, axis: Any) -> tuple[list[int], list[int]]:
    """Returns the axes that remain and those that are summed.

    Raises:
      ValueError: the axes, or the number of axes, are not known.
    """
    rank, axes = value.shape.rank, tf.get_static_value(axis)
    if rank is None or axes is None:
        raise ValueError
    summed = sorted({one % rank for one in np.ravel(axes).tolist()})
    return [one for one in range(rank) if one not in summed], summed


def _come_last(value: Any, kept: Sequence[int], summed: Sequence[int]) -> bool:
    """Whether no packet of a sum lies in two rows."""
    behind = [one for one in kept if one > min(summed, default=value.shape.rank)]
    if behind[-1:] == [value.shape.rank - 1] and not (value.shape[-1] or 1) % _MULTIPLE:
        return True
    return all(value.shape[one] == 1 for one in behind)


def _length(value: Any, summed: Sequence[int]) -> int | None:
    """Returns the number of values of a row of a sum; None if it is not known."""
    sizes = [value.shape[one] for one in summed]
    return None if None in sizes else math.prod(sizes)


def _is_whole(value: Any, length: int, kind: str = "") -> bool:
    """Whether a row has few values, or a multiple of packets."""
    short = _SHORT_FLOAT32 if value.dtype == tf.float32 else _SHORT
    return length % _MULTIPLE == 0 or length <= (1 if kind == "Softmax" else short)


# -- what is traced ----------------------------------------------------------------


def _sum_rows(
    kind: str, input: Any, axis: Any, keep_dims: bool = False, name: Any = None
) -> Any:
    """Returns a sum, mean or product, row by row where its sizes are known."""
    kernel, value = _KERNELS[kind], tf.convert_to_tensor(input)
    try:
        kept, summed = _axes(value, axis)
    except ValueError:
        return kernel(value, axis, keep_dims, name)
    last, length = _come_last(value, kept, summed), _length(value, summed)
    fills = kind != "Prod" and length is not None and not _is_whole(value, length)
    if _is_exact(value) or (last and not fills):
        return kernel(value, axis, keep_dims, name)
    if not last:
        value = tf.transpose(value, kept + summed)
    over = summed if last else list(range(len(kept), value.shape.rank))
    if fills:
        result = _KERNELS["Sum"](_filled(value, over), over, False, name)
        result = result / length if kind == "Mean" else result
    else:
        result = kernel(value, over, False, name)
    for one in summed if keep_dims else ():
        result = tf.expand_dims(result, one)
    return result


def _softmax(kind: str, logits: Any, name: Any = None) -> Any:
    """Returns a softmax or its logarithm, row by row where its size is known."""
    value = tf.convert_to_tensor(logits)
    classes = _classes_to_fill(value, kind)
    if classes is None:
        return _KERNELS[kind](value, name)
    return _KERNELS[kind](_with_more_classes(value), name)[..., :classes]


def _cross_entropy(kind: str, features: Any, labels: Any, name: Any = None) -> Any:
    """Returns sparse cross entropies and their derivatives, as ``_softmax``."""
    value, labels = map(tf.convert_to_tensor, (features, labels))
    classes = _classes_to_fill(value, kind)
    if classes is None:
        return _KERNELS[kind](value, labels, name)
    labels = tf.where(labels < classes, labels, -1)  # others stay an error
    losses, slopes = _KERNELS[kind](_with_more_classes(value), labels, name)
    return losses, slopes[..., :classes]


def _classes_to_fill(value: Any, kind: str) -> int | None:
    """Returns the number of classes; None if it may stay, or is not known."""
    classes: int | None = value.shape[-1] if value.shape.rank else None
    return None if classes is None or _is_whole(value, classes, kind) else classes


def _with_more_classes(logits: Any) -> Any:
    """Returns logits of a multiple of classes, of which the new ones have no share."""
    value = _filled(logits, [len(logits.shape) - 1])
    new = np.arange(value.shape[-1]) >= logits.shape[-1]
    # Added: tf.vectorized_map would pad with zeros, whatever is given.
    return value + tf.constant(np.where(new, -np.inf, 0.0), value.dtype)


def _filled(value: Any, axes: Sequence[int]) -> Any:
    """Returns values with zeros at the end of the longest axis, up to a multiple."""
    longest = max(axes, key=lambda one: int(value.shape[one]))
    more = [[0, 0] for _ in value.shape]
    more[longest][1] = -value.shape[longest] % _MULTIPLE
    return tf.pad(value, more)


_KERNELS: dict[str, Any] = {
    "Sum": gen_math_ops._sum,
    "Mean": gen_math_ops.mean,
    "Prod": gen_math_ops.prod,
    "Softmax": gen_nn_ops.softmax,
    "LogSoftmax": gen_nn_ops.log_softmax,
    _SPARSE: gen_nn_ops.sparse_softmax_cross_entropy_with_logits,
}
_MATH: dict[str, Any] = {
    "_sum": functools.partial(_sum_rows, "Sum"),
    "mean": functools.partial(_sum_rows, "Mean"),
    "prod": functools.partial(_sum_rows, "Prod"),
}
_NN: dict[str, Any] = {
    "softmax": functools.partial(_softmax, "Softmax"),
    "log_softmax": functools.partial(_softmax, "LogSoftmax"),
    "sparse_softmax_cross_entropy_with_logits": functools.partial(
        _cross_entropy, _SPARSE
    ),
}
_tracing = threading.RLock()


def row_by_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function to trace, whose sums within a row do not tell its place.

    Args:
      function: Function of tensors.
    """

    @functools.wraps(function)
    def traced(*values: Any, **more: Any) -> Any:
        with (
            _tracing,
            mock.patch.multiple(gen_math_ops, **_MATH),
            mock.patch.multiple(gen_nn_ops, **_NN),
        ):
            return function(*values, **more)

    return traced


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
      InputError: the graph has such a product.
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
