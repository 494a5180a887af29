"""Sums over an example's positions that make up its gradient: their norm, and the sum.

    OuterProducts     sum_s x_s^T d_s, and with a bias sum_s d_s
    TableRows         on each row of a table that is read, the sum of its d_s
    FormedGradients   any other: formed for each example

A clip must bound what is *added*, in floating point.  Where terms of a sum cancel
(score(A) - score(B), raw time stamps), its rounding error may exceed the sum, and so
may that of its norm through inner products.  So:

  - **one position**: nothing is summed.  The norm is a product of two norms.
  - **an embedding**: the sum at equal ids is formed once, its norm is taken, and this
    very sum is what is added.
  - **a dense layer at many positions, or a small one**: its gradient is formed for each
    example, its norm is taken, and this very gradient is scaled and added: for a chunk
    of examples at a time, twice, if all do not fit a fixed memory.
  - **a large dense layer at up to 16 positions**: n^2 = sum_{s,t} <x_s,x_t> <d_s,d_t>
    in double precision; the terms are added one by one, in single.  The rounding error
    of these additions is at most (P + 1) u s A, with u = 2^-24, A = sum_s |x_s| |d_s|
    and the scale s.  The bound that is clipped is sqrt(n^2 + (A / 512)^2).  Since
    n <= A, it exceeds n by more than A / 530,000, which is more than (P + 1) u A:
    the error is within the clip.  Where terms do not cancel, A <= sqrt(P) n, and the
    bound is below 1.00004 n; where they do, the example is clipped harder, so that
    s A <= 512 C and what it leaves in partial sums is small.

Formal guarantees:
  - ``clipped`` adds a vector of norm at most scale times the root of ``squared_norm``,
    up to a relative error of 1e-4, however large inputs and derivatives are.
  - Derivatives that underflow when squared are counted: a tiny derivative times a huge
    input is not taken for zero.
  - No more than a fixed number of values of single examples is held at a time.

Sensitive: everything here.

References:
  Goodfellow (2015), arXiv:1510.01799, and Li et al. (2022), arXiv:2110.05679, for norms
  through inner products; Bu et al. (2023), arXiv:2210.00038, for the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trainer.gradients.per_example import (
    align,
    cap_coordinates,
    clip_to_norm,
    concat_in_chunks,
    sum_in_chunks,
    zero_others,
)
from trainer.tf_compat import tf

#: Values of a sum's gradients that are held at a time.
_MOST_HELD_VALUES = 1 << 23

#: Positions up to which large sums of outer products are not formed.
_MOST_POSITIONS = 16

#: A sum of this many values per pair of positions is large.
_LARGE = 64

#: A / n above which cancellation costs an example some of its gradient.
_CONDITION = 512.0

#: Ids of an example in one table up to which all pairs are compared for equality.
_MOST_PAIRED_IDS = 64

#: Squares of single-precision values below this may be flushed to zero.
_TINY = 2.0**-126


class Part(Protocol):
    """A part of each example's gradient."""

    def squared_norm(self) -> Any:
        """Returns a bound on each example's squared norm, shape (batch,)."""

    def clipped(self, kept: Any, scale: Any, cap: float | None) -> list[Any]:
        """Returns sums of the scaled gradients of kept examples; after the norm.

        Args:
          kept: bool of shape (batch,).
          scale: Factor per example, shape (batch,).
          cap: Bound on each coordinate of an example's scaled gradient, or None.
        """


