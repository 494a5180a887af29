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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Term:
    """What one use adds.

    Attributes:
      rows: Tensors (batch, ...).
      form: ``rows`` of some examples -> (examples, *shape of the piece).
      work: Values per example that ``form`` needs beside its result.
      kind: How ``rows`` are to be read, beside ``form``: "products" for x and d of
        ``OuterProducts``, "turned" for d and x, "table" for ids and d, or "other".
    """

    rows: tuple[Any, ...]
    form: Callable[[tuple[Any, ...]], Any]
    work: int = 0
    kind: str = "other"


def part_of(piece: Piece, slopes: Sequence[Any], num_rows: int) -> Part:
    """Returns the part of each example's gradient that is a piece's.

    Args:
      piece: Of the graph that is made at the moment.
      slopes: Derivatives of the losses by the outcomes of its uses, in order.
      num_rows: Examples of the batch.
    """
    terms = [
        _TERMS[use.op.type](use, piece.shape, slope, num_rows)
        for use, slope in zip(piece.uses, slopes, strict=True)
    ]
    (kind, *others) = {term.kind for term in terms}
    if not others and kind != "other":
        first, second = (
            tf.concat([term.rows[i] for term in terms], 1) for i in range(2)
        )
        if kind == "products":
            return OuterProducts(first, second, bias=False)
        if kind == "table":
            return TableRows(first, second, piece.shape)
    return _formed(terms, piece.shape)


def _formed(terms: Sequence[_Term], shape: tuple[int, ...]) -> FormedGradients:
    def form(rows: Any) -> list[Any]:
        found = [term.form(each) for term, each in zip(terms, rows, strict=True)]
        return [tf.add_n(found)]

    work = sum(term.work for term in terms)
    return FormedGradients(
        form, tuple(term.rows for term in terms), shapes=[shape], work=work
    )


def _by_example(value: Any, num_rows: int) -> Any:
    """Returns (num_rows * m, ...) values shaped (num_rows, m, ...)."""
    entries = value.shape[0]
    return tf.reshape(value, (num_rows, entries // num_rows, *value.shape[1:]))


def _flat_positions(value: Any, num_rows: int) -> Any:
    """Returns (num_rows * m, ..., size) values shaped (num_rows, positions, size)."""
    size = value.shape[-1]
    count = math.prod(value.shape.as_list()) // max(1, num_rows * size)
    return tf.reshape(value, (num_rows, count, size))


def _product(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> _Term:
    turned = any(
        use.op.get_attr(name)
        for name in ("transpose_b", "adj_y")
        if name in use.op.node_def.attr
    )
    x, d = (_flat_positions(value, num_rows) for value in (use.other, slope))
    rows = (d, x) if turned else (x, d)
    return _Term(
        rows=rows,
        form=lambda rows: tf.matmul(rows[0], rows[1], transpose_a=True),
        kind="products",
    )


def _table(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> _Term:
    ids = tf.reshape(use.op.inputs[1], (num_rows, -1))

    def form(rows: tuple[Any, ...]) -> Any:
        read = tf.one_hot(rows[0], shape[0], dtype=rows[1].dtype)
        return tf.matmul(read, rows[1], transpose_a=True)

    return _Term(
        rows=(ids, _flat_positions(slope, num_rows)),
        form=form,
        work=ids.shape[1] * shape[0],
        kind="table",
    )


def _broadcast(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> _Term:
    if use.op.type == "Mul":
        slope = slope * use.other
    elif use.op.type == "Sub" and use.place == 1:
        slope = -slope
    inner = slope.shape[1:].as_list()
    # The axes of the piece that lie beside those of one entry.
    sizes = [1] * len(inner) + list(shape)
    sizes = sizes[len(sizes) - len(inner) :]
    repeated = [i for i, size in enumerate(sizes) if size == 1 and inner[i] != 1]

    def form(rows: tuple[Any, ...]) -> Any:
        found = tf.reduce_sum(rows[0], [1, *(axis + 2 for axis in repeated)])
        return tf.reshape(found, (-1, *shape))

    return _Term(rows=(_by_example(slope, num_rows),), form=form)


def _einsum(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> _Term:
    rows, weight, result = einsum_letters(use)
    batch = rows[0]
    entry = next(x for x in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if x not in rows + result)
    terms = ",".join(batch + entry + term[1:] for term in (rows, result))
    return _Term(
        rows=(_by_example(use.other, num_rows), _by_example(slope, num_rows)),
        form=lambda rows: tf.einsum(f"{terms}->{batch}{weight}", *rows),
    )


def _convolution(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> _Term:
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

    return _Term(
        rows=(_by_example(use.other, num_rows), _by_example(slope, num_rows)),
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


_TERMS: dict[str, Callable[[Use, tuple[int, ...], Any, int], _Term]] = {
    **dict.fromkeys(("Add", "AddV2", "BiasAdd", "Mul", "Sub"), _broadcast),
    **dict.fromkeys(("BatchMatMulV2", "MatMul"), _product),
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative"), _convolution),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _table),
    "Einsum": _einsum,
}
