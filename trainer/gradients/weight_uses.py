"""Finds the operations that use weights in a traced forward pass.

A model combines a weight, or a piece of it (the gate of a cell, a reshaped kernel),
with values of the examples.  If all operations that do so are known, an example's
gradient is a sum over them.  Each term is a function of the values that are combined
with the piece, and of the derivative of the example's loss with respect to the result
(see ``gradient_parts``).

Formal guarantees:
  - If ``find_pieces`` returns pieces, the losses depend on trainable variables through
    the uses of these pieces alone, and pieces of a variable are disjoint: the squared
    norm of a gradient is the sum of those of the pieces.
  - A use that is not known is an error, and never left out.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.gradients.traced_losses import static_value

#: Operations that read rows of a table, whose ids are their second input.
LOOK_UPS = ("GatherV2", "ResourceGather")


class UnknownUseError(Exception):
    """A use of a weight that is not known; the message says which."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """An operation that combines a piece of a weight with values of the examples.

    Attributes:
      op: Operation with one output, which depends on the examples.
      place: Index of the piece among its inputs.
    """

    op: Any
    place: int

    @property
    def other(self) -> Any:
        """The other input of a binary operation; None if there is none."""
        return self.op.inputs[1 - self.place] if len(self.op.inputs) > 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A variable or a part of it, with all its uses.

    Attributes:
      variable: Index among the variables.
      path: Steps from the variable to the piece.
      value: Tensor of the piece; a copied piece that is the whole variable has its
        handle.
      source: The variable's handle in this graph.
      shape: Shape of the piece.
      uses: Uses of the piece, at least one.
    """

    variable: int
    path: tuple[Any, ...]
    value: Any
    source: Any
    shape: tuple[int, ...]
    uses: tuple[Use, ...]

    @property
    def reads_rows(self) -> bool:
        """Whether all uses read rows of a table."""
        return all(use.op.type in LOOK_UPS for use in self.uses)


def find_pieces(
    losses: Any, variables: Sequence[Any], has_rows: Callable[[Any], bool]
) -> list[Piece]:
    """Returns the pieces of all variables that the losses depend on.

    Args:
      losses: Tensor of a traced graph, (batch,).
      variables: Trainable variables.
      has_rows: Function that returns whether a tensor depends on the examples.

    Raises:
      UnknownUseError: a use is not known, or pieces of a variable overlap.
    """
    walk = _Walk(ancestors(losses), has_rows)
    handles = {id(variable.handle): i for i, variable in enumerate(variables)}
    for external, placeholder in losses.graph.captures:
        if id(external) in handles:
            walk.follow_variable(
                handles[id(external)], variables[handles[id(external)]], placeholder
            )
    pieces = [
        dataclasses.replace(piece, uses=tuple(uses))
        for piece, uses in walk.found.values()
    ]
    for piece in pieces:
        _check_apart(piece, pieces, variables[piece.variable].name)
    return pieces


def ancestors(value: Any) -> set[str]:
    """Returns the names of the operations from which a tensor is computed."""
    found: set[str] = set()
    left = [value.op]
    while left:
        op = left.pop()
        if op.name not in found:
            found.add(op.name)
            left += [each.op for each in op.inputs]
    return found


