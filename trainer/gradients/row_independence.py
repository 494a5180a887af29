"""Proves from a traced graph that no example's loss depends on another example.

Each tensor of the graph has one of these kinds:

    constant      independent of the rows and of their number
    rows(m)       axis 0 has ``m`` consecutive entries per example, in order, which
                  depend on this example alone
    moved(m, a)   the same of an axis ``a`` > 0, as in a recurrent layer that puts time
                  first
    sizes         numbers that follow from the number of rows, used as shapes
    unknown       anything else

Each type of operation has a rule that gives the kind of its outputs.  The outputs of an
operation without a rule are unknown, and so is everything computed from them.  The
proof therefore refuses models that it does not understand, some of which keep rows
apart; their examples are computed one at a time.

The graph is pure (see ``core.step.pure_graph``): nothing writes what it reads.

Formal guarantees:
  - If ``losses_obstacle`` returns None, entry i of ``losses`` is a function of row i of
    the columns and of the model's weights, and so is its derivative with respect to any
    tensor of rows.  Operations with a custom gradient are unknown, except TensorFlow's
    own ``silu``, whose gradient is replaced by that of its operations.  Operations on
    numbers for which TensorFlow has registered no gradient are unknown, too.
  - This is so to the last bit: no sum tells the place of a row (``is_row_by_row``), and
    no other size than that of the batch is unknown.
  - Sizes are used in shapes alone: a value that depends on the number of rows, such as
    a position within the batch, is unknown.

Public: everything here; no example is read.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.core.step.kernels import is_row_by_row
from trainer.core.tf_compat import gradient_registry, tf
from trainer.gradients.traced_losses import static_value, with_known_sizes


@dataclasses.dataclass(frozen=True)
class PerRow:
    """A tensor whose entries depend on one example each.

    Attributes:
      per_example: Number of consecutive entries of the batch axis per example.
      axis: The batch axis.
    """

    per_example: int = 1
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class _Constant:
    pass


@dataclasses.dataclass(frozen=True)
class _RowCounts:
    """Numbers that follow from the number of rows.

    Attributes:
      entries: For each number an int, ``PerRow(m)`` for m times the number of examples,
        or None if it is unknown.  None if their count is unknown.
    """

    entries: tuple[int | PerRow | None, ...] | None = None

    @property
    def batch_first(self) -> PerRow | None:
        """Kind of a tensor of this shape, if axis 0 has the size of the batch."""
        first = self.entries[0] if self.entries else None
        return first if isinstance(first, PerRow) else None

    @property
    def known(self) -> bool:
        """Whether the numbers are independent of the number of rows."""
        entries = self.entries
        return entries is not None and all(isinstance(x, int) for x in entries)


@dataclasses.dataclass(frozen=True)
class _Unknown:
    why: str = ""


Kind = PerRow | _Constant | _RowCounts | _Unknown
_CONSTANT = _Constant()
_ROWS = PerRow()

#: As ``_RowCounts.entries``.
_Entries = tuple[Any, ...] | None
_SizeRule = Callable[[Any, Sequence[_Entries]], _Entries]

#: (operation, kinds of its inputs) -> kind of its outputs; None for unknown.
_Rule = Callable[[Any, Sequence[Kind]], Kind | None]


def losses_obstacle(losses: Any, kinds: Mapping[str, Kind]) -> str | None:
    """Returns why ``losses`` are not one number per example; None if they are.

    Args:
      losses: Tensor of a traced graph, (batch,).
      kinds: Kinds of the graph's tensors, from ``classify``.
    """
    found = kinds[losses.name]
    if found == _ROWS and len(losses.shape) == 1:
        return None
    if isinstance(found, _Unknown):
        return found.why
    return "the loss is not one number per example"


def classify(graph: Any, inputs: Sequence[Any]) -> dict[str, Kind]:
    """Returns the kind of every tensor of a graph, by name.

    Args:
      graph: Graph of a traced function that is pure.
      inputs: Placeholders of the columns, whose axis 0 is the batch.
    """
    rows = {value.name for value in inputs}
    sized = with_known_sizes(graph, inputs)
    kinds: dict[str, Kind] = {}
    for op in graph.get_operations():  # in the order of their creation
        given = [kinds[value.name] for value in op.inputs]
        found = _kind_of(op, given)
        if isinstance(found, PerRow):
            of_values = [*given, *[found] * len(op.outputs)]
            if op.name not in sized or not _is_sized(sized[op.name], of_values):
                found = _Unknown(f"{op.type} ({op.name}) may tell the place of a row")
        for value in op.outputs:
            kinds[value.name] = _ROWS if value.name in rows else found
    return kinds


def _is_sized(op: Any, kinds: Sequence[Kind]) -> bool:
    """Whether by known sizes no bit of a result tells the place of a row.

    Args:
      op: Operation in a graph of known sizes.
      kinds: Kinds of its inputs and outputs.
    """
    for value, kind in zip((*op.inputs, *op.outputs), kinds, strict=True):
        if value.dtype == tf.resource:
            continue  # a variable or a table
        if value.shape.rank is None:
            return False
        batch = kind.axis if isinstance(kind, PerRow) else None
        if any(n is None and i != batch for i, n in enumerate(value.shape)):
            return False
    return is_row_by_row(op)


def _kind_of(op: Any, kinds: Sequence[Kind]) -> Kind:
    for kind in kinds:
        if isinstance(kind, _Unknown):
            return kind
    if "_gradient_op_type" in op.node_def.attr and not is_silu(op):
        return _Unknown(f"{op.name} has a gradient of its own")
    if all(isinstance(kind, _Constant) for kind in kinds):
        return _of_constants(op)
    axes = {kind.axis for kind in kinds if isinstance(kind, PerRow)}
    if axes:
        known = axes == {0} or op.type in _OF_MOVED
        rule = _RULES.get(op.type) if known else None
        found = rule(op, kinds) if rule is not None else None
        shapes = [value.shape for value in op.outputs[:1]]
        if isinstance(found, PerRow) and not all(
            (shape.rank or 0) > found.axis and shape[found.axis] is None
            for shape in shapes
        ):
            # `==` of shapes that do not fit is one False; a size is of one batch alone.
            found = None
    else:
        found = _of_sizes(op, kinds)
    return found or _Unknown(f"{op.type} ({op.name}) is not known to keep rows apart")


def _of_constants(op: Any) -> Kind:
    if op.type in ("ReadVariableOp", "ResourceGather") or not op.op_def.is_stateful:
        return _CONSTANT
    # Captured by the trace: weights, and tensors from outside of it.
    if op.type == "Placeholder":
        return _CONSTANT
    return _Unknown(f"{op.type} ({op.name}) has a state of its own")


# -- custom gradients --------------------------------------------------------------


def is_silu(op: Any) -> bool:
    """Whether an operation with a custom gradient is the result of ``tf.nn.silu``.

    It is if the code that computes its gradient is TensorFlow's for ``silu``.
    """
    code = _gradient_code(op)
    return not _has_further_uses(op) and code is not None and code is _code_of_silu()


def _has_further_uses(op: Any) -> bool:
    """Whether something reads other results of an operation than its first."""
    return any(value.consumers() for value in op.outputs[1:])


@functools.cache
def _code_of_silu() -> Any:
    with tf.Graph().as_default():
        return _gradient_code(tf.nn.silu(tf.zeros(1)).op)


def _gradient_code(op: Any) -> Any:
    """Returns the code object of an operation's custom gradient; None if unknown."""
    try:
        function = gradient_registry.lookup(op.get_attr("_gradient_op_type"))
        for name in ("tape_grad_fn", "grad_fn"):
            cells = zip(
                function.__code__.co_freevars, function.__closure__, strict=True
            )
            function = dict(cells)[name].cell_contents
        return function.__code__
    except (AttributeError, KeyError, LookupError, TypeError, ValueError):
        return None


