"""Per-example gradients of a piece of a weight, from the operations that use it.

    use                          gradient of an example with respect to the piece
    ---                          ------------------------------------------------
    x W                          sum over positions of x^T d
    table[ids]                   for each row, the sum of d where it is read
    v + w,  v - w,  v * w        d, -d, d * v, summed over the axes of broadcasting
    convolution                  sum over places of patch^T d
    einsum                       einsum of x and d to the indices of the weight

where ``d`` is the derivative of the example's loss with respect to the result.  The
gradients of several uses of a piece, as in the steps of a recurrent cell, are added.

Formal guarantees: those of ``gradient_parts``.

Sensitive: everything here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from trainer.core.tf_compat import tf
from trainer.gradients.engine.gradient_parts import (
    FormedGradients,
    OuterProducts,
    Part,
    TableRows,
)
from trainer.gradients.engine.weight_uses import Piece, Use, einsum_letters

PRODUCTS, TABLE, OTHER = "products", "table", "other"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """Gradients from one use.

    Attributes:
      rows: Tensors (batch, ...) from which the gradients are computed.
      form: Maps ``rows`` of some examples to their gradients, (examples, *shape of the
        piece).
      work: Number of values per example that ``form`` holds besides its result.
      kind: ``PRODUCTS`` if ``rows`` are the inputs of ``OuterProducts``, ``TABLE`` if
        they are ids and d, otherwise ``OTHER``.
    """

    rows: tuple[Any, ...]
    form: Callable[[tuple[Any, ...]], Any]
    work: int = 0
    kind: str = OTHER


def part_of(piece: Piece, slopes: Sequence[Any], num_rows: int) -> Part:
    """Returns the gradients of the examples with respect to a piece.

    Args:
      piece: Piece of the graph that is being traced.
      slopes: Derivative of the losses with respect to the result of each use.
      num_rows: Number of examples of the batch.
    """
    terms = [
        term_of(use, piece.shape, slope, num_rows)
        for use, slope in zip(piece.uses, slopes, strict=True)
    ]
    (kind, *others) = {term.kind for term in terms}
    if not others and kind == PRODUCTS:
        return OuterProducts(*joined_rows(terms))
    if not others and kind == TABLE:
        return TableRows(*joined_rows(terms), piece.shape)
    return _formed(terms, piece.shape)


def term_of(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    """Returns the gradients from one use.

    Args:
      use: Use in the graph that is being traced.
      shape: Shape of the piece.
      slope: Derivative of the losses with respect to the result.
      num_rows: Number of examples of the batch.
    """
    return _TERMS[use.op.type](use, shape, slope, num_rows)


def joined_rows(terms: Sequence[Term]) -> tuple[Any, Any]:
    """Returns the two ``rows`` of all terms, each concatenated along the positions."""
    first, second = (tf.concat([term.rows[i] for term in terms], 1) for i in range(2))
    return first, second


def _formed(terms: Sequence[Term], shape: tuple[int, ...]) -> FormedGradients:
    def form(rows: Any) -> list[Any]:
        found = [term.form(each) for term, each in zip(terms, rows, strict=True)]
        return [tf.add_n(found)]

    work = sum(term.work for term in terms)
    return FormedGradients(
        form, tuple(term.rows for term in terms), shapes=[shape], work=work
    )


def split_examples(value: Any, num_rows: int) -> Any:
    """Returns ``value`` shaped (num_rows, m, ...).

    Args:
      value: Tensor (num_rows * m, ...) of static shape.
      num_rows: Number of examples of the batch.
    """
    entries = value.shape[0]
    return tf.reshape(value, (num_rows, entries // num_rows, *value.shape[1:]))


def flat_positions(value: Any, num_rows: int) -> Any:
    """Returns ``value`` shaped (num_rows, positions, size).

    Args:
      value: Tensor (num_rows * m, ..., size) of static shape.
      num_rows: Number of examples of the batch.
    """
    size = value.shape[-1]
    count = math.prod(value.shape.as_list()) // max(1, num_rows * size)
    return tf.reshape(value, (num_rows, count, size))


def is_transposed(use: Use) -> bool:
    """Whether a matrix product takes the transpose of the piece."""
    names = ("transpose_b", "adj_y")
    return any(use.op.get_attr(n) for n in names if n in use.op.node_def.attr)


def _product(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    x, d = (flat_positions(value, num_rows) for value in (use.other, slope))
    rows = (d, x) if is_transposed(use) else (x, d)
    return Term(
        rows=rows,
        form=lambda rows: tf.matmul(rows[0], rows[1], transpose_a=True),
        kind=PRODUCTS,
    )


def _table(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    ids = tf.reshape(use.op.inputs[1], (num_rows, -1))

    def form(rows: tuple[Any, ...]) -> Any:
        read = tf.one_hot(rows[0], shape[0], dtype=rows[1].dtype)
        return tf.matmul(read, rows[1], transpose_a=True)

    return Term(
        rows=(ids, flat_positions(slope, num_rows)),
        form=form,
        work=ids.shape[1] * shape[0],
        kind=TABLE,
    )


def broadcast_sizes(result: Any, shape: Sequence[int]) -> list[int]:
    """Returns the sizes of a piece along all axes of a result but the first.

    Args:
      result: Result of a broadcast operation on the piece and rows.
      shape: Shape of the piece.
    """
    rank = len(result.shape) - 1
    sizes = [1] * rank + list(shape)
    return sizes[len(sizes) - rank :]


def _broadcast(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    if use.op.type == "Mul":
        slope = slope * use.other
    elif use.op.type == "Sub" and use.place == 1:
        slope = -slope
    inner, sizes = slope.shape[1:].as_list(), broadcast_sizes(slope, shape)
    repeated = [i for i, size in enumerate(sizes) if size == 1 and inner[i] != 1]

    def form(rows: tuple[Any, ...]) -> Any:
        axes = [1, *(axis + 2 for axis in repeated)]
        # TensorFlow copies the values for a sum over one place.
        summed = [axis for axis in axes if rows[0].shape[axis] != 1]
        found = tf.reduce_sum(rows[0], summed) if summed else rows[0]
        return tf.reshape(found, (-1, *shape))

    return Term(rows=(split_examples(slope, num_rows),), form=form)


def _einsum(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    batch, rows, weight, result = einsum_of_examples(use)
    equation = f"{rows},{result}->{batch}{weight}"
    return Term(
        rows=(split_examples(use.other, num_rows), split_examples(slope, num_rows)),
        form=lambda rows: tf.einsum(equation, *rows),
    )


def einsum_of_examples(use: Use) -> tuple[str, str, str, str]:
    """Returns einsum indices: of the examples; of rows, weight and result.

    Rows and result are those of ``split_examples``.
    """
    rows, weight, result = einsum_letters(use)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    entry = next(x for x in letters if x not in rows + weight + result)
    batch = rows[0]
    return batch, batch + entry + rows[1:], weight, batch + entry + result[1:]


def _convolution(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    places = math.prod(slope.shape.as_list()[1:-1]) * (slope.shape[0] // num_rows)
    window = math.prod(shape[:-2])
    groups, within, outcomes = channel_groups(use, shape)

    # Patches are large: each chunk of examples computes its own.
    def form(rows: tuple[Any, ...]) -> Any:
        images, slopes = (tf.reshape(v, (-1, *v.shape[2:])) for v in rows)
        patches = _patches(use.op, images, shape)
        patches = tf.reshape(patches, (-1, places, window, groups, within))
        slopes = tf.reshape(slopes, (-1, places, groups, outcomes))
        found = tf.einsum("npwgi,npgo->nwigo", patches, slopes)
        return tf.reshape(found, (-1, *shape))

    return Term(
        rows=(split_examples(use.other, num_rows), split_examples(slope, num_rows)),
        form=form,
        work=places * window * groups * within,
    )


def channel_groups(use: Use, shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns a convolution's number of groups, and channels in and out of each.

    Args:
      use: Use of a kernel by a convolution.
      shape: Shape of the kernel.
    """
    channels, after = use.other.shape[-1], use.op.outputs[0].shape[-1]
    depthwise = use.op.type == "DepthwiseConv2dNative"
    groups = channels if depthwise else channels // shape[-2]
    return groups, channels // groups, after // groups


def _patches(op: Any, images: Any, shape: tuple[int, ...]) -> Any:
    """Returns the patches of a convolution, (images, ..., window * channels)."""
    padding = op.get_attr("padding").decode()
    sizes, strides = [1, *shape[:-2], 1], op.get_attr("strides")
    if op.type == "Conv3D":
        return tf.extract_volume_patches(images, sizes, strides, padding)
    rates = op.get_attr("dilations")
    return tf.image.extract_patches(images, sizes, strides, rates, padding)


_TERMS: dict[str, Callable[[Use, tuple[int, ...], Any, int], Term]] = {
    **dict.fromkeys(("AddV2", "BiasAdd", "Mul", "Sub"), _broadcast),
    **dict.fromkeys(("BatchMatMulV2", "MatMul"), _product),
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative"), _convolution),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _table),
    "Einsum": _einsum,
}