class _Walk:
    """Follows variables through a graph to their uses."""

    def __init__(self, live: set[str], has_rows: Callable[[Any], bool]) -> None:
        self._live = live
        self._has_rows = has_rows
        self.found: dict[Any, tuple[Piece, list[Use]]] = {}

    def follow_variable(self, index: int, variable: Any, handle: Any) -> None:
        """Follows a variable to its uses.

        Args:
          index: Index of the variable among the trainable ones.
          variable: TensorFlow variable.
          handle: Placeholder of the variable in the graph.

        Raises:
          UnknownUseError: a use is not known.
        """
        piece = Piece(
            variable=index,
            path=(),
            value=handle,
            source=handle,
            shape=tuple(variable.shape),
            uses=(),
        )
        for op, place in self._consumers(handle):
            if op.type == "ReadVariableOp":
                self._follow(dataclasses.replace(piece, value=op.outputs[0]))
            elif op.type == "ResourceGather":
                self._gather(piece, op, place)
            else:
                raise UnknownUseError(
                    f"{variable.name} is read by {op.type} ({op.name})"
                )

    def _consumers(self, value: Any) -> list[tuple[Any, int]]:
        found = []
        for op in value.consumers():
            if op.name in self._live:
                names = [each.name for each in op.inputs]
                places = [i for i, name in enumerate(names) if name == value.name]
                found += [(op, place) for place in places]
        return list({(op.name, place): (op, place) for op, place in found}.values())

    def _follow(self, piece: Piece) -> None:
        for op, place in self._consumers(piece.value):
            others = [v for i, v in enumerate(op.inputs) if i != place]
            if op.type == "Shape":
                continue
            if op.type == "GatherV2" and place == 0:
                self._gather(piece, op, place)
            elif any(self._has_rows(value) for value in others):
                self._use(piece, op, place)
            else:
                self._cut(piece, op, place)

    def _gather(self, piece: Piece, op: Any, place: int) -> None:
        plain = op.get_attr("batch_dims") == 0 and (
            op.type == "ResourceGather" or _static(op.inputs[2], op) == (0,)
        )
        if not plain or len(piece.shape) != 2:
            raise UnknownUseError(f"{_said(op)} does not read rows of a table")
        if self._has_rows(op.inputs[1]):
            self._use(piece, op, place)
            return
        ids = _static(op.inputs[1], op)
        if len(set(ids)) != len(ids) or min(ids, default=0) < 0:
            raise UnknownUseError(f"{_said(op)} reads a row twice")
        self._go_on(piece, op.outputs[0], ("rows", ids))

    def _use(self, piece: Piece, op: Any, place: int) -> None:
        known = _KNOWN_USES.get(op.type)
        use = Use(op=op, place=place)
        if known is None or not known(use, piece.shape):
            raise UnknownUseError(f"{_said(op)} uses a weight in an unknown way")
        key = piece.variable, piece.path
        self.found.setdefault(key, (piece, []))[1].append(use)

    def _cut(self, piece: Piece, op: Any, place: int) -> None:
        steps = _CUTS.get(op.type)
        if steps is None or not all(v.shape.is_fully_defined() for v in op.outputs):
            raise UnknownUseError(f"{_said(op)} changes a weight before its use")
        for value, step in zip(op.outputs, steps(op, place), strict=True):
            self._go_on(piece, value, step)

    def _go_on(self, piece: Piece, value: Any, step: Any) -> None:
        if not value.shape.is_fully_defined():
            raise UnknownUseError(f"{value.op.name} has an open shape")
        shape = tuple(value.shape.as_list())
        path = piece.path
        if step == _RESHAPED:
            if path and path[-1][0] == "reshaped":
                path = path[:-1]
            if shape != _shape_before(piece, path):
                path = (*path, ("reshaped", shape))
        elif step is not None:
            path = (*path, (*step, shape))
        self._follow(dataclasses.replace(piece, value=value, path=path, shape=shape))


