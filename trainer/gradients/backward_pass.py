"""Clipped sums by one backward pass, for models that use weights in known operations.

The traced forward pass shows every operation that uses a weight (``weight_uses``).  The
backward pass gives the derivatives with respect to the results of these operations,
from which the norm of each example's gradient and the sum of the clipped gradients are
computed (``gradient_parts``).  No list of layers is needed: attention, normalisation,
convolutions and recurrent cells are products, sums and convolutions, and a weight may
be used more than once.

Formal guarantees:
  - For models whose ``proof`` has no obstacle, those of ``core.step.clipping``.
  - The forward pass is a copy of the graph that was proven.
  - ``with_changes`` computes a result again, with changed intermediate results: no side
    effect occurs twice, since the traced graph has none (see ``traced_losses``), and
    results that do not depend on a change are used as they are.

Weights that differ between examples (``BackwardPass.moved``).  Each use of a piece of a
weight is linear in the piece.  If the piece ``w`` of an example moves to ``w + u``, the
result of a use for an input ``x`` changes by

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

Formal guarantees of moved weights:
  - The change of an example's result depends on this example alone.
  - For a table of which only rows are read, only these rows of the move are held.

Sensitive: everything here.

References:
  Goodfellow (2015), arXiv:1510.01799; Bu et al. (2023), arXiv:2210.00038.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.core.claim_names import GRAPH_GRADIENTS
from trainer.core.step.clipping import ExampleGradients, scale_rows
from trainer.core.tf_compat import tf
from trainer.gradients.gradient_parts import (
    PRODUCTS,
    TableRows,
    Term,
    broadcast_sizes,
    channel_groups,
    einsum_of_examples,
    flat_positions,
    is_transposed,
    joined_rows,
    part_of,
    split_examples,
    term_of,
)
from trainer.gradients.proof import Proof, proof_of
from trainer.gradients.row_independence import PerRow
from trainer.gradients.traced_losses import GraphCopy, copy_into
from trainer.gradients.weight_uses import (
    LOOK_UPS,
    Piece,
    UnknownUseError,
    Use,
    ancestors,
)
from trainer.model.trainable_model import TrainableModel


def one_pass(model: TrainableModel) -> ExampleGradients:
    """Returns the gradients of the examples, computed in one pass.

    Args:
      model: Model whose ``proof`` has no obstacle.
    """
    proof = proof_of(model)

    def of_rows(columns: dict[str, Any], real: Any) -> tuple[BackwardPass, Any]:
        return backward(proof, columns, real.shape[0]), real

    return ExampleGradients(model, of_rows, relies_on=[GRAPH_GRADIENTS])


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """A forward and a backward pass through a model.  Sensitive.

    Attributes:
      variables: The trainable variables.
      losses: Loss of each example, (batch,).
      pieces: Pieces of weights, with their uses in the pass.
      slopes: Derivative of the losses with respect to the result of each use, by piece.
      parts: The part of each example's gradient that belongs to each piece.
    """

    variables: tuple[Any, ...]
    losses: Any
    pieces: list[Piece]
    slopes: list[list[Any]]
    parts: list[Any]

    def norms(self) -> Any:
        """Returns an upper bound on the L2 norm of each gradient, (batch,)."""
        return tf.sqrt(tf.add_n([part.squared_norm() for part in self.parts]))

    def scaled_sum(self, scale: Any, cap: float | None) -> list[Any]:
        """Returns the sum of the scaled gradients; call ``norms`` before.

        Args:
          scale: Factor of each example, (batch,), 0 for those that add nothing.
          cap: Largest coordinate of a scaled gradient; None for no bound.
        """
        sums = [part.clipped(scale, cap)[0] for part in self.parts]
        return _of_variables(self.pieces, sums, self.variables)

    def moved(self, scale: Any) -> BackwardPass:
        """Returns the pass in which each example's weights move by its scaled gradient.

        Args:
          scale: Length of the move over the norm of the gradient, (batch,); 0 for
            examples whose weights do not move.

        Raises:
          UnknownUseError: the ids of a table depend on weights.
        """
        num_rows = scale.shape[0]
        changes = {}
        for piece, slopes in zip(self.pieces, self.slopes, strict=True):
            scaled = [_by_row(slope, scale) for slope in slopes]
            found = changes_of(piece, scaled, num_rows)
            for use, change in zip(piece.uses, found, strict=True):
                changes[use.op.name] = use.place, change
        losses, copies = with_changes(
            self.losses,
            {
                name: functools.partial(_change_of_copy, *change)
                for name, change in changes.items()
            },
        )
        pieces = [_piece_of_copies(piece, copies) for piece in self.pieces]
        return _pass(self.variables, losses, pieces, num_rows)


def backward(proof: Proof, columns: Mapping[str, Any], num_rows: int) -> BackwardPass:
    """Returns one forward and one backward pass, in the graph that is being traced.

    Args:
      proof: Proof without obstacle.
      columns: Columns by name, each (num_rows, ...), with zeros in the rows that may
        not contribute.
      num_rows: Number of rows of the columns.
    """
    copy = copy_into(proof.graph, columns)
    _set_sizes(proof, copy, num_rows)
    pieces = [_copied_piece(piece, copy) for piece in proof.pieces]
    return _pass(proof.variables, copy.of(proof.graph.losses), pieces, num_rows)


def _set_sizes(proof: Proof, copy: GraphCopy, num_rows: int) -> None:
    """Tells TensorFlow the sizes of the batch axes, which it may not infer."""
    for op in proof.graph.graph.get_operations():
        for value in op.outputs if op.name in copy.ops else ():
            kind, shape = proof.kinds[value.name], value.shape
            if isinstance(kind, PerRow) and shape.rank and shape[kind.axis] is None:
                sizes = shape.as_list()
                sizes[kind.axis] = kind.per_example * num_rows
                copy.of(value).set_shape(sizes)


def _copied_piece(piece: Piece, copy: GraphCopy) -> Piece:
    return dataclasses.replace(
        piece,
        # A table of which only rows are read has no value in the copy.
        value=copy.of(piece.value if piece.path else piece.source),
        source=copy.of(piece.source),
        uses=tuple(
            dataclasses.replace(use, op=copy.ops[use.op.name]) for use in piece.uses
        ),
    )


def _pass(
    variables: tuple[Any, ...], losses: Any, pieces: list[Piece], num_rows: int
) -> BackwardPass:
    results = [[use.op.outputs[0] for use in piece.uses] for piece in pieces]
    found = tf.gradients(
        tf.reduce_sum(losses),
        tf.nest.flatten(results),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    found = [tf.convert_to_tensor(value) for value in found]
    slopes = tf.nest.pack_sequence_as(results, found)
    parts = [
        part_of(piece, of_piece, num_rows)
        for piece, of_piece in zip(pieces, slopes, strict=True)
    ]
    return BackwardPass(
        variables=variables, losses=losses, pieces=pieces, slopes=slopes, parts=parts
    )


def _by_row(slope: Any, scale: Any) -> Any:
    rows = split_examples(slope, scale.shape[0])
    return tf.reshape(scale_rows(rows, scale), slope.shape)


def _change_of_copy(place: int, change: Change, op: Any) -> Any:
    return change(Use(op=op, place=place))


def _piece_of_copies(piece: Piece, copies: Mapping[str, Any]) -> Piece:
    uses = [dataclasses.replace(use, op=copies[use.op.name]) for use in piece.uses]
    return dataclasses.replace(piece, uses=tuple(uses))


def _of_variables(
    pieces: Sequence[Piece], sums: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """Returns the sum for each variable from those of its pieces; zeros without any."""
    totals: list[Any] = [None] * len(variables)
    for piece, found in zip(pieces, sums, strict=True):
        whole = _of_whole(piece, found)
        before = totals[piece.variable]
        totals[piece.variable] = whole if before is None else _plus(before, whole)
    return [
        tf.zeros_like(variable) if total is None else total
        for variable, total in zip(variables, totals, strict=True)
    ]


def _of_whole(piece: Piece, total: Any) -> Any:
    """Returns the sum for a variable, zero outside of a piece, from the piece's."""
    if not piece.path:
        return total
    # The piece is a linear function of the variable: its derivative moves the values
    # of the piece back to their places.
    (found,) = tf.gradients(piece.value, [piece.source], [tf.convert_to_tensor(total)])
    return found


def _plus(left: Any, right: Any) -> Any:
    return tf.convert_to_tensor(left) + tf.convert_to_tensor(right)


#: Copy of an operation -> what is added to its result.
CopyChange = Callable[[Any], Any]


def with_changes(
    result: Any, changes: Mapping[str, CopyChange]
) -> tuple[Any, dict[str, Any]]:
    """Returns a tensor of a graph, computed with changed intermediate results.

    Args:
      result: Tensor of the graph that is being traced.
      changes: For the name of an operation of one output, the change of its result.

    Returns:
      The tensor; and for each name in ``changes`` the copy of the operation, whose
      output is the result before the addition.
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

    The list has one tensor for each place of the window.
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
