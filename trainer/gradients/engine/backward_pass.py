"""Clipped sums by one backward pass, for models that use weights in known operations.

The traced forward pass shows every operation that uses a weight (``weight_uses``).  The
backward pass gives the derivatives with respect to the results of these operations,
from which the norm of each example's gradient and the sum of the clipped gradients are
computed (``gradient_parts``).  No list of layers is needed: attention, normalisation,
convolutions and recurrent cells are products, sums and convolutions, and a weight may
be used more than once.

Formal guarantees:
  - Those of ``per_example``, for models whose ``proof`` has no obstacle.
  - The forward pass is a copy of the graph that was proven.
  - ``with_changes`` computes a result again, with changed intermediate results: no side
    effect occurs twice, since the traced graph has none (see ``traced_losses``), and
    results that do not depend on a change are used as they are.

Sensitive: everything here.

References:
  Goodfellow (2015), arXiv:1510.01799; Bu et al. (2023), arXiv:2210.00038.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.core.claim_names import GRAPH_GRADIENTS
from trainer.core.step.per_example import ExampleGradients, scale_rows
from trainer.core.tf_compat import tf
from trainer.gradients.engine.gradient_parts import part_of, split_examples
from trainer.gradients.engine.moved_weights import Change, changes_of
from trainer.gradients.engine.proof import Proof, proof_of
from trainer.gradients.engine.row_independence import PerRow
from trainer.gradients.engine.traced_losses import GraphCopy, copy_into
from trainer.gradients.engine.weight_uses import Piece, Use, ancestors
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