# -- sizes -------------------------------------------------------------------------


def _of_sizes(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    if all(map(_is_constant, kinds)):
        return _of_known_sizes(op, kinds)
    if op.type in _UNIFORM:
        # All entries are equal: rows are apart, whichever axis is the batch.
        place = _UNIFORM[op.type]
        scalar = (
            isinstance(kinds[place], _Constant) and op.inputs[place].shape.rank == 0
        )
        shape = kinds[1 - place]
        # Along an axis of unknown size, a sum would be the number of rows.
        sized = op.outputs[0].shape[1:].is_fully_defined()
        if not (scalar and sized and isinstance(shape, _RowCounts)):
            return None
        return shape.batch_first
    rule = _SIZE_RULES.get(op.type)
    return None if rule is None else _RowCounts(_by_rule(op, kinds, rule))


def _is_constant(kind: Kind) -> bool:
    return isinstance(kind, _Constant) or (isinstance(kind, _RowCounts) and kind.known)


def _of_known_sizes(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    """Returns sizes where a rule gives their values, and otherwise a constant."""
    if op.op_def.is_stateful:
        return None
    rule = _SIZE_RULES.get(op.type)
    found = _RowCounts(None if rule is None else _by_rule(op, kinds, rule))
    return found if found.known else _CONSTANT


def _by_rule(op: Any, kinds: Sequence[Kind], rule: _SizeRule) -> _Entries:
    inputs, shape = zip(op.inputs, kinds, strict=True), op.outputs[0].shape
    found = rule(op, [_entries(value, kind) for value, kind in inputs])
    if found is None or shape.rank not in (0, 1):
        return None  # the rules know numbers and vectors, and no other order
    if len(found) != shape.num_elements():
        return None
    kind = op.outputs[0].dtype
    # TensorFlow wraps what leaves the type, and the rules do not.
    fits = all(kind.min <= x <= kind.max for x in found if isinstance(x, int))
    return found if fits else None


def _entries(value: Any, kind: Kind) -> tuple[Any, ...] | None:
    if isinstance(kind, _RowCounts):
        return kind.entries
    found = static_value(value)
    if found is None or np.asarray(found).dtype.kind not in "iu":
        return None
    return tuple(int(x) for x in np.ravel(found))


def _shape(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    (rows,), shape = kinds, op.inputs[0].shape
    if shape.rank is None or not isinstance(rows, PerRow):
        return _RowCounts()
    entries = shape.as_list()
    entries[0] = rows
    return _RowCounts(tuple(entries))


def _are_known(values: Sequence[_Entries]) -> bool:
    return all(
        value is not None and all(isinstance(x, int) for x in value) for value in values
    )


def _cast_entries(op: Any, values: Sequence[_Entries]) -> _Entries:
    wide = op.outputs[0].dtype in (tf.int32, tf.int64)
    return values[0] if wide else None  # others round, or have no such numbers


def _joined(op: Any, values: Sequence[_Entries]) -> _Entries:
    return None if None in values else tuple(itertools.chain(*values))  # type: ignore[arg-type]


def _strided_entries(op: Any, values: Sequence[_Entries]) -> _Entries:
    entries, *places = values
    if entries is None or not _are_known(places) or len(places[0] or ()) != 1:
        return None
    begin, end, stride = itertools.chain(*places)  # type: ignore[arg-type]
    has = {name for name in _SLICE_MASKS if op.get_attr(f"{name}_mask") & 1}
    if has & {"ellipsis", "new_axis"}:
        return None
    if "shrink_axis" in has:
        return (entries[begin],)
    first, last = None if "begin" in has else begin, None if "end" in has else end
    return entries[first:last:stride]


def _sliced_entries(op: Any, values: Sequence[_Entries]) -> _Entries:
    entries, *places = values
    if entries is None or not _are_known(places) or len(places[0] or ()) != 1:
        return None
    begin, size = itertools.chain(*places)  # type: ignore[arg-type]
    return entries[begin:] if size == -1 else entries[begin:][:size]


def _calculated_entries(op: Any, values: Sequence[_Entries]) -> _Entries:
    count = op.outputs[0].shape.num_elements()
    if not _are_known(values) or count != 1:
        return None if count is None else (None,) * count
    # Python's integers: NumPy's would wrap.
    numbers = [np.array(each, object) for each in values]
    if op.type == "FloorDiv" and not numbers[1].all():
        return None  # an error of the step
    return (int(np.ravel(_SIZE_ARITHMETIC[op.type](*numbers))[0]),)


def _gathered_entries(op: Any, values: Sequence[_Entries]) -> _Entries:
    entries, indices, _ = values
    if entries is None or indices is None or not _are_known([indices]):
        return None
    if not all(0 <= index < len(entries) for index in indices):
        return None
    return tuple(entries[index] for index in indices)


#: Operations that repeat a scalar -> index of the input that is the scalar.
_UNIFORM = {"BroadcastTo": 0, "Fill": 1}

#: Arithmetic of sizes; the result is known only if all operands are.
_SIZE_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "AddV2": np.add,
    "FloorDiv": np.floor_divide,
    "Mul": np.multiply,
    "Prod": lambda values, axes: np.prod(values),
    "Sub": np.subtract,
}

_SIZE_RULES: dict[str, _SizeRule] = {
    **dict.fromkeys(
        ("ExpandDims", "Identity", "Reshape"), lambda op, values: values[0]
    ),
    **dict.fromkeys(_SIZE_ARITHMETIC, _calculated_entries),
    "Cast": _cast_entries,
    "ConcatV2": lambda op, values: _joined(op, values[:-1]),
    "GatherV2": _gathered_entries,
    "Pack": _joined,
    "Slice": _sliced_entries,
    "StridedSlice": _strided_entries,
}


# -- rules for rows ----------------------------------------------------------------


def _only_first_has_rows(kinds: Sequence[Kind]) -> PerRow | None:
    first = kinds[0]
    others = all(isinstance(kind, _Constant) for kind in kinds[1:])
    return first if isinstance(first, PerRow) and others else None


def _aligned(op: Any, kinds: Sequence[Kind]) -> PerRow | None:
    """Returns the rows of operands whose axis 0 remains axis 0 under broadcasting."""
    rows = {kind for kind in kinds if isinstance(kind, PerRow)}
    if len(rows) != 1:
        return None
    ranks = {
        value.shape.rank
        for value, kind in zip(op.inputs, kinds, strict=True)
        if isinstance(kind, PerRow)
    }
    if len(ranks) != 1 or not all(ranks):
        return None
    (rank,) = ranks
    for value, kind in zip(op.inputs, kinds, strict=True):
        if isinstance(kind, PerRow):
            continue
        if not _is_constant(kind) or not _is_within(value, rank):
            return None
    return next(iter(rows))


def _in_pairs(op: Any, kinds: Sequence[Kind]) -> PerRow | None:
    """For powers and others: broadcast, their bits tell a row's place in the batch."""
    left, right = (value.shape for value in op.inputs)
    known = left.rank and left[1:].is_fully_defined() and left.as_list() == right
    one = any(shape.num_elements() == 1 for shape in (left, right))
    return _aligned(op, kinds) if known or one else None


def _equal_ranks(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    """For operands of equal rank and batch axis, and scalar constants."""
    rows = {kind for kind in kinds if isinstance(kind, PerRow)}
    ranks = set()
    for value, kind in zip(op.inputs, kinds, strict=True):
        if isinstance(kind, PerRow):
            ranks.add(value.shape.rank)
        elif not isinstance(kind, _Constant) or value.shape.rank != 0:
            return None
    return rows.pop() if len(rows) == 1 and len(ranks) == 1 and all(ranks) else None


def _is_within(value: Any, rank: int) -> bool:
    """Whether a constant is broadcast along axis 0 of a tensor of this rank."""
    found = value.shape.rank
    return found is not None and (
        found < rank or (found == rank and value.shape[0] == 1)
    )


def _axes(op: Any, value: Any) -> list[int] | None:
    axes, rank = static_value(value), op.inputs[0].shape.rank
    if axes is None or rank is None:
        return None
    return [int(axis) % rank for axis in axes.reshape(-1)]


def _along_axes(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    """For operations along the axes of their second input."""
    axes, rows = _axes(op, op.inputs[1]), _only_first_has_rows(kinds)
    return rows if axes is not None and 0 not in axes else None


def _reshape(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    first, shape = kinds
    if not isinstance(first, PerRow) or not isinstance(shape, (_Constant, _RowCounts)):
        return None
    if isinstance(shape, _RowCounts) and shape.batch_first is not None:
        return shape.batch_first  # m entries of equal size per example
    before, after = op.inputs[0].shape, _entries(op.inputs[1], shape)
    if not before.rank or None in before[1:].as_list() or not after:
        return None
    if not all(isinstance(size, int) and size > 0 for size in after[1:]):
        return None
    size = first.per_example * math.prod(before[1:].as_list())
    entry = math.prod(after[1:])
    return PerRow(size // entry) if size and size % entry == 0 else None


def _expand_dims(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    axis, rank = static_value(op.inputs[1]), op.inputs[0].shape.rank
    if axis is None or rank is None:
        return None
    # NumPy 2.4 makes no number of an array of one.
    return _only_first_has_rows(kinds) if axis.item() % (rank + 1) else None


def _squeeze(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    axes, rank = op.get_attr("squeeze_dims"), op.inputs[0].shape.rank
    if not axes or rank is None:
        return None
    return kinds[0] if all(axis % rank for axis in axes) else None


def _transpose(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    order, rows = static_value(op.inputs[1]), _only_first_has_rows(kinds)
    if order is None or rows is None:
        return None
    axis = [int(x) for x in order].index(rows.axis)
    return dataclasses.replace(rows, axis=axis)


def _concat(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    axes, values = _axes(op, op.inputs[-1]), set(kinds[:-1])
    if axes is None or 0 in axes or len(values) != 1:
        return None
    return next(iter(values)) if isinstance(kinds[0], PerRow) else None


def _pack(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    rank = op.inputs[0].shape.rank
    if len(set(kinds)) != 1 or not isinstance(kinds[0], PerRow) or rank is None:
        return None
    moves = op.get_attr("axis") % (rank + 1) == 0
    return dataclasses.replace(kinds[0], axis=1) if moves else kinds[0]


def _unpack(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    rank, rows = op.inputs[0].shape.rank, _only_first_has_rows(kinds)
    if not rank or rows is None:
        return None
    axis = op.get_attr("axis") % rank
    if axis == rows.axis:
        return None
    moved = dataclasses.replace(rows, axis=rows.axis - 1)
    return moved if axis < rows.axis else rows


def _split(op: Any, kinds: Sequence[Kind], *, value: int, axis: int) -> Kind | None:
    found, rank = static_value(op.inputs[axis]), op.inputs[value].shape.rank
    # Sizes of parts may not follow from the number of rows.
    rows = _only_first_has_rows([kinds[value], *kinds[:value], *kinds[value + 1 :]])
    if found is None or not rank or rows is None:
        return None
    return rows if int(found) % rank else None


def _strided_slice(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    strides, rank = static_value(op.inputs[3]), op.inputs[0].shape.rank
    rows = _only_first_has_rows(kinds)
    if rows is None or strides is None or rank is None:
        return None
    masks = {name: op.get_attr(f"{name}_mask") for name in _SLICE_MASKS}
    places = [
        {name for name, mask in masks.items() if mask >> place & 1}
        for place in range(len(strides))
    ]
    used = sum(not has & {"ellipsis", "new_axis"} for has in places)
    before, after = 0, 0  # axes of the value and of the result
    for has, stride in zip(places, strides, strict=True):
        if "ellipsis" in has:  # whatever else the place has
            before, after = before + rank - used, after + rank - used
        elif "new_axis" in has:
            after += 1
        elif before == rows.axis:
            whole = {"begin", "end"} <= has and "shrink_axis" not in has and stride == 1
            return dataclasses.replace(rows, axis=after) if whole else None
        else:
            before, after = before + 1, after + ("shrink_axis" not in has)
        if before > rows.axis:  # within an ellipsis
            break
    return dataclasses.replace(rows, axis=after - before + rows.axis)


_SLICE_MASKS = ("begin", "ellipsis", "end", "new_axis", "shrink_axis")


def _slice(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    begin, size = static_value(op.inputs[1]), static_value(op.inputs[2])
    if begin is None or size is None:
        return None
    whole = int(begin[0]) == 0 and int(size[0]) == -1
    return _only_first_has_rows(kinds) if whole else None


def _tile(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    count = static_value(op.inputs[1])
    return kinds[0] if count is not None and int(count[0]) == 1 else None


def _pad(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    widths = static_value(op.inputs[1])
    if widths is None or widths[0].any():
        return None
    return _only_first_has_rows(kinds)


def _mat_mul(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    rows = _only_first_has_rows(kinds)
    return rows if not op.get_attr("transpose_a") else None


def _batch_mat_mul(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    rank = max(value.shape.rank or 0 for value in op.inputs)
    return _aligned(op, kinds) if rank >= 3 else None


def _gather(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    params, indices, _ = kinds
    axis, rank = static_value(op.inputs[2]), op.inputs[0].shape.rank
    if axis is None or not rank:
        return None
    place, batch_dims = int(axis) % rank, op.get_attr("batch_dims")
    if isinstance(params, _Constant):
        return indices if place == batch_dims == 0 else None
    if isinstance(indices, _Constant):
        return params if place and batch_dims == 0 else None
    # A copy of the graph has a gradient for these: see `traced_losses`.
    return params if params == indices and place == batch_dims >= 1 else None


def _resource_gather(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    constant = isinstance(kinds[0], _Constant) and not op.get_attr("batch_dims")
    return kinds[1] if constant else None


def _one_hot(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    return _only_first_has_rows(kinds) if op.get_attr("axis") else None


def _last_axis(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    """For operations along the last of at least two axes."""
    rank = op.inputs[0].shape.rank
    return _only_first_has_rows(kinds) if rank and rank >= 2 else None


def _cross_entropy(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    logits, labels = kinds
    apart = [value.shape.rank for value in op.inputs] == [2, 1]
    return logits if apart and logits == labels else None


def _windows(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    """For convolutions and pooling, whose kernels do not cross axis 0."""
    names = {"strides", "ksize"} & set(op.node_def.attr)
    apart = all(op.get_attr(name)[0] == 1 for name in names)
    return _only_first_has_rows(kinds) if apart else None


def _look_up(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    table, keys, default = kinds
    constant = isinstance(table, _Constant) and isinstance(default, _Constant)
    return keys if constant else None


def _silu(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    """For the result of TensorFlow's ``silu``, which has its inputs beside it."""
    return kinds[0] if is_silu(op) else None


def _counts(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    """For counts of values along the last of two axes; weights would know places."""
    plain = op.inputs[0].shape.rank == 2 and op.inputs[2].shape.num_elements() == 0
    return _only_first_has_rows(kinds) if plain else None


def _einsum(op: Any, kinds: Sequence[Kind]) -> Kind | None:
    equation = op.get_attr("equation").decode()
    terms, _, result = equation.partition("->")
    rows = {kind for kind in kinds if isinstance(kind, PerRow)}
    if "." in equation or not result or len(rows) != 1:
        return None
    first = result[0]
    for term, kind in zip(terms.split(","), kinds, strict=True):
        count = term.count(first)
        leads = term.startswith(first) and count == 1
        apart = _is_constant(kind) and count == 0
        if not (leads if isinstance(kind, PerRow) else apart):
            return None
    return next(iter(rows)) if result.count(first) == 1 else None


#: Not Mod and TruncateMod, which have no gradient, so that a user could register one.
_ELEMENTWISE = (
    "Abs", "Acos", "Acosh", "AddN", "AddV2", "Asin", "Asinh", "Atan", "Atanh",
    "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "ClipByValue", "Cos",
    "Cosh", "Digamma", "DivNoNan", "Elu", "Equal", "Erf", "Erfc", "Exp", "Expm1",
    "Floor", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Identity", "IsFinite",
    "IsInf", "IsNan", "LeakyRelu", "LeftShift", "Less", "LessEqual", "Lgamma", "Log",
    "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mul",
    "Neg", "NotEqual", "OnesLike", "RealDiv", "Reciprocal", "Relu", "Relu6",
    "RightShift", "Round", "Rsqrt", "SelectV2", "Selu", "Sigmoid", "Sign", "Sin",
    "Sinh", "Softplus", "Softsign", "Sqrt", "Square", "SquaredDifference",
    "StopGradient", "Sub", "Tan", "Tanh", "ZerosLike",
)  # fmt: skip

_ALONG_AXES = (
    "All", "Any", "ArgMax", "ArgMin", "Cumprod", "Cumsum", "Max", "Mean", "Min", "Prod",
    "ReverseV2", "Sum",
)  # fmt: skip

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _aligned),
    **dict.fromkeys(_ALONG_AXES, _along_axes),
    **dict.fromkeys(("Atan2", "Pow", "Xlogy"), _in_pairs),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2", "BiasAdd"), _last_axis),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _pad),
    **dict.fromkeys(
        (
            "AvgPool",
            "AvgPool3D",
            "Conv2D",
            "Conv3D",
            "DepthwiseConv2dNative",
            "MaxPool",
            "MaxPool3D",
        ),
        _windows,
    ),
    **dict.fromkeys(
        (
            "AsString",
            "Bucketize",
            "ResizeBicubic",
            "ResizeBilinear",
            "ResizeNearestNeighbor",
            "StringToHashBucketFast",
            "StringToHashBucketStrong",
        ),
        lambda op, kinds: _only_first_has_rows(kinds),
    ),
    "BatchMatMulV2": _batch_mat_mul,
    "ConcatV2": _concat,
    "DenseBincount": _counts,
    "Einsum": _einsum,
    "ExpandDims": _expand_dims,
    "GatherV2": _gather,
    "IdentityN": _silu,
    "LookupTableFindV2": _look_up,
    "MatMul": _mat_mul,
    "OneHot": _one_hot,
    "Pack": _pack,
    "Reshape": _reshape,
    "ResourceGather": _resource_gather,
    # Not as others: a condition of one axis chooses along the first axis, not the last.
    "Select": _equal_ranks,
    "Shape": _shape,
    "Slice": _slice,
    "SparseSoftmaxCrossEntropyWithLogits": _cross_entropy,
    "Split": lambda op, kinds: _split(op, kinds, value=1, axis=0),
    "SplitV": lambda op, kinds: _split(op, kinds, value=0, axis=2),
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unpack": _unpack,
}

#: Operations whose rules also hold where the batch axis is not the first.
_OF_MOVED = ("StridedSlice", "Transpose", "Unpack")
