"""Norms and clipped sums of one part of each example's gradient, in floating point.

    OuterProducts     sum_s x_s^T d_s over positions s
    TableRows         for each row of a table, the sum of d_s where it is read
    FormedGradients   any other gradient, computed for each example

The clip must bound the vector that is *added*, rounding included.  Where the terms of a
sum cancel (score(A) - score(B), raw time stamps), the rounding error of the sum may
exceed the sum, and so may that of a norm from inner products.  Therefore:

  - **One position.**  There is no sum; the norm is a product of two norms.
  - **Embedding.**  The sum over equal ids is computed once; its norm is taken, and it
    is added.
  - **Dense layer, small or at more than 16 positions.**  Each example's gradient is
    formed; its norm is taken, and it is scaled and added.  If the gradients of a batch
    exceed a fixed memory, they are formed in chunks of examples, twice: for the norms
    and for the sum.
  - **Large dense layer at 2 to 16 positions.**  The norm is n^2 = sum_{s,t} <x_s,x_t>
    <d_s,d_t> in double precision; the P terms are added in single precision.  With
    scale s, u = 2^-24 and A = sum_s |x_s| |d_s|, the rounding error of these additions
    is at most (P + 1) u s A.  The norm that is clipped is sqrt(n^2 + (A / 512)^2).
    Since n <= A, it exceeds n by more than A / 530,000 > (P + 1) u A, so that the error
    is within the clip.  Without cancellation A <= sqrt(P) n, and the norm that is
    clipped is below 1.00004 n.  With cancellation the example is clipped more: s A <=
    512 C bounds the error that it leaves in partial sums.

Formal guarantees:
  - ``clipped`` adds a vector of norm at most scale times the root of ``squared_norm``,
    up to a relative error of 1e-4, however large inputs and derivatives are.
  - Derivatives whose squares underflow are counted: a tiny derivative times a huge
    input is not taken for zero.
  - At most a fixed number of values of formed gradients is held at a time, or the
    gradient of one example if that has more.

A part is the gradient with respect to a piece of a weight, from the operations that use
the piece:

    use                          gradient of an example with respect to the piece
    ---                          ------------------------------------------------
    x W                          sum over positions of x^T d
    table[ids]                   for each row, the sum of d where it is read
    v + w,  v - w,  v * w        d, -d, d * v, summed over the axes of broadcasting
    convolution                  sum over places of patch^T d
    einsum                       einsum of x and d to the indices of the weight

where ``d`` is the derivative of the example's loss with respect to the result.  The
gradients of several uses of a piece, as in the steps of a recurrent cell, are added.

Sensitive: everything here.

References:
  Goodfellow (2015), arXiv:1510.01799, and Li et al. (2022), arXiv:2110.05679, for norms
  through inner products; Bu et al. (2023), arXiv:2210.00038, for the sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trainer.core.step.clipping import (
    cap_coordinates,
    clip_to_norm,
    concat_in_chunks,
    scale_rows,
    squared_norms,
    sum_in_chunks,
    zero_others,
)
from trainer.core.tf_compat import tf
from trainer.gradients.weight_uses import Piece, Use, einsum_letters

#: Largest number of values of formed gradients that are held at a time.
_MOST_HELD_VALUES = 1 << 23

#: Largest number of positions at which gradients of large layers are not formed.
_MOST_POSITIONS = 16

#: Values of the gradient per pair of positions, above which a layer is large.
_LARGE = 64

#: Ratio A / n above which an example with cancelling terms is clipped noticeably more.
_CONDITION = 512.0

#: Largest number of ids of an example that are compared in pairs.
_MOST_PAIRED_IDS = 64

#: Single-precision squares below this may be flushed to zero.
_TINY = 2.0**-126


class Part(Protocol):
    """A part of each example's gradient."""

    def squared_norm(self) -> Any:
        """Returns an upper bound on each example's squared norm, (batch,)."""

    def clipped(self, scale: Any, cap: float | None) -> list[Any]:
        """Returns the sums of the scaled gradients; call ``squared_norm`` before.

        Args:
          scale: Factor per example, (batch,), 0 for those that add nothing.
          cap: Largest coordinate of a scaled gradient; None for no bound.
        """