class FormedGradients:
    """Gradients that are formed for each example, in chunks if they are many.

    Args:
      form: Nested tensors of some examples -> one (examples, *shape) for each shape.
      rows: Nested tensors, (batch, ...).
      shapes: Shapes of the gradient of one example.
      work: Values per example that ``form`` needs beside its result.
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
        """See ``Part``."""
        num_rows = tf.nest.flatten(self._rows)[0].shape[0]
        if num_rows is not None and num_rows <= self._chunk_rows:
            self._held = self._form(self._rows)
            return _squared_norms(self._held)
        self.bound = concat_in_chunks(
            lambda rows: _squared_norms(self._form(rows)),
            self._rows,
            num_rows=num_rows,
            chunk_rows=self._chunk_rows,
        )
        return self.bound

    def clipped(self, kept: Any, scale: Any, cap: float | None) -> list[Any]:
        """See ``Part``."""
        if self._held is not None:
            return _capped_sums(self._held, scale, cap)

        def of_chunk(chunk: Any) -> list[Any]:
            rows, scale, bound = chunk
            # Formed anew, and clipped anew: no rounding may make it longer than what
            # was measured.
            gradients = self._form(rows)
            scale = scale * clip_to_norm(_squared_norms(gradients), bound)
            return _capped_sums(gradients, scale, cap)

        rows = tf.nest.map_structure(lambda v: zero_others(v, kept), self._rows)
        return sum_in_chunks(
            of_chunk,
            (rows, scale, self.bound),
            num_rows=tf.nest.flatten(rows)[0].shape[0],
            chunk_rows=self._chunk_rows,
            initial=[tf.zeros(shape) for shape in self._shapes],
        )


class OuterProducts:
    """``sum_s x_s^T d_s``, and with a bias ``sum_s d_s``.

    Args:
      x: (batch, positions, in).
      d: (batch, positions, out).
      bias: Whether the second sum is part of the gradient.
    """

    def __init__(self, x: Any, d: Any, *, bias: bool) -> None:
        self._x, self._d, self._bias = x, d, bias
        sizes = [(x.shape[-1], d.shape[-1])]
        self._formed = FormedGradients(
            self._form, (x, d), shapes=[*sizes, (d.shape[-1],)] if bias else sizes
        )

    def squared_norm(self) -> Any:
        """See ``Part``."""
        if self._forms_gradients:
            return self._formed.squared_norm()
        one = self._x.shape[1] == 1
        found = self._of_one_position() if one else self._of_inner_products()
        self._formed.bound = found
        return found

    def clipped(self, kept: Any, scale: Any, cap: float | None) -> list[Any]:
        """See ``Part``."""
        if self._forms_gradients or cap is not None:
            return self._formed.clipped(kept, scale, cap)
        x, d = zero_others(self._x, kept), zero_others(self._d, kept)
        d = d * align(scale, d)
        sums = [tf.matmul(_flat(x), _flat(d), transpose_a=True)]
        return [*sums, tf.reduce_sum(_flat(d), 0)] if self._bias else sums

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
        found = [tf.matmul(x, d, transpose_a=True)]
        return [*found, tf.reduce_sum(d, 1)] if self._bias else found

    def _of_one_position(self) -> Any:
        x, d = (tf.reshape(v, (-1, v.shape[-1])) for v in (self._x, self._d))
        inputs = tf.reduce_sum(tf.square(x), 1) + x.shape[1] * _TINY + float(self._bias)
        return inputs * (tf.reduce_sum(tf.square(d), 1) + d.shape[1] * _TINY)

    def _of_inner_products(self) -> Any:
        x, d = (tf.cast(v, tf.float64) for v in (self._x, self._d))
        inputs = tf.matmul(x, x, transpose_b=True) + float(self._bias)
        slopes = tf.matmul(d, d, transpose_b=True)
        exact = tf.maximum(tf.reduce_sum(inputs * slopes, (1, 2)), 0.0)
        lengths = tf.linalg.diag_part(inputs) * tf.linalg.diag_part(slopes)
        terms = tf.reduce_sum(tf.sqrt(lengths), 1)
        return tf.cast(exact + tf.square(terms / _CONDITION), tf.float32)


class TableRows:
    """Of each row of a table that an example reads, the sum of its slopes.

    Args:
      ids: Integers (batch, ...).
      slope: (batch, ..., size).
      shape: Shape of the table, (rows, size).
    """

    def __init__(self, ids: Any, slope: Any, shape: Any) -> None:
        self._ids, self._slope, self._shape = ids, slope, shape

    def squared_norm(self) -> Any:
        """See ``Part``."""
        rows = positions(self._row_gradients(self._slope))
        return tf.reduce_sum(tf.square(rows), (1, 2))

    def clipped(self, kept: Any, scale: Any, cap: float | None) -> list[Any]:
        """See ``Part``."""
        rows = self._row_gradients(zero_others(self._slope, kept))
        rows = cap_coordinates(rows * align(scale, rows), cap)
        indices = tf.reshape(self._ids, (-1,))
        shape = tf.constant(tuple(self._shape))
        return [tf.IndexedSlices(_flat(rows), indices, shape)]

    def totals(self) -> tuple[Any, Any]:
        """Returns at each id the sum over equal ids, and which are the first."""
        return self._totals(self._slope)

    def _row_gradients(self, slope: Any) -> Any:
        """Returns the sum over equal ids at the first of them, and else zeros."""
        totals, first = self._totals(slope)
        return totals if first is None else tf.where(first[..., None], totals, 0.0)

    def _totals(self, slope: Any) -> tuple[Any, Any]:
        num_ids = self._ids.shape[1:].num_elements()  # None where the length varies
        if num_ids == 1:
            return slope, None
        if num_ids is not None and num_ids <= _MOST_PAIRED_IDS:
            return self._by_pairs(slope, num_ids)
        return self._by_segments(slope)

    def _by_pairs(self, slope: Any, num_ids: int) -> tuple[Any, Any]:
        ids = tf.reshape(self._ids, (-1, num_ids))
        equal = ids[:, :, None] == ids[:, None, :]
        totals = tf.matmul(tf.cast(equal, slope.dtype), positions(slope))
        earlier = tf.constant([[t < s for t in range(num_ids)] for s in range(num_ids)])
        first = tf.logical_not(tf.reduce_any(equal & earlier, 2))
        shape = tf.shape(slope)
        return tf.reshape(totals, shape), tf.reshape(first, shape[:-1])

    def _by_segments(self, slope: Any) -> tuple[Any, Any]:
        # One number for each pair of example and row.
        rows = tf.reshape(tf.cast(self._ids, tf.int64), (tf.shape(self._ids)[0], -1))
        offsets = tf.range(tf.shape(rows)[0], dtype=tf.int64) * self._shape[0]
        pairs = tf.reshape(rows + offsets[:, None], (-1,))
        distinct, segments = tf.unique(pairs)
        count, places = tf.size(distinct), tf.range(tf.size(pairs))
        sums = tf.math.unsorted_segment_sum(_flat(slope), segments, count)
        firsts = tf.math.unsorted_segment_min(places, segments, count)
        shape = tf.shape(slope)
        return (
            tf.reshape(tf.gather(sums, segments), shape),
            tf.reshape(tf.gather(firsts, segments) == places, shape[:-1]),
        )


def _squared_norms(gradients: list[Any]) -> Any:
    return tf.add_n(
        [tf.reduce_sum(tf.square(g), list(range(1, len(g.shape)))) for g in gradients]
    )


def _capped_sums(gradients: list[Any], scale: Any, cap: float | None) -> list[Any]:
    return [
        tf.reduce_sum(cap_coordinates(_scaled(g, scale), cap), 0) for g in gradients
    ]


def _scaled(gradient: Any, scale: Any) -> Any:
    # A scale of 0 is for rows that may hold anything.
    return zero_others(gradient, scale > 0) * align(scale, gradient)


def by_example(value: Any, rows: int) -> Any:
    """Returns (batch * rows, ...) values shaped (batch, rows, ...).

    Args:
      value: Consecutive entries of axis 0 for each example.
      rows: How many; of 1, ``value`` is returned as it is.
    """
    if rows == 1:
        return value
    shape = tf.concat([[-1, rows], tf.shape(value)[1:]], 0)
    count = value.shape[0]
    static = (None if count is None else count // rows, rows, *value.shape[1:])
    return tf.ensure_shape(tf.reshape(value, shape), static)


def positions(value: Any) -> Any:
    """Returns (batch, ..., size) values shaped (batch, positions, size)."""
    count = value.shape[1:-1].num_elements()
    batch = value.shape[0] if value.shape[0] is not None else tf.shape(value)[0]
    return tf.reshape(value, (batch, -1 if count is None else count, value.shape[-1]))


def _flat(value: Any) -> Any:
    return tf.reshape(value, (-1, value.shape[-1]))
