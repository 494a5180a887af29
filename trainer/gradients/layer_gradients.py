"""What one Dense or Embedding layer adds to per-example gradients, from its two ends.

Of a dense layer ``z = x W + b`` the gradient of an example is ``sum_s x_s^T d_s`` and
``sum_s d_s`` over the positions s = 1..P at which the layer is applied to it, where
``d_s`` is the derivative of its loss by ``z_s``; of an embedding it is, on each row
that it reads, the sum of ``d_s`` over the positions that read it.

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

Sensitive: everything here.

References:
  Goodfellow (2015), arXiv:1510.01799, and Li et al. (2022), arXiv:2110.05679, for norms
  through inner products; Bu et al. (2023), arXiv:2210.00038, for the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trainer.gradients.per_example import (
    align,
    cap_coordinates,
    clip_to_norm,
    concat_in_chunks,
    sum_in_chunks,
    zero_others,
)
from trainer.gradients.traced_model import affine, table_ids
from trainer.tf_compat import tf

#: Values of a dense layer's gradients that are held at a time.
_MOST_HELD_VALUES = 1 << 23

#: Positions up to which a large dense layer's gradients are not formed.
_MOST_POSITIONS = 16

#: A dense layer of this many weights per pair of positions is large.
_LARGE = 64

#: A / n above which cancellation costs an example some of its gradient.
_CONDITION = 512.0

#: Ids of an example in one table up to which all pairs are compared for equality.
_MOST_PAIRED_IDS = 64

#: Squares of single-precision values below this may be flushed to zero.
_TINY = 2.0**-126

#: Inputs of a layer -> what an example's own weights add to its outputs.
Move = Callable[[Any], Any] | None


class LayerUse(Protocol):
    """One layer's part in a forward pass.

    Attributes:
      watched: The tensor by which the loss is differentiated.
    """

    watched: Any

    def squared_norm(self, slope: Any) -> Any:
        """Returns a bound on each example's squared gradient norm, shape (batch,).

        Args:
          slope: Derivative of the loss by ``watched``.
        """

    def clipped(
        self, slope: Any, kept: Any, scale: Any, cap: float | None
    ) -> list[tuple[Any, Any]]:
        """Returns (variable, sum of scaled gradients of kept examples).

        Args:
          slope: As in ``squared_norm``, which was called with it before.
          kept: bool of shape (batch,).
          scale: Of shape (batch,).
          cap: Bound on each coordinate of an example's scaled gradient, or None.
        """

    def change(self, scaled: Any, inputs: Any) -> Any:
        """Returns what is added to the outputs for ``inputs`` by moved weights.

        Args:
          scaled: The slope times the length of each example's move along its gradient.
          inputs: Of the layer, in a pass with moved weights.
        """


class DenseUse:
    """A Dense layer in a forward pass.

    Args:
      layer: The layer.
      values: Its input, (batch, ..., in).
      move: The change of its outputs by moved weights, or None.
      tape: Watches the outputs before the activation.
    """

    def __init__(self, layer: Any, values: Any, move: Move, tape: Any) -> None:
        outputs = affine(layer, values)
        self.watched = outputs if move is None else outputs + move(values)
        tape.watch(self.watched)
        self._layer = layer
        self._bias = float(layer.use_bias)
        self._values = values
        self._num_positions = values.shape[1:-1].num_elements()
        self._size = layer.kernel.shape.num_elements()
        self._squared_norm: Any = None
        self._held: list[Any] | None = None

    def squared_norm(self, slope: Any) -> Any:
        """See ``LayerUse``."""
        if self._num_positions == 1:
            found = self._of_one_position(slope)
        elif self._forms_gradients:
            found = self._of_gradients(slope)
        else:
            found = self._of_inner_products(slope)
        self._squared_norm = found
        return found

    def clipped(
        self, slope: Any, kept: Any, scale: Any, cap: float | None
    ) -> list[tuple[Any, Any]]:
        """See ``LayerUse``."""
        x, d = zero_others(self._values, kept), zero_others(slope, kept)
        if self._forms_gradients or cap is not None:
            sums = self._sum_gradients(_positions(x), _positions(d), scale, cap)
        else:
            d = d * align(scale, d)
            sums = [tf.matmul(_flat(x), _flat(d), transpose_a=True)]
            sums += [tf.reduce_sum(_flat(d), 0)] if self._bias else []
        return list(zip(self._variables, sums, strict=True))

    def change(self, scaled: Any, inputs: Any) -> Any:
        """See ``LayerUse``."""
        if len(inputs.shape) == 2:
            inner = tf.reduce_sum(inputs * self._values, 1) + self._bias
            return inner[:, None] * scaled
        x, others = _positions(self._values), _positions(inputs)
        inner = tf.matmul(others, x, transpose_b=True) + self._bias
        return tf.reshape(tf.matmul(inner, _positions(scaled)), tf.shape(scaled))

    @property
    def _variables(self) -> list[Any]:
        layer = self._layer
        return [layer.kernel, layer.bias] if layer.use_bias else [layer.kernel]

    @property
    def _forms_gradients(self) -> bool:
        count = self._num_positions
        if count == 1:
            return False
        if count is None or count > _MOST_POSITIONS:
            return True
        return self._size <= _LARGE * count**2

    @property
    def _chunk_rows(self) -> int:
        return max(1, _MOST_HELD_VALUES // self._size)

    def _of_one_position(self, slope: Any) -> Any:
        x, d = (tf.reshape(v, (-1, v.shape[-1])) for v in (self._values, slope))
        inputs = tf.reduce_sum(tf.square(x), 1) + x.shape[1] * _TINY + self._bias
        return inputs * (tf.reduce_sum(tf.square(d), 1) + d.shape[1] * _TINY)

    def _of_inner_products(self, slope: Any) -> Any:
        x, d = (tf.cast(_positions(v), tf.float64) for v in (self._values, slope))
        inputs = tf.matmul(x, x, transpose_b=True) + self._bias
        slopes = tf.matmul(d, d, transpose_b=True)
        exact = tf.maximum(tf.reduce_sum(inputs * slopes, (1, 2)), 0.0)
        lengths = tf.linalg.diag_part(inputs) * tf.linalg.diag_part(slopes)
        terms = tf.reduce_sum(tf.sqrt(lengths), 1)
        return tf.cast(exact + tf.square(terms / _CONDITION), tf.float32)

    def _gradients(self, x: Any, d: Any) -> list[Any]:
        """Returns (batch, in, out) and, with a bias, (batch, out)."""
        found = [tf.matmul(x, d, transpose_a=True)]
        return [*found, tf.reduce_sum(d, 1)] if self._bias else found

    def _of_gradients(self, slope: Any) -> Any:
        x, d = _positions(self._values), _positions(slope)
        num_rows = x.shape[0]
        if num_rows is not None and num_rows <= self._chunk_rows:
            self._held = self._gradients(x, d)
            return _squared_norms(self._held)
        return concat_in_chunks(
            lambda rows: _squared_norms(self._gradients(*rows)),
            (x, d),
            num_rows=num_rows,
            chunk_rows=self._chunk_rows,
        )

    def _sum_gradients(
        self, x: Any, d: Any, scale: Any, cap: float | None
    ) -> list[Any]:
        if self._held is not None:
            return [
                tf.reduce_sum(cap_coordinates(_scaled(g, scale), cap), 0)
                for g in self._held
            ]

        def of_chunk(rows: Any) -> list[Any]:
            x, d, scale, bound = rows
            # Formed anew, and clipped anew: no rounding may make it longer than what
            # was measured.
            gradients = self._gradients(x, d)
            scale = scale * clip_to_norm(_squared_norms(gradients), bound)
            return [
                tf.reduce_sum(cap_coordinates(_scaled(g, scale), cap), 0)
                for g in gradients
            ]

        return sum_in_chunks(
            of_chunk,
            (x, d, scale, self._squared_norm),
            num_rows=x.shape[0],
            chunk_rows=self._chunk_rows,
            initial=[tf.zeros_like(variable) for variable in self._variables],
        )


class EmbeddingUse:
    """An Embedding layer in a forward pass.

    Args:
      layer: The layer.
      inputs: Its ids, (batch, ...).
      move: The change of its outputs by moved weights, or None.
      tape: Watches the outputs.
    """

    def __init__(self, layer: Any, inputs: Any, move: Move, tape: Any) -> None:
        outputs = affine(layer, inputs)
        self.watched = outputs if move is None else outputs + move(inputs)
        tape.watch(self.watched)
        self._table = layer.embeddings
        self._ids = table_ids(inputs)

    def squared_norm(self, slope: Any) -> Any:
        """See ``LayerUse``."""
        rows = _positions(self._row_gradients(slope))
        return tf.reduce_sum(tf.square(rows), (1, 2))

    def clipped(
        self, slope: Any, kept: Any, scale: Any, cap: float | None
    ) -> list[tuple[Any, Any]]:
        """See ``LayerUse``."""
        rows = self._row_gradients(zero_others(slope, kept))
        rows = cap_coordinates(rows * align(scale, rows), cap)
        indices = tf.reshape(self._ids, (-1,))
        shape = tf.shape(self._table)
        return [(self._table, tf.IndexedSlices(_flat(rows), indices, shape))]

    def change(self, scaled: Any, inputs: Any) -> Any:
        """See ``LayerUse``."""
        del inputs  # the same ids
        return self._totals(scaled)[0]

    def _row_gradients(self, slope: Any) -> Any:
        """Returns the sum over equal ids at the first of them, and else zeros."""
        totals, first = self._totals(slope)
        return totals if first is None else tf.where(first[..., None], totals, 0.0)

    def _totals(self, slope: Any) -> tuple[Any, Any]:
        """Returns at each id the sum over equal ids, and which are the first."""
        num_ids = self._ids.shape[1:].num_elements()  # None where the length varies
        if num_ids == 1:
            return slope, None
        if num_ids is not None and num_ids <= _MOST_PAIRED_IDS:
            return self._by_pairs(slope, num_ids)
        return self._by_segments(slope)

    def _by_pairs(self, slope: Any, num_ids: int) -> tuple[Any, Any]:
        ids = tf.reshape(self._ids, (-1, num_ids))
        equal = ids[:, :, None] == ids[:, None, :]
        totals = tf.matmul(tf.cast(equal, slope.dtype), _positions(slope))
        earlier = tf.constant([[t < s for t in range(num_ids)] for s in range(num_ids)])
        first = tf.logical_not(tf.reduce_any(equal & earlier, 2))
        shape = tf.shape(slope)
        return tf.reshape(totals, shape), tf.reshape(first, shape[:-1])

    def _by_segments(self, slope: Any) -> tuple[Any, Any]:
        # One number for each pair of example and row.
        rows = tf.reshape(tf.cast(self._ids, tf.int64), (tf.shape(self._ids)[0], -1))
        offsets = tf.range(tf.shape(rows)[0], dtype=tf.int64) * self._table.shape[0]
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


def _scaled(gradient: Any, scale: Any) -> Any:
    # A scale of 0 is for rows that may hold anything.
    return zero_others(gradient, scale > 0) * align(scale, gradient)


def _positions(value: Any) -> Any:
    """Returns (batch, ..., size) values shaped (batch, positions, size)."""
    count = value.shape[1:-1].num_elements()
    batch = value.shape[0] if value.shape[0] is not None else tf.shape(value)[0]
    return tf.reshape(value, (batch, -1 if count is None else count, value.shape[-1]))


def _flat(value: Any) -> Any:
    return tf.reshape(value, (-1, value.shape[-1]))