class FormedGradients:
    """Gradients that are formed for each example, in chunks if memory requires it.

    Args:
      form: Maps nested tensors of some examples to their gradients, one tensor
        (examples, *shape) for each of ``shapes``.
      rows: Nested tensors, each (batch, ...).
      shapes: Shapes of one example's gradients.
      work: Number of values per example that ``form`` holds besides its result.
    """

    def __init__(
        self,
        form: Callable[[Any], list[Any]],
        rows: Any,
        *,
        shapes: Sequence[Sequence[int]],
        work: int = 0,
    ) -> None:
        self._form = form
        self._rows = rows
        self._shapes = [tuple(shape) for shape in shapes]
        values = sum(math.prod(shape) for shape in self._shapes)
        self._chunk_rows = max(1, _MOST_HELD_VALUES // max(1, values, work))
        self._held: list[Any] | None = None
        self.bound: Any = None

    def squared_norm(self) -> Any:
        """See `Part.squared_norm`."""
        num_rows = tf.nest.flatten(self._rows)[0].shape[0]
        if num_rows is not None and num_rows <= self._chunk_rows:
            self._held = self._form(self._rows)
            return squared_norms(self._held)
        self.bound = concat_in_chunks(
            lambda rows: squared_norms(self._form(rows)),
            self._rows,
            num_rows=num_rows,
            chunk_rows=self._chunk_rows,
        )
        return self.bound

    def clipped(self, scale: Any, cap: float | None) -> list[Any]:
        """See `Part.clipped`."""
        if self._held is not None:
            return _capped_sums(self._held, scale, cap)

        def of_chunk(chunk: Any) -> list[Any]:
            rows, scale, bound = chunk
            # Rounding may differ between the two times that a gradient is formed: it
            # is clipped again, to the norm of the first.
            gradients = self._form(rows)
            scale = scale * clip_to_norm(squared_norms(gradients), bound)
            return _capped_sums(gradients, scale, cap)

        rows = tf.nest.map_structure(
            lambda value: zero_others(value, scale > 0), self._rows
        )
        return sum_in_chunks(
            of_chunk,
            (rows, scale, self.bound),
            num_rows=tf.nest.flatten(rows)[0].shape[0],
            chunk_rows=self._chunk_rows,
            initial=[tf.zeros(shape) for shape in self._shapes],
        )


class OuterProducts:
    """The gradient ``sum_s x_s^T d_s``.

    Args:
      x: Inputs, (batch, positions, in).
      d: Derivatives of the losses, (batch, positions, out).
    """

    def __init__(self, x: Any, d: Any) -> None:
        self._x, self._d = x, d
        self._formed = FormedGradients(
            self._form, (x, d), shapes=[(x.shape[-1], d.shape[-1])]
        )

    def squared_norm(self) -> Any:
        """See `Part.squared_norm`."""
        if self._forms_gradients:
            return self._formed.squared_norm()
        one = self._x.shape[1] == 1
        found = self._of_one_position() if one else self._of_inner_products()
        self._formed.bound = found
        return found

    def clipped(self, scale: Any, cap: float | None) -> list[Any]:
        """See `Part.clipped`."""
        if self._forms_gradients or cap is not None:
            return self._formed.clipped(scale, cap)
        x, d = zero_others(self._x, scale > 0), scale_rows(self._d, scale)
        return [tf.matmul(_flat(x), _flat(d), transpose_a=True)]

    @property
    def _forms_gradients(self) -> bool:
        count = self._x.shape[1]
        if count == 1:
            return False
        if count is None or count > _MOST_POSITIONS:
            return True
        return self._x.shape[-1] * self._d.shape[-1] <= _LARGE * count**2

    def _form(self, rows: Any) -> list[Any]:
        x, d = rows
        return [tf.matmul(x, d, transpose_a=True)]

    def _of_one_position(self) -> Any:
        x, d = (tf.reshape(v, (-1, v.shape[-1])) for v in (self._x, self._d))
        inputs = tf.reduce_sum(tf.square(x), 1) + x.shape[1] * _TINY
        return inputs * (tf.reduce_sum(tf.square(d), 1) + d.shape[1] * _TINY)

    def _of_inner_products(self) -> Any:
        x, d = (tf.cast(v, tf.float64) for v in (self._x, self._d))
        inputs = tf.matmul(x, x, transpose_b=True)
        slopes = tf.matmul(d, d, transpose_b=True)
        exact = tf.maximum(tf.reduce_sum(inputs * slopes, (1, 2)), 0.0)
        lengths = tf.linalg.diag_part(inputs) * tf.linalg.diag_part(slopes)
        terms = tf.reduce_sum(tf.sqrt(lengths), 1)
        return tf.cast(exact + tf.square(terms / _CONDITION), tf.float32)


class TableRows:
    """The gradient of a table: for each row that an example reads, a sum of slopes.

    Args:
      ids: Rows that the examples read, integers (batch, ...).
      slope: Derivatives of the losses with respect to the values read, (batch, ...,
        size).
      shape: Shape of the table, (rows, size).
    """

    def __init__(self, ids: Any, slope: Any, shape: Any) -> None:
        self._ids, self._slope, self._shape = ids, slope, shape

    def squared_norm(self) -> Any:
        """See `Part.squared_norm`."""
        self._rows = self._row_gradients()
        return tf.reduce_sum(tf.square(positions(self._rows)), (1, 2))

    def clipped(self, scale: Any, cap: float | None) -> list[Any]:
        """See `Part.clipped`."""
        rows = cap_coordinates(scale_rows(self._rows, scale), cap)
        indices = tf.reshape(self._ids, (-1,))
        shape = tf.constant(tuple(self._shape))
        return [tf.IndexedSlices(_flat(rows), indices, shape)]

    def totals(self) -> tuple[Any, Any]:
        """Returns the sum over equal ids at each id, and whether it is the first.

        The second is None if an example has one id.
        """
        num_ids = self._ids.shape[1:].num_elements()  # None if it is not static
        if num_ids == 1:
            return self._slope, None
        if num_ids is not None and num_ids <= _MOST_PAIRED_IDS:
            return self._by_pairs(num_ids)
        return self._by_segments()

    def _row_gradients(self) -> Any:
        """Returns the sum over equal ids at the first of them, zeros at the others."""
        totals, first = self.totals()
        return totals if first is None else tf.where(first[..., None], totals, 0.0)

    def _by_pairs(self, num_ids: int) -> tuple[Any, Any]:
        ids = tf.reshape(self._ids, (-1, num_ids))
        equal = ids[:, :, None] == ids[:, None, :]
        totals = tf.matmul(tf.cast(equal, self._slope.dtype), positions(self._slope))
        earlier = tf.constant([[t < s for t in range(num_ids)] for s in range(num_ids)])
        first = tf.logical_not(tf.reduce_any(equal & earlier, 2))
        shape = tf.shape(self._slope)
        return tf.reshape(totals, shape), tf.reshape(first, shape[:-1])

    def _by_segments(self) -> tuple[Any, Any]:
        # One number for each pair of example and row.
        rows = tf.reshape(tf.cast(self._ids, tf.int64), (tf.shape(self._ids)[0], -1))
        # An id that is out of range may not be that of another example.
        rows = tf.clip_by_value(rows, -1, self._shape[0])
        offsets = tf.range(tf.shape(rows)[0], dtype=tf.int64) * (self._shape[0] + 2)
        pairs = tf.reshape(rows + offsets[:, None], (-1,))
        distinct, segments = tf.unique(pairs)
        count, places = tf.size(distinct), tf.range(tf.size(pairs))
        sums = tf.math.unsorted_segment_sum(_flat(self._slope), segments, count)
        firsts = tf.math.unsorted_segment_min(places, segments, count)
        shape = tf.shape(self._slope)
        return (
            tf.reshape(tf.gather(sums, segments), shape),
            tf.reshape(tf.gather(firsts, segments) == places, shape[:-1]),
        )


def _capped_sums(gradients: list[Any], scale: Any, cap: float | None) -> list[Any]:
    found = [cap_coordinates(scale_rows(g, scale), cap) for g in gradients]
    # Unlike sums within rows, a sum over rows need not be computed row by row.
    return [tf.raw_ops.Sum(input=one, axis=0) for one in found]


def positions(value: Any) -> Any:
    """Returns a tensor (batch, ..., size) shaped (batch, positions, size)."""
    count = value.shape[1:-1].num_elements()
    batch = value.shape[0] if value.shape[0] is not None else tf.shape(value)[0]
    return tf.reshape(value, (batch, -1 if count is None else count, value.shape[-1]))


def _flat(value: Any) -> Any:
    return tf.reshape(value, (-1, value.shape[-1]))


PRODUCTS, TABLE, OTHER = "products", "table", "other"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """Gradients from one use.

    Attributes:
      rows: Tensors (batch, ...) from which the gradients are computed.
      form: Maps ``rows`` of some examples to their gradients, (examples, *shape of the
        piece).
      work: Number of values per example that ``form`` holds besides its result.
      kind: ``PRODUCTS`` if ``rows`` are the inputs of ``OuterProducts``, ``TABLE`` if
        they are ids and d, otherwise ``OTHER``.
    """

    rows: tuple[Any, ...]
    form: Callable[[tuple[Any, ...]], Any]
    work: int = 0
    kind: str = OTHER


def part_of(piece: Piece, slopes: Sequence[Any], num_rows: int) -> Part:
    """Returns the gradients of the examples with respect to a piece.

    Args:
      piece: Piece of the graph that is being traced.
      slopes: Derivative of the losses with respect to the result of each use.
      num_rows: Number of examples of the batch.
    """
    terms = [
        term_of(use, piece.shape, slope, num_rows)
        for use, slope in zip(piece.uses, slopes, strict=True)
    ]
    (kind, *others) = {term.kind for term in terms}
    if not others and kind == PRODUCTS:
        return OuterProducts(*joined_rows(terms))
    if not others and kind == TABLE:
        return TableRows(*joined_rows(terms), piece.shape)
    return _formed(terms, piece.shape)


def term_of(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    """Returns the gradients from one use.

    Args:
      use: Use in the graph that is being traced.
      shape: Shape of the piece.
      slope: Derivative of the losses with respect to the result.
      num_rows: Number of examples of the batch.
    """
    return _TERMS[use.op.type](use, shape, slope, num_rows)


def joined_rows(terms: Sequence[Term]) -> tuple[Any, Any]:
    """Returns the two ``rows`` of all terms, each concatenated along the positions."""
    first, second = (tf.concat([term.rows[i] for term in terms], 1) for i in range(2))
    return first, second


def _formed(terms: Sequence[Term], shape: tuple[int, ...]) -> FormedGradients:
    def form(rows: Any) -> list[Any]:
        found = [term.form(each) for term, each in zip(terms, rows, strict=True)]
        return [tf.add_n(found)]

    work = sum(term.work for term in terms)
    return FormedGradients(
        form, tuple(term.rows for term in terms), shapes=[shape], work=work
    )


def split_examples(value: Any, num_rows: int) -> Any:
    """Returns ``value`` shaped (num_rows, m, ...).

    Args:
      value: Tensor (num_rows * m, ...) of static shape.
      num_rows: Number of examples of the batch.
    """
    entries = value.shape[0]
    return tf.reshape(value, (num_rows, entries // num_rows, *value.shape[1:]))


def flat_positions(value: Any, num_rows: int) -> Any:
    """Returns ``value`` shaped (num_rows, positions, size).

    Args:
      value: Tensor (num_rows * m, ..., size) of static shape.
      num_rows: Number of examples of the batch.
    """
    size = value.shape[-1]
    count = math.prod(value.shape.as_list()) // max(1, num_rows * size)
    return tf.reshape(value, (num_rows, count, size))


def is_transposed(use: Use) -> bool:
    """Whether a matrix product takes the transpose of the piece."""
    names = ("transpose_b", "adj_y")
    return any(use.op.get_attr(n) for n in names if n in use.op.node_def.attr)


def _product(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    x, d = (flat_positions(value, num_rows) for value in (use.other, slope))
    rows = (d, x) if is_transposed(use) else (x, d)
    return Term(
        rows=rows,
        form=lambda rows: tf.matmul(rows[0], rows[1], transpose_a=True),
        kind=PRODUCTS,
    )


def _table(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    ids = tf.reshape(use.op.inputs[1], (num_rows, -1))

    def form(rows: tuple[Any, ...]) -> Any:
        read = tf.one_hot(rows[0], shape[0], dtype=rows[1].dtype)
        return tf.matmul(read, rows[1], transpose_a=True)

    return Term(
        rows=(ids, flat_positions(slope, num_rows)),
        form=form,
        work=ids.shape[1] * shape[0],
        kind=TABLE,
    )


def broadcast_sizes(result: Any, shape: Sequence[int]) -> list[int]:
    """Returns the sizes of a piece along all axes of a result but the first.

    Args:
      result: Result of a broadcast operation on the piece and rows.
      shape: Shape of the piece.
    """
    rank = len(result.shape) - 1
    sizes = [1] * rank + list(shape)
    return sizes[len(sizes) - rank :]


def _broadcast(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    if use.op.type == "Mul":
        slope = slope * use.other
    elif use.op.type == "Sub" and use.place == 1:
        slope = -slope
    inner, sizes = slope.shape[1:].as_list(), broadcast_sizes(slope, shape)
    repeated = [i for i, size in enumerate(sizes) if size == 1 and inner[i] != 1]

    def form(rows: tuple[Any, ...]) -> Any:
        axes = [1, *(axis + 2 for axis in repeated)]
        # TensorFlow copies the values for a sum over one place.
        summed = [axis for axis in axes if rows[0].shape[axis] != 1]
        found = tf.reduce_sum(rows[0], summed) if summed else rows[0]
        return tf.reshape(found, (-1, *shape))

    return Term(rows=(split_examples(slope, num_rows),), form=form)


def _einsum(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    batch, rows, weight, result = einsum_of_examples(use)
    equation = f"{rows},{result}->{batch}{weight}"
    return Term(
        rows=(split_examples(use.other, num_rows), split_examples(slope, num_rows)),
        form=lambda rows: tf.einsum(equation, *rows),
    )


def einsum_of_examples(use: Use) -> tuple[str, str, str, str]:
    """Returns einsum indices: of the examples; of rows, weight and result.

    Rows and result are those of ``split_examples``.
    """
    rows, weight, result = einsum_letters(use)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    entry = next(x for x in letters if x not in rows + weight + result)
    batch = rows[0]
    return batch, batch + entry + rows[1:], weight, batch + entry + result[1:]


def _convolution(use: Use, shape: tuple[int, ...], slope: Any, num_rows: int) -> Term:
    places = math.prod(slope.shape.as_list()[1:-1]) * (slope.shape[0] // num_rows)
    window = math.prod(shape[:-2])
    groups, within, outcomes = channel_groups(use, shape)

    # Patches are large: each chunk of examples computes its own.
    def form(rows: tuple[Any, ...]) -> Any:
        images, slopes = (tf.reshape(v, (-1, *v.shape[2:])) for v in rows)
        patches = _patches(use.op, images, shape)
        patches = tf.reshape(patches, (-1, places, window, groups, within))
        slopes = tf.reshape(slopes, (-1, places, groups, outcomes))
        found = tf.einsum("npwgi,npgo->nwigo", patches, slopes)
        return tf.reshape(found, (-1, *shape))

    return Term(
        rows=(split_examples(use.other, num_rows), split_examples(slope, num_rows)),
        form=form,
        work=places * window * groups * within,
    )


def channel_groups(use: Use, shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns a convolution's number of groups, and channels in and out of each.

    Args:
      use: Use of a kernel by a convolution.
      shape: Shape of the kernel.
    """
    channels, after = use.other.shape[-1], use.op.outputs[0].shape[-1]
    depthwise = use.op.type == "DepthwiseConv2dNative"
    groups = channels if depthwise else channels // shape[-2]
    return groups, channels // groups, after // groups


def _patches(op: Any, images: Any, shape: tuple[int, ...]) -> Any:
    """Returns the patches of a convolution, (images, ..., window * channels)."""
    padding = op.get_attr("padding").decode()
    sizes, strides = [1, *shape[:-2], 1], op.get_attr("strides")
    if op.type == "Conv3D":
        return tf.extract_volume_patches(images, sizes, strides, padding)
    rates = op.get_attr("dilations")
    return tf.image.extract_patches(images, sizes, strides, rates, padding)


_TERMS: dict[str, Callable[[Use, tuple[int, ...], Any, int], Term]] = {
    **dict.fromkeys(("AddV2", "BiasAdd", "Mul", "Sub"), _broadcast),
    **dict.fromkeys(("BatchMatMulV2", "MatMul"), _product),
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative"), _convolution),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _table),
    "Einsum": _einsum,
}
