"""What the uses of a piece of a weight give where every example has a piece of its own.

Every use is linear in its piece.  If the piece ``w`` of an example moves to ``w + u``,
the outcome of a use for an input ``x`` changes by

    use                          change
    ---                          ------
    x W                          x u
    table[ids]                   rows of u
    v + w,  v - w,  v * w        u, -u, v * u
    convolution                  sum over the window of shifted x times u at its place
    einsum                       the einsum of x and u

where ``u`` is the example's gradient by the piece, times the length of the move over
its norm.  It is formed for each example, except where its factors are smaller: of few
products of large matrices, and of tables that are only looked up.

Formal guarantees:
  - The change of an example's outcome depends on this example alone.
  - Of a table that is only looked up, no more rows are held than are read.

Sensitive: everything here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from trainer.gradients.gradient_parts import TableRows
from trainer.gradients.operations.use_gradients import (
    PRODUCTS,
    Term,
    beside_entry,
    by_example,
    einsum_of_examples,
    flat_positions,
    is_turned,
    term_of,
)
from trainer.gradients.operations.weight_uses import Piece, UnknownUseError, Use
from trainer.tf_compat import tf

#: The same use in another graph -> what is added to its outcome.
Change = Callable[[Use], Any]

_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
_LOOK_UPS = ("GatherV2", "ResourceGather")


def num_formed_values(piece: Piece) -> int:
    """Returns how many values ``changes_of`` may hold of each example."""
    return 0 if _is_table(piece) else math.prod(piece.shape)


def changes_of(piece: Piece, slopes: Sequence[Any], num_rows: int) -> list[Change]:
    """Returns for each use of a piece how its outcome changes.

    Args:
      piece: Piece of the graph that is made at the moment.
      slopes: Derivatives of the losses by the outcomes of its uses, in order, times the
        length of each example's move over the norm of its gradient.
      num_rows: Examples of the batch.
    """
    pairs = list(zip(piece.uses, slopes, strict=True))
    terms = [term_of(use, piece.shape, slope, num_rows) for use, slope in pairs]
    if _is_table(piece):
        return _of_table(piece, terms)
    if all(term.kind == PRODUCTS for term in terms):
        left, right = _joined(terms)
        if left.shape[1] * sum(piece.shape) < math.prod(piece.shape):
            return [_by_factors(left, right)] * len(terms)
    move = tf.add_n(
        [
            _convolution_gradient(use, piece.shape, slope, num_rows)
            if use.op.type in _CONVOLUTIONS
            else term.form(term.rows)
            for (use, slope), term in zip(pairs, terms, strict=True)
        ]
    )
    move = tf.ensure_shape(move, (num_rows, *piece.shape))
    return [lambda use: _shaped(_CHANGES[use.op.type](use, move), use)] * len(terms)


def _is_table(piece: Piece) -> bool:
    return all(use.op.type in _LOOK_UPS for use in piece.uses)


def _joined(terms: Sequence[Term]) -> tuple[Any, Any]:
    first, second = (tf.concat([term.rows[i] for term in terms], 1) for i in range(2))
    return first, second


def _shaped(value: Any, use: Use) -> Any:
    outcome = use.op.outputs[0]
    return tf.ensure_shape(tf.reshape(value, tf.shape(outcome)), outcome.shape)


def _of_table(piece: Piece, terms: Sequence[Term]) -> list[Change]:
    totals, _ = TableRows(*_joined(terms), piece.shape).totals()
    sizes = [term.rows[0].shape[1] for term in terms]
    found = tf.split(totals, sizes, 1)
    return [
        _at_same_ids(use.op.inputs[1], rows)
        for use, rows in zip(piece.uses, found, strict=True)
    ]


def _at_same_ids(ids: Any, rows: Any) -> Change:
    def change(use: Use) -> Any:
        if use.op.inputs[1] is not ids:
            raise UnknownUseError(f"the ids of {use.op.name} depend on a weight")
        return _shaped(rows, use)

    return change


def _by_factors(left: Any, right: Any) -> Change:
    """Of the move ``left^T right``, (examples, positions, a) and (..., b)."""

    def change(use: Use) -> Any:
        near, far = (right, left) if is_turned(use) else (left, right)
        x = flat_positions(use.other, left.shape[0])
        return _shaped(tf.matmul(tf.matmul(x, near, transpose_b=True), far), use)

    return change


# -- changes by formed moves, (examples, *shape of the piece) ---------------------


def _product_change(use: Use, move: Any) -> Any:
    x = flat_positions(use.other, move.shape[0])
    return tf.matmul(x, move, transpose_b=is_turned(use))


def _table_change(use: Use, move: Any) -> Any:
    ids = tf.reshape(use.op.inputs[1], (move.shape[0], -1))
    return tf.gather(move, ids, batch_dims=1)


def _broadcast_change(use: Use, move: Any) -> Any:
    num_rows, *shape = move.shape.as_list()
    outcome = use.op.outputs[0]
    move = tf.reshape(move, (num_rows, 1, *beside_entry(outcome, shape)))
    if use.op.type == "Sub" and use.place == 1:
        move = -move
    factor = tf.ones_like(outcome)
    if use.op.type == "Mul":
        factor = tf.broadcast_to(use.other, outcome.shape)
    return move * by_example(factor, num_rows)


def _einsum_change(use: Use, move: Any) -> Any:
    batch, rows, weight, result = einsum_of_examples(use)
    x = by_example(use.other, move.shape[0])
    return tf.einsum(f"{rows},{batch}{weight}->{result}", x, move)


def _convolution_change(use: Use, move: Any) -> Any:
    num_rows, *shape = move.shape.as_list()
    groups, within, outcomes = _groups(use, shape)
    move = tf.reshape(move, (num_rows, -1, within, groups, outcomes))
    found = [
        tf.einsum("npgi,nigo->npgo", x, move[:, k])
        for k, x in enumerate(_shifted(use, shape, groups, num_rows))
    ]
    return tf.add_n(found)


def _convolution_gradient(
    use: Use, shape: Sequence[int], slope: Any, num_rows: int
) -> Any:
    """Without patches, which are as many times an image as the window has places."""
    groups, _, outcomes = _groups(use, shape)
    d = tf.reshape(slope, (num_rows, -1, groups, outcomes))
    found = [
        tf.einsum("npgi,npgo->nigo", x, d)
        for x in _shifted(use, shape, groups, num_rows)
    ]
    return tf.reshape(tf.stack(found, 1), (num_rows, *shape))


def _groups(use: Use, shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns the groups of channels, and channels of each before and after."""
    channels, after = use.other.shape[-1], use.op.outputs[0].shape[-1]
    depthwise = use.op.type == "DepthwiseConv2dNative"
    groups = channels if depthwise else channels // shape[-2]
    return groups, channels // groups, after // groups


