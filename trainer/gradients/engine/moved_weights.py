"""Results of operations for weights that differ between examples.

Each use of a piece of a weight is linear in the piece.  If the piece ``w`` of an
example moves to ``w + u``, the result of a use for an input ``x`` changes by

    use                          change
    ---                          ------
    x W                          x u
    table[ids]                   rows of u
    v + w,  v - w,  v * w        u, -u, v * u
    convolution                  sum over the window of shifted x times u at its place
    einsum                       einsum of x and u

where ``u`` is the example's gradient with respect to the piece, times the length of the
move over the norm of the example's gradient.  It is formed for each example, unless its
factors are smaller, as for large matrices at few positions and for tables of which only
rows are read.

Formal guarantees:
  - The change of an example's result depends on this example alone.
  - For a table of which only rows are read, only these rows of the move are held.

Sensitive: everything here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from trainer.core.tf_compat import tf
from trainer.gradients.engine.gradient_parts import (
    PRODUCTS,
    TableRows,
    Term,
    broadcast_sizes,
    channel_groups,
    einsum_of_examples,
    flat_positions,
    is_transposed,
    joined_rows,
    split_examples,
    term_of,
)
from trainer.gradients.engine.proof import Proof
from trainer.gradients.engine.row_independence import PerRow
from trainer.gradients.engine.weight_uses import LOOK_UPS, Piece, UnknownUseError, Use

#: The same use in a copy of the graph -> what is added to its result.
Change = Callable[[Use], Any]

_CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
_PRODUCTS = ("BatchMatMulV2", "MatMul")


def num_formed_values(proof: Proof) -> int:
    """Returns the largest number of values per example that ``changes_of`` forms.

    Args:
      proof: Proof without obstacle.
    """
    return sum(
        0
        if piece.reads_rows or _has_small_factors(piece, _num_positions(piece, proof))
        else math.prod(piece.shape)
        for piece in proof.pieces
    )


def _num_positions(piece: Piece, proof: Proof) -> int:
    """Returns the number of positions per example at which a piece is used."""
    count = 0
    for result in (use.op.outputs[0] for use in piece.uses):
        kind = proof.kinds[result.name]
        assert isinstance(kind, PerRow)  # of every use of a proven graph
        count += kind.per_example * math.prod(result.shape.as_list()[1:-1])
    return count


def _has_small_factors(piece: Piece, num_positions: int) -> bool:
    """Whether moves by products are applied by their factors, and never formed."""
    products = all(use.op.type in _PRODUCTS for use in piece.uses)
    return products and num_positions * sum(piece.shape) < math.prod(piece.shape)


def changes_of(piece: Piece, slopes: Sequence[Any], num_rows: int) -> list[Change]:
    """Returns the change of the result of each use of a piece.

    Args:
      piece: Piece of the graph that is being traced.
      slopes: Derivative of the losses with respect to the result of each use, times the
        length of the example's move over the norm of its gradient.
      num_rows: Number of examples of the batch.
    """
    terms = [
        term_of(use, piece.shape, slope, num_rows)
        for use, slope in zip(piece.uses, slopes, strict=True)
    ]
    if piece.reads_rows:
        return _of_table(piece, terms)
    if all(term.kind == PRODUCTS for term in terms):
        left, right = joined_rows(terms)
        if _has_small_factors(piece, left.shape[1]):
            return [_by_factors(left, right)] * len(terms)
    move = tf.add_n([term.form(term.rows) for term in terms])
    move = tf.ensure_shape(move, (num_rows, *piece.shape))
    return [lambda use: _shaped(_CHANGES[use.op.type](use, move), use)] * len(terms)


def _shaped(value: Any, use: Use) -> Any:
    result = use.op.outputs[0]
    return tf.ensure_shape(tf.reshape(value, tf.shape(result)), result.shape)


def _of_table(piece: Piece, terms: Sequence[Term]) -> list[Change]:
    totals, _ = TableRows(*joined_rows(terms), piece.shape).totals()
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
    """Returns the change by moves ``left^T right``.

    Args:
      left: First factors, (examples, positions, a).
      right: Second factors, (examples, positions, b).
    """

    def change(use: Use) -> Any:
        near, far = (right, left) if is_transposed(use) else (left, right)
        x = flat_positions(use.other, left.shape[0])
        return _shaped(tf.matmul(tf.matmul(x, near, transpose_b=True), far), use)

    return change


# -- changes by moves that are formed, (examples, *shape of the piece) -------------


def _product_change(use: Use, move: Any) -> Any:
    x = flat_positions(use.other, move.shape[0])
    return tf.matmul(x, move, transpose_b=is_transposed(use))


def _table_change(use: Use, move: Any) -> Any:
    ids = tf.reshape(use.op.inputs[1], (move.shape[0], -1))
    return tf.gather(move, ids, batch_dims=1)


def _broadcast_change(use: Use, move: Any) -> Any:
    num_rows, *shape = move.shape.as_list()
    result = use.op.outputs[0]
    move = tf.reshape(move, (num_rows, 1, *broadcast_sizes(result, shape)))
    if use.op.type == "Sub" and use.place == 1:
        move = -move
    factor = tf.ones_like(result)
    if use.op.type == "Mul":
        factor = tf.broadcast_to(use.other, result.shape)
    return move * split_examples(factor, num_rows)


def _einsum_change(use: Use, move: Any) -> Any:
    batch, rows, weight, result = einsum_of_examples(use)
    x = split_examples(use.other, move.shape[0])
    return tf.einsum(f"{rows},{batch}{weight}->{result}", x, move)


def _convolution_change(use: Use, move: Any) -> Any:
    num_rows, *shape = move.shape.as_list()
    groups, within, outcomes = channel_groups(use, shape)
    move = tf.reshape(move, (num_rows, -1, within, groups, outcomes))
    found = [
        tf.einsum("npgi,nigo->npgo", x, move[:, k])
        for k, x in enumerate(_shifted(use, shape, groups, num_rows))
    ]
    return tf.add_n(found)


def _shifted(use: Use, shape: Sequence[int], groups: int, num_rows: int) -> list[Any]:
    """Returns the inputs at each place of the window, (examples, places, groups, ...).

    One tensor for each place of the window.
    """
    strides = use.op.get_attr("strides")[1:-1]
    rates = use.op.get_attr("dilations")[1:-1]
    places = use.op.outputs[0].shape.as_list()[1:-1]
    sizes = list(zip(shape, rates, strides, places, strict=False))
    # Size of the image up to the end of the window of the last result.
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
    """Returns the inputs of a convolution, padded with zeros to at least ``reach``."""
    images = use.other
    missing = [
        max(0, need - have)
        for need, have in zip(reach, images.shape.as_list()[1:-1], strict=True)
    ]
    # Padding SAME has the larger half at the end; VALID adds none.
    widths = [[n // 2, n - n // 2] for n in missing]
    return tf.pad(images, [[0, 0], *widths, [0, 0]])


_CHANGES: dict[str, Callable[[Use, Any], Any]] = {
    **dict.fromkeys(("AddV2", "BiasAdd", "Mul", "Sub"), _broadcast_change),
    **dict.fromkeys(_PRODUCTS, _product_change),
    **dict.fromkeys(_CONVOLUTIONS, _convolution_change),
    **dict.fromkeys(LOOK_UPS, _table_change),
    "Einsum": _einsum_change,
}
