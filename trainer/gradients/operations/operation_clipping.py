"""Clipped sums by one backward pass, for models that use weights in known operations.

The traced forward pass shows every operation that uses a weight (``weight_uses``).  The
backward pass gives the derivatives with respect to the results of these operations,
from which the norm of each example's gradient and the sum of the clipped gradients are
computed (``use_gradients``).  No list of layers is needed: attention, normalisation,
convolutions and recurrent cells are products, sums and convolutions, and a weight may
be used more than once.

Formal guarantees:
  - Those of ``clipping``, for models without ``operations_obstacle``: the traced graph
    proves that rows do not mix, and all uses of all trainable variables are known.
  - If the graph of a physical batch uses weights in another way than the graph of the
    proof, gradients are computed for one example at a time instead.

Sensitive: everything here but the obstacle.

References:
  Goodfellow (2015), arXiv:1510.01799; Bu et al. (2023), arXiv:2210.00038.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.validation import InputError
from trainer.gradients.operations import moved_weights
from trainer.gradients.operations.copied_graph import with_changes
from trainer.gradients.operations.moved_weights import Change, changes_of
from trainer.gradients.operations.plain_layers import has_recurrent_layers, plain_layers
from trainer.gradients.operations.use_gradients import part_of, split_examples
from trainer.gradients.operations.weight_uses import (
    Piece,
    UnknownUseError,
    Use,
    find_pieces,
)
from trainer.gradients.per_example import (
    clip_scale,
    keep_rows,
    real_rows,
    scale_rows,
)
from trainer.gradients.row_independence import Rows, classify, losses_obstacle
from trainer.gradients.traced_model import column_placeholders, once_per_trace
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import tf

#: (columns, weight) -> a sum of gradients for each variable.
_Sum = Callable[[Mapping[str, Any], Any], list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Finding:
    """Findings from the graph of the proof.

    Attributes:
      obstacle: Why the sums here would be wrong; None if they are exact.
      signature: Signature of all pieces.
      formed_values: Largest number of values that an example's moved weights take.
      time_steps: Number of time steps of the longest recurrent layer.
    """

    obstacle: str | None = None
    signature: Any = None
    formed_values: int = 0
    time_steps: int = 1


def operations_obstacle(model: TrainableModel) -> str | None:
    """Returns why the sums here would be wrong for a model; None if they are exact."""
    return _finding(model).obstacle


def copies_of_gradients(model: TrainableModel) -> int:
    """Returns the number of copies of an example's gradient that memory holds.

    The backward pass of one example holds one for each time step.
    """
    if not has_recurrent_layers(model.network):
        return 1
    return _finding(model).time_steps


def num_formed_values(model: TrainableModel) -> int:
    """Returns the largest number of values that an example's moved weights take."""
    return _finding(model).formed_values


@once_per_trace
def _finding(model: TrainableModel) -> _Finding:
    for variable in model.variables:
        if variable.dtype != tf.float32:
            return _Finding(obstacle=f"{variable.name} is not of type float32")
    lengths: list[int] = []
    function = tf.function(
        _plain_losses(model, lengths), autograph=model.needs_autograph
    )
    pieces, why = list[Piece](), None
    try:
        graph = function.get_concrete_function(model.column_specs).graph
        pieces = _proven_pieces(graph, model.variables)
    except (InputError, UnknownUseError) as error:
        why = str(error)
    except Exception as error:  # of users' layers, for a batch of unknown size
        why = f"it cannot be traced ({type(error).__name__})"
    return _Finding(
        obstacle=why,
        signature=_signature(pieces),
        formed_values=sum(map(moved_weights.num_formed_values, pieces)),
        time_steps=max(lengths, default=1),
    )


def _plain_losses(
    model: TrainableModel, lengths: list[int] | None = None
) -> Callable[[Mapping[str, Any]], Any]:
    def losses(columns: Mapping[str, Any]) -> Any:
        with plain_layers(model.network) as found:
            value = model.losses(columns)
        if lengths is not None:
            lengths.extend(found)
        return value

    return losses


def _proven_pieces(graph: Any, variables: Sequence[Any]) -> list[Piece]:
    """Returns all pieces of weights.

    Raises:
      UnknownUseError: rows may mix, or a use is not known.
    """
    losses = graph.structured_outputs
    kinds = classify(graph, column_placeholders(graph))
    why = losses_obstacle(losses, kinds)
    if why is not None:
        raise UnknownUseError(why)
    pieces = find_pieces(
        losses, variables, lambda value: isinstance(kinds[value.name], Rows)
    )
    for use in (use for piece in pieces for use in piece.uses):
        for value in (use.other, use.op.outputs[0]):
            kind = kinds[value.name]
            if not isinstance(kind, Rows) or kind.axis:
                raise UnknownUseError(
                    f"axis 0 of {value.name}, which meets a weight, is not the batch"
                )
    return pieces


def _signature(pieces: Sequence[Piece]) -> Any:
    return sorted((piece.signature for piece in pieces), key=repr)