def _shape_before(piece: Piece, path: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Returns the shape after the steps of a path; None if it is not known."""
    return path[-1][-1] if path else (piece.shape if not piece.path else None)


def _said(op: Any) -> str:
    return f"{op.type} ({op.name})"


_RESHAPED = ("reshaped",)


def _static(value: Any, op: Any) -> tuple[int, ...]:
    found = static_value(value)
    if found is None:
        raise UnknownUseError(f"{_said(op)} follows values that are not known")
    return tuple(int(x) for x in np.ravel(found))


def _split(op: Any, place: int) -> list[Any]:
    axis = op.inputs[0] if op.type == "Split" else op.inputs[2]
    sizes = tuple(tuple(value.shape.as_list()) for value in op.outputs)
    kind = ("split", _static(axis, op), sizes)
    return [(*kind, i) for i in range(len(op.outputs))]


#: Operations whose outputs are disjoint parts of a weight, reordered or negated -> a
#: step of ``Piece.path`` for each output; None for no step.
_CUTS: dict[str, Callable[[Any, int], list[Any]]] = {
    "Identity": lambda op, place: [None],
    **dict.fromkeys(
        ("ExpandDims", "Reshape", "Squeeze"), lambda op, place: [_RESHAPED]
    ),
    "Neg": lambda op, place: [("negated",)],
    "Split": _split,
    "SplitV": _split,
    "Transpose": lambda op, place: [("transposed", _static(op.inputs[1], op))],
    "Unpack": lambda op, place: [
        ("unpacked", op.get_attr("axis"), i) for i in range(len(op.outputs))
    ],
}

#: Kinds of steps to a part, whose index is the last element before the shape.
_PARTITIONS = ("split", "unpacked")


def _check_apart(piece: Piece, pieces: Sequence[Piece], name: str) -> None:
    """Checks that a piece is disjoint from the other pieces of its variable."""
    for other in pieces:
        if other.variable != piece.variable or other is piece:
            continue
        pairs = zip(piece.path, other.path, strict=False)
        apart = next(((a, b) for a, b in pairs if a != b), None)
        if apart is None or not _are_parts(*apart):
            raise UnknownUseError(f"{name} is used in two ways")


def _are_parts(left: Any, right: Any) -> bool:
    """Whether two steps are to different parts of one partition."""
    (kind, *_), same = left, left[:-2] == right[:-2]
    return kind in _PARTITIONS and same and left[-2] != right[-2]


# -- known uses --------------------------------------------------------------------

_Known = Callable[[Use, tuple[int, ...]], bool]


def _is_mat_mul(use: Use, shape: tuple[int, ...]) -> bool:
    names = ("transpose_a", "adj_x")
    turned = [use.op.get_attr(name) for name in names if name in use.op.node_def.attr]
    return use.place == 1 and len(shape) == 2 and not any(turned)


def _is_channels_last(use: Use, shape: tuple[int, ...]) -> bool:
    return use.place == 1 and use.op.get_attr("data_format") in (b"NHWC", b"NDHWC")


def _is_broadcast(use: Use, shape: tuple[int, ...]) -> bool:
    rank = use.op.outputs[0].shape.rank
    within = rank is not None and (
        len(shape) < rank or (len(shape) == rank and shape[0] == 1)
    )
    return within and use.op.outputs[0].shape[1:].is_fully_defined()


def _is_convolution(use: Use, shape: tuple[int, ...]) -> bool:
    padded = use.op.get_attr("padding") in (b"SAME", b"VALID")
    known = use.op.outputs[0].shape[1:].is_fully_defined()
    return padded and known and _is_channels_last(use, shape)


def _is_undilated(use: Use, shape: tuple[int, ...]) -> bool:
    plain = set(use.op.get_attr("dilations")) == {1}
    ungrouped = use.op.inputs[0].shape[-1] == shape[-2]
    return plain and ungrouped and _is_convolution(use, shape)


def einsum_letters(use: Use) -> tuple[str, str, str]:
    """Returns the einsum indices of the rows, of the weight and of the result."""
    terms, _, result = use.op.get_attr("equation").decode().partition("->")
    names = terms.split(",")
    return names[1 - use.place], names[use.place], result


def _is_einsum(use: Use, shape: tuple[int, ...]) -> bool:
    if len(use.op.inputs) != 2 or "." in use.op.get_attr("equation").decode():
        return False
    rows, weight, result = einsum_letters(use)
    distinct = all(len(set(x)) == len(x) for x in (rows, weight, result))
    # An index of the weight alone would sum over the weight.
    covered = set(weight) <= set(rows) | set(result)
    return distinct and covered and rows[0] == result[0] not in weight


def _is_rows_of_table(use: Use, shape: tuple[int, ...]) -> bool:
    return use.op.inputs[1].shape[1:].is_fully_defined()


#: Type of an operation -> whether its use of a piece of a given shape is known.
_KNOWN_USES: Mapping[str, _Known] = {
    **dict.fromkeys(("AddV2", "Mul", "Sub"), _is_broadcast),
    **dict.fromkeys(("BatchMatMulV2", "MatMul"), _is_mat_mul),
    **dict.fromkeys(LOOK_UPS, _is_rows_of_table),
    "BiasAdd": _is_channels_last,
    "Conv2D": _is_convolution,
    "Conv3D": _is_undilated,
    "DepthwiseConv2dNative": _is_convolution,
    "Einsum": _is_einsum,
}
