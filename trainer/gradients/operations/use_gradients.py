"""What the uses of a piece of a weight add to each example's gradient.

    use                          gradient of an example by the piece
    ---                          ----------------------------------
    x W                          sum over positions of x^T d
    table[ids]                   on each row, the sum of d where it was read
    v + w,  v - w,  v * w        d, -d, d * v, summed over the axes w is repeated along
    convolution                  sum over places of patch^T d
    einsum                       the einsum of x and d to the weight's letters

where ``d`` is the derivative of the example's loss by the outcome.  Of several uses of
a piece, as in the steps of a cell, it is the sum.

Formal guarantees: those of ``gradient_parts``.

Sensitive: everything here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from trainer.gradients.gradient_parts import (
    FormedGradients,
    OuterProducts,
    Part,
    TableRows,
)
from trainer.gradients.operations.weight_uses import Piece, Use, einsum_letters
from trainer.tf_compat import tf

PRODUCTS, TABLE, OTHER = "products", "table", "other"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """What one use adds.

    Attributes:
      rows: Tensors (batch, ...).
      form: ``rows`` of some examples -> (examples, *shape of the piece).
      work: Values per example that ``form`` needs beside its result.
      kind: How ``rows`` are to be read, beside ``form``: ``PRODUCTS`` for the two of
        ``OuterProducts``, ``TABLE`` for ids and d, or ``OTHER``.
    """

    rows: tuple[Any, ...]
    form: Callable[[tuple[Any, ...]], Any]
    work: int = 0
    kind: str = OTHER


def part_of(piece: Piece, slopes: Sequence[Any], num_rows: int) -> Part:
    """Returns the part of each example's gradient that is a piece's.

    Args:
      piece: Piece of the graph that is made at the moment.
      slopes: Derivatives of the losses by the outcomes of its uses, in order.
      num_rows: Examples of the batch.
    """
    terms = [
        term_of(use, piece.shape, slope, num_rows)
        for use, slope in zip(piece.uses, slopes, strict=True)
    ]
    (kind, *others) = {term.kind for term in terms}
    if not others and kind != OTHER:
        first, second = (
            tf.concat([term.rows[i] for term in terms], 1) for i in range(2)
        )
        if kind == PRODUCTS:
            return OuterProducts(first, second, bias=False)
        if kind == TABLE:
            return TableRows(first, second, piece.shape)
    return _formed(terms, piece.shape)


def term_of(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    """Returns what one use adds to each example's gradient.

    Args:
      use: Use of the graph that is made at the moment.
      shape: Shape of the piece.
      slope: Derivative of the losses by its outcome.
      num_rows: Examples of the batch.
    """
    return _TERMS[use.op.type](use, shape, slope, num_rows)


def _formed(terms: Sequence[Term], shape: tuple[int, ...]) -> FormedGradients:
    def form(rows: Any) -> list[Any]:
        found = [term.form(each) for term, each in zip(terms, rows, strict=True)]
        return [tf.add_n(found)]

    work = sum(term.work for term in terms)
    return FormedGradients(
        form, tuple(term.rows for term in terms), shapes=[shape], work=work
    )


def by_example(value: Any, num_rows: int) -> Any:
    """Returns (num_rows * m, ...) values shaped (num_rows, m, ...).

    Args:
      value: Value of known shape.
      num_rows: Examples of the batch.
    """
    entries = value.shape[0]
    return tf.reshape(value, (num_rows, entries // num_rows, *value.shape[1:]))


def flat_positions(value: Any, num_rows: int) -> Any:
    """Returns (num_rows * m, ..., size) values shaped (num_rows, positions, size).

    Args:
      value: Value of known shape.
      num_rows: Examples of the batch.
    """
    size = value.shape[-1]
    count = math.prod(value.shape.as_list()) // max(1, num_rows * size)
    return tf.reshape(value, (num_rows, count, size))


def is_turned(use: Use) -> bool:
    """Whether a product of matrices is with the transpose of the piece."""
    names = ("transpose_b", "adj_y")
    return any(use.op.get_attr(n) for n in names if n in use.op.node_def.attr)


def _product(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    x, d = (flat_positions(value, num_rows) for value in (use.other, slope))
    rows = (d, x) if is_turned(use) else (x, d)
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


def beside_entry(outcome: Any, shape: Sequence[int]) -> list[int]:
    """Returns the sizes of a piece along the axes of one entry of an outcome.

    Args:
      outcome: Outcome of the piece and rows, broadcast.
      shape: Shape of the piece.
    """
    rank = len(outcome.shape) - 1
    sizes = [1] * rank + list(shape)
    return sizes[len(sizes) - rank :]


def _broadcast(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    if use.op.type == "Mul":
        slope = slope * use.other
    elif use.op.type == "Sub" and use.place == 1:
        slope = -slope
    inner, sizes = slope.shape[1:].as_list(), beside_entry(slope, shape)
    repeated = [i for i, size in enumerate(sizes) if size == 1 and inner[i] != 1]

    def form(rows: tuple[Any, ...]) -> Any:
        found = tf.reduce_sum(rows[0], [1, *(axis + 2 for axis in repeated)])
        return tf.reshape(found, (-1, *shape))

    return Term(rows=(by_example(slope, num_rows),), form=form)


def _einsum(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    batch, rows, weight, result = einsum_of_examples(use)
    equation = f"{rows},{result}->{batch}{weight}"
    return Term(
        rows=(by_example(use.other, num_rows), by_example(slope, num_rows)),
        form=lambda rows: tf.einsum(equation, *rows),
    )


def einsum_of_examples(use: Use) -> tuple[str, str, str, str]:
    """Returns letters of examples, and of rows, weight and outcome ``by_example``."""
    rows, weight, result = einsum_letters(use)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    entry = next(x for x in letters if x not in rows + weight + result)
    batch = rows[0]
    return batch, batch + entry + rows[1:], weight, batch + entry + result[1:]


def _convolution(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    """Patches, once more for each chunk of examples: they are many."""
    places = math.prod(slope.shape.as_list()[1:-1]) * (slope.shape[0] // num_rows)
    window, channels = math.prod(shape[:-2]), use.other.shape[-1]
    is_depthwise = use.op.type == "DepthwiseConv2dNative"
    groups = channels if is_depthwise else channels // shape[-2]
    within, outcomes = channels // groups, slope.shape[-1] // groups

    def form(rows: tuple[Any, ...]) -> Any:
        images, slopes = (tf.reshape(v, (-1, *v.shape[2:])) for v in rows)
        patches = _patches(use.op, images, shape)
        patches = tf.reshape(patches, (-1, places, window, groups, within))
        slopes = tf.reshape(slopes, (-1, places, groups, outcomes))
        found = tf.einsum("npwgi,npgo->nwigo", patches, slopes)
        return tf.reshape(found, (-1, *shape))

    return Term(
        rows=(by_example(use.other, num_rows), by_example(slope, num_rows)),
        form=form,
        work=places * window * channels,
    )


def _patches(op: Any, images: Any, shape: tuple[int, ...]) -> Any:
    """Returns the windows that a convolution sees, (images, ..., window * channels)."""
    padding = op.get_attr("padding").decode()
    sizes, strides = [1, *shape[:-2], 1], op.get_attr("strides")
    if op.type == "Conv3D":
        return tf.extract_volume_patches(images, sizes, strides, padding)
    rates = op.get_attr("dilations")
    return tf.image.extract_patches(images, sizes, strides, rates, padding)


_TERMS: dict[str, Callable[[Use, tuple[int, ...], Any, int], Term]] = {
    **dict.fromkeys(("Add", "AddV2", "BiasAdd", "Mul", "Sub"), _broadcast),
    **dict.fromkeys(("BatchMatMulV2", "MatMul"), _product),
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative"), _convolution),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _table),
    "Einsum": _einsum,
}
