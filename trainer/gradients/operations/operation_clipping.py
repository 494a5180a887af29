"""Clipped sums with one forward and one backward pass, for operations that are known.

The traced forward pass shows every operation that uses a weight (``weight_uses``).
Back-propagation to the outcomes of these operations gives the derivatives from which
each example's gradient follows (``use_gradients``): its norm, and then, after scaling,
the sum of the clipped gradients.  No list of layers is needed: attention,
normalisation, convolutions and cells of recurrent layers are products, sums and
windows, and so are weights that are used more than once.

Formal guarantees:
  - Those of ``clipping``, for models without ``operations_obstacle``: rows are proven
    to be apart in the traced graph, and all uses of all trainable variables are known.
  - Where the graph of a physical batch uses weights in another way than the graph of
    the proof, gradients are computed for one example at a time instead.

Sensitive: everything here but the obstacle.

References:
  Goodfellow (2015), arXiv:1510.01799; Bu et al. (2023), arXiv:2210.00038.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.validation import InputError
from trainer.gradients.operations import moved_weights
from trainer.gradients.operations.copied_graph import with_changes
from trainer.gradients.operations.moved_weights import Change, changes_of
from trainer.gradients.operations.plain_layers import has_recurrent_layers, plain_layers
from trainer.gradients.operations.use_gradients import by_example, part_of
from trainer.gradients.operations.weight_uses import (
    Piece,
    UnknownUseError,
    Use,
    find_pieces,
)
from trainer.gradients.per_example import (
    align,
    clip_scale,
    keep_rows,
    real_rows,
    zero_others,
)
from trainer.gradients.row_independence import Rows, classify, losses_obstacle
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import tf

#: (columns, weight) -> a gradient for each variable.
_Sum = Callable[[Mapping[str, Any], Any], list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Finding:
    """What the graph of the proof shows.

    Attributes:
      obstacle: Why the sums here would be wrong; None if they are exact.
      signature: Signature of all pieces.
      formed_values: What weights of its own need of memory for an example, at most.
      time_steps: Time steps of the longest recurrent layer.
    """

    obstacle: str | None = None
    signature: Any = None
    formed_values: int = 0
    time_steps: int = 1


#: Of each network: what its graph depends on beside it, and what was found.
_found: weakref.WeakKeyDictionary[Any, tuple[Any, _Finding]] = (
    weakref.WeakKeyDictionary()
)


def operations_obstacle(model: TrainableModel) -> str | None:
    """Returns why the sums here would be wrong for a model; None if they are exact."""
    return _finding(model).obstacle


def copies_of_gradients(model: TrainableModel) -> int:
    """Returns how often a gradient of one example stands in memory: at every step."""
    if not has_recurrent_layers(model.network):
        return 1
    return _finding(model).time_steps


def num_formed_values(model: TrainableModel) -> int:
    """Returns how many values an example needs for weights of its own, at most."""
    return _finding(model).formed_values


def _finding(model: TrainableModel) -> _Finding:
    key = model.trace_key
    if model.network not in _found or _found[model.network][0] != key:
        _found[model.network] = key, _find(model)
    return _found[model.network][1]


def _find(model: TrainableModel) -> _Finding:
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
    except Exception as error:  # of the user's layers, where the batch size is open
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
    """Returns all pieces, if rows are apart and all uses are known."""
    losses = graph.structured_outputs
    captured = {id(placeholder) for _, placeholder in graph.captures}
    columns = [value for value in graph.inputs if id(value) not in captured]
    kinds = classify(graph, columns)
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
      model: Without ``operations_obstacle``.
      l2_norm_clip: Above 0; infinity leaves gradients as they are.
      linf_norm_clip: Bound on single coordinates, afterwards; None for none.
      otherwise: The same function by other means, where a trace is not as proven.
    """

    def in_graph(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        found = backward(model, keep_rows(columns, real), weight.shape[0])
        return found.clipped_sum(real, l2_norm_clip, linf_norm_clip)

    return as_proven(model, in_graph, otherwise)


def as_proven(model: TrainableModel, in_graph: _Sum, otherwise: _Sum) -> _Sum:
    """Returns a sum that takes its passes by ``backward``, in a graph.

    Args:
      model: Without ``operations_obstacle``.
      in_graph: Calls ``backward`` for the model.
      otherwise: The same function by other means, where a trace is not as proven.
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
    """The uses of the weights in one pass, and the derivatives by their outcomes.

    Everything is per example, in the rows of the batch.  Sensitive.
    """

    model: TrainableModel
    losses: Any
    pieces: list[Piece]
    slopes: list[list[Any]]
    parts: list[Any]

    def norms(self) -> Any:
        """Returns a bound on the L2 norm of each example's gradient, shape (batch,)."""
        return tf.sqrt(tf.add_n([part.squared_norm() for part in self.parts]))

    def clipped_sum(
        self, real: Any, l2_norm_clip: float, linf_norm_clip: float | None = None
    ) -> list[Any]:
        """Returns the sum of the clipped gradients of real rows, for each variable.

        Args:
          real: bool of shape (batch,).
          l2_norm_clip: Above 0; infinity leaves gradients as they are.
          linf_norm_clip: Bound on single coordinates, afterwards; None for
            none.
        """
        cap = None if linf_norm_clip in (None, math.inf) else linf_norm_clip
        kept, scale = clip_scale(self.norms(), real, l2_norm_clip)
        sums = [part.clipped(kept, scale, cap)[0] for part in self.parts]
        return _of_variables(self.pieces, sums, self.model.variables)

    def moved(self, kept: Any, scale: Any) -> BackwardPass:
        """Returns the pass in which every example has weights of its own.

        Args:
          kept: bool of shape (batch,): examples whose weights move.
          scale: Factor per example, shape (batch,): times its gradient, the move of an
            example.

        Raises:
          UnknownUseError: an example looks up other rows where its weights have moved.
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
    """Returns one forward and backward pass, in a graph.

    Args:
      model: Without ``operations_obstacle``.
      columns: Rows that may not contribute hold values as good as any.
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
    outcomes = [[use.op.outputs[0] for use in piece.uses] for piece in pieces]
    found = tf.gradients(
        tf.reduce_sum(losses),
        tf.nest.flatten(outcomes),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    found = [tf.convert_to_tensor(value) for value in found]
    slopes = tf.nest.pack_sequence_as(outcomes, found)
    parts = [
        part_of(piece, of_piece, num_rows)
        for piece, of_piece in zip(pieces, slopes, strict=True)
    ]
    return BackwardPass(
        model=model, losses=losses, pieces=pieces, slopes=slopes, parts=parts
    )


def _by_row(slope: Any, kept: Any, scale: Any) -> Any:
    rows = by_example(slope, scale.shape[0])
    scaled = zero_others(rows, kept) * align(scale, rows)
    return tf.reshape(scaled, slope.shape)


def _change_of_copy(place: int, change: Change, op: Any) -> Any:
    return change(Use(op=op, place=place))


def _piece_of_copies(piece: Piece, copies: Mapping[str, Any]) -> Piece:
    uses = [dataclasses.replace(use, op=copies[use.op.name]) for use in piece.uses]
    return dataclasses.replace(piece, uses=tuple(uses))


def _uniform_rows(graph: Any, num_rows: int) -> list[Any]:
    """Returns constants that hold one number, and whose axis 0 may be the batch.

    Recurrent layers begin with such states where the number of rows is known.  A
    weight meets no other constant in a graph that was proven.
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
    """Returns names of the operations whose outcome depends on more than the shape."""
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
    """Returns the sums for whole variables, zeros where none of a piece is one."""
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
    """Returns the gradient of a variable from that of a piece of it."""
    if not piece.path:
        return total
    # What a weight becomes on its way to a piece is linear: its derivative puts the
    # values of the piece where they came from.
    (found,) = tf.gradients(piece.value, [piece.source], [tf.convert_to_tensor(total)])
    return found


def _plus(left: Any, right: Any) -> Any:
    return tf.convert_to_tensor(left) + tf.convert_to_tensor(right)