def operations_sum(
    model: TrainableModel,
    l2_norm_clip: float,
    linf_norm_clip: float | None,
    otherwise: _Sum,
) -> _Sum:
    """Returns the function that sums the clipped gradients of a physical batch.

    Args:
      model: Model without ``operations_obstacle``.
      l2_norm_clip: Largest L2 norm, above 0; infinity for no clipping.
      linf_norm_clip: Largest coordinate after the L2 clip; None for no bound.
      otherwise: The same sum on another path, for graphs that differ from the proof's.
    """

    def in_graph(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        found = backward(model, keep_rows(columns, real), weight.shape[0])
        return found.clipped_sum(real, l2_norm_clip, linf_norm_clip)

    return as_proven(model, in_graph, otherwise)


def as_proven(model: TrainableModel, in_graph: _Sum, otherwise: _Sum) -> _Sum:
    """Returns a sum that is ``in_graph``, unless a graph differs from the proof's.

    Args:
      model: Model without ``operations_obstacle``.
      in_graph: Sum that calls ``backward``, which needs a graph.
      otherwise: The same sum on another path, for graphs that differ from the proof's.
    """

    def traced(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        try:
            return in_graph(columns, weight)
        except UnknownUseError:
            return otherwise(columns, weight)

    function = tf.function(traced, autograph=model.needs_autograph)

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        is_traced = not tf.executing_eagerly()
        return (traced if is_traced else function)(dict(columns), weight)

    return gradient_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """A forward and a backward pass through a model.  Sensitive.

    Attributes:
      model: The model.
      losses: Loss of each example, (batch,).
      pieces: Pieces of weights, with their uses in the pass.
      slopes: Derivative of the losses with respect to the result of each use, by piece.
      parts: The part of each example's gradient that belongs to each piece.
    """

    model: TrainableModel
    losses: Any
    pieces: list[Piece]
    slopes: list[list[Any]]
    parts: list[Any]

    def norms(self) -> Any:
        """Returns an upper bound on the L2 norm of each gradient, (batch,)."""
        return tf.sqrt(tf.add_n([part.squared_norm() for part in self.parts]))

    def clipped_sum(
        self, real: Any, l2_norm_clip: float, linf_norm_clip: float | None = None
    ) -> list[Any]:
        """Returns the sum of the clipped gradients, a tensor per variable.

        Args:
          real: Examples that may contribute, bool (batch,).
          l2_norm_clip: Largest L2 norm, above 0; infinity for no clipping.
          linf_norm_clip: Largest coordinate after the L2 clip; None for no bound.
        """
        kept, scale = clip_scale(self.norms(), real, l2_norm_clip)
        sums = [part.clipped(kept, scale, linf_norm_clip)[0] for part in self.parts]
        return _of_variables(self.pieces, sums, self.model.variables)

    def moved(self, kept: Any, scale: Any) -> BackwardPass:
        """Returns the pass in which each example's weights move by its scaled gradient.

        Args:
          kept: Examples whose weights move, bool (batch,).
          scale: Length of the move over the norm of the gradient, (batch,).

        Raises:
          UnknownUseError: the ids of a table depend on weights.
        """
        num_rows = scale.shape[0]
        changes = {}
        for piece, slopes in zip(self.pieces, self.slopes, strict=True):
            scaled = [_by_row(slope, kept, scale) for slope in slopes]
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
        return _pass(self.model, losses, pieces, num_rows)


def backward(
    model: TrainableModel, columns: Mapping[str, Any], num_rows: int
) -> BackwardPass:
    """Returns one forward and one backward pass, in the graph that is being traced.

    Args:
      model: Model without ``operations_obstacle``.
      columns: Columns by name, each (num_rows, ...), with zeros in the rows that may
        not contribute.
      num_rows: Number of rows of the columns.

    Raises:
      UnknownUseError: this graph uses weights in another way than that of the proof.
    """
    losses = _plain_losses(model)(columns)
    starts = _uniform_rows(losses.graph, num_rows)
    rows = _followers([*columns.values(), *starts])
    pieces = find_pieces(losses, model.variables, lambda value: value.op.name in rows)
    if _signature(pieces) != _finding(model).signature:
        raise UnknownUseError("the graph is not that of the proof")
    return _pass(model, losses, pieces, num_rows)


def _pass(
    model: TrainableModel, losses: Any, pieces: list[Piece], num_rows: int
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
        model=model, losses=losses, pieces=pieces, slopes=slopes, parts=parts
    )


def _by_row(slope: Any, kept: Any, scale: Any) -> Any:
    rows = split_examples(slope, scale.shape[0])
    return tf.reshape(scale_rows(rows, kept, scale), slope.shape)


def _change_of_copy(place: int, change: Change, op: Any) -> Any:
    return change(Use(op=op, place=place))


def _piece_of_copies(piece: Piece, copies: Mapping[str, Any]) -> Piece:
    uses = [dataclasses.replace(use, op=copies[use.op.name]) for use in piece.uses]
    return dataclasses.replace(piece, uses=tuple(uses))


def _uniform_rows(graph: Any, num_rows: int) -> list[Any]:
    """Returns constants of equal entries whose axis 0 may be the batch.

    If the number of rows is static, the first states of recurrent layers are such
    constants.  In a proven graph a weight is combined with no other constants.
    """
    found = []
    for op in graph.get_operations():
        value = op.outputs[0] if op.type in ("Const", "Fill") else None
        if value is None or not (value.shape.rank and value.dtype.is_floating):
            continue
        numbers = tf.get_static_value(value)
        uniform = numbers is not None and (numbers == numbers.ravel()[:1]).all()
        if uniform and value.shape[0] and value.shape[0] % num_rows == 0:
            found.append(value)
    return found


def _followers(values: Sequence[Any]) -> set[str]:
    """Returns the names of the operations that depend on more than the shape."""
    found = {value.op.name for value in values}
    left = list(values)
    while left:
        for op in left.pop().consumers():
            if op.name not in found and op.type not in ("Shape", "ShapeN", "Size"):
                found.add(op.name)
                left += op.outputs
    return found


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
