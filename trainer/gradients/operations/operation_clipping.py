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
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.validation import InputError
from trainer.gradients.operations.plain_layers import has_recurrent_layers, plain_layers
from trainer.gradients.operations.use_gradients import part_of
from trainer.gradients.operations.weight_uses import Piece, UnknownUseError, find_pieces
from trainer.gradients.per_example import clip_scale, keep_rows, real_rows
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
      signature: Of all pieces.
      time_steps: Of the longest recurrent layer.
    """

    obstacle: str | None = None
    signature: Any = None
    time_steps: int = 1


#: Of each network: the loss and the trainable variables, and what was found.
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


def _finding(model: TrainableModel) -> _Finding:
    key = (model.loss, *(variable.ref() for variable in model.variables))
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
    signature, why = None, None
    try:
        graph = function.get_concrete_function(model.column_specs).graph
        signature = _proven_signature(graph, model.variables)
    except (InputError, UnknownUseError) as error:
        why = str(error)
    except Exception as error:  # of the user's layers, where the batch size is open
        why = f"it cannot be traced ({type(error).__name__})"
    return _Finding(
        obstacle=why, signature=signature, time_steps=max(lengths, default=1)
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


def _proven_signature(graph: Any, variables: Sequence[Any]) -> Any:
    """Returns the signature of all pieces, if rows are apart and all uses are known."""
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
    return _signature(pieces)


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
      linf_norm_clip: Of single coordinates, afterwards; None for none.
      otherwise: The same function by other means, where a trace is not as proven.
    """
    cap = None if linf_norm_clip in (None, math.inf) else linf_norm_clip

    def in_graph(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        safe = keep_rows(columns, real)
        losses = _plain_losses(model)(safe)
        pieces = _pieces(losses, model, list(safe.values()))
        if _signature(pieces) != _finding(model).signature:
            return otherwise(columns, weight)
        parts = _parts(losses, pieces, weight.shape[0])
        norms = tf.sqrt(tf.add_n([part.squared_norm() for part in parts]))
        kept, scale = clip_scale(norms, real, l2_norm_clip)
        sums = [part.clipped(kept, scale, cap)[0] for part in parts]
        return _of_variables(pieces, sums, model.variables)

    function = tf.function(in_graph, autograph=model.needs_autograph)

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        traced = not tf.executing_eagerly()
        return (in_graph if traced else function)(dict(columns), weight)

    return gradient_sum


def _pieces(losses: Any, model: TrainableModel, columns: Sequence[Any]) -> list[Piece]:
    """Returns the pieces in the graph that is made; none if it is not as proven."""
    rows = _followers(columns)
    try:
        return find_pieces(losses, model.variables, lambda value: value.op.name in rows)
    except UnknownUseError:
        return []


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


def _parts(losses: Any, pieces: Sequence[Piece], num_rows: int) -> list[Any]:
    outcomes = [use.op.outputs[0] for piece in pieces for use in piece.uses]
    found = tf.gradients(
        tf.reduce_sum(losses),
        outcomes,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    slopes = iter([tf.convert_to_tensor(value) for value in found])
    return [
        part_of(piece, [next(slopes) for _ in piece.uses], num_rows) for piece in pieces
    ]


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