def _shifted(use: Use, shape: Sequence[int], groups: int, num_rows: int) -> list[Any]:
    """Returns what each place of the window meets, (examples, places, groups, ...)."""
    strides = use.op.get_attr("strides")[1:-1]
    rates = use.op.get_attr("dilations")[1:-1]
    places = use.op.outputs[0].shape.as_list()[1:-1]
    sizes = list(zip(shape, rates, strides, places, strict=False))
    # The last place of a window at the last place of the outcome.
    reach = [(n - 1) * s + (w - 1) * r + 1 for w, r, s, n in sizes]
    images = _padded(use, reach)
    found = []
    for offsets in itertools.product(*(range(w) for w, _, _, _ in sizes)):
        starts = [k * r for k, (_, r, _, _) in zip(offsets, sizes, strict=True)]
        cut = [
            slice(a, a + (n - 1) * s + 1, s)
            for a, (_, _, s, n) in zip(starts, sizes, strict=True)
        ]
        whole = (slice(None), *cut)
        rest = (num_rows, -1, groups, images.shape[-1] // groups)
        found.append(tf.reshape(images[whole], rest))
    return found


def _padded(use: Use, reach: Sequence[int]) -> Any:
    """Returns the inputs of a convolution with the zeros that it puts around them."""
    images = use.other
    missing = [
        max(0, need - have)
        for need, have in zip(reach, images.shape.as_list()[1:-1], strict=True)
    ]
    # With padding SAME the greater half is at the end; VALID misses nothing.
    widths = [[n // 2, n - n // 2] for n in missing]
    return tf.pad(images, [[0, 0], *widths, [0, 0]])


_CHANGES: dict[str, Callable[[Use, Any], Any]] = {
    **dict.fromkeys(("Add", "AddV2", "BiasAdd", "Mul", "Sub"), _broadcast_change),
    **dict.fromkeys(("BatchMatMulV2", "MatMul"), _product_change),
    **dict.fromkeys(_CONVOLUTIONS, _convolution_change),
    **dict.fromkeys(_LOOK_UPS, _table_change),
    "Einsum": _einsum_change,
}
