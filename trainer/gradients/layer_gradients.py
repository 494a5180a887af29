"""What one Dense or Embedding layer adds to per-example gradients, from its two ends.

Of a dense layer ``z = x W + b`` the gradient of an example is ``sum_s x_s^T d_s`` and
``sum_s d_s`` over the positions s = 1..P at which the layer is applied to it, where
``d_s`` is the derivative of its loss by ``z_s``; of an embedding it is, on each row
that it reads, the sum of ``d_s`` over the positions that read it.  Where an example has
several rows, as views of it, their positions are positions of the example.

Formal guarantees: those of ``gradient_parts``.

Sensitive: everything here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trainer.gradients.gradient_parts import (
    OuterProducts,
    TableRows,
    by_example,
    positions,
)
from trainer.gradients.traced_model import affine, table_ids
from trainer.tf_compat import tf

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
          slope: Derivative of the loss by ``watched``, ``by_example``.
        """

    def clipped(
        self, slope: Any, kept: Any, scale: Any, cap: float | None
    ) -> list[tuple[Any, Any]]:
        """Returns (variable, sum of scaled gradients of kept examples).

        Args:
          slope: As in ``squared_norm``, which was called with it before.
          kept: bool of shape (batch,).
          scale: Factor per example, shape (batch,).
          cap: Bound on each coordinate of an example's scaled gradient, or None.
        """

    def change(self, scaled: Any, inputs: Any) -> Any:
        """Returns what is added to the outputs for ``inputs`` by moved weights.

        Args:
          scaled: The slope times the length of each example's move along its gradient.
          inputs: Inputs of the layer, in a pass with moved weights, by row.
        """


class DenseUse:
    """A Dense layer in a forward pass.

    Args:
      layer: The layer.
      values: Its input, (batch * rows, ..., in).
      move: The change of its outputs by moved weights, or None.
      tape: Watches the outputs before the activation.
      rows: Of each example.
    """

    def __init__(
        self, layer: Any, values: Any, move: Move, tape: Any, rows: int
    ) -> None:
        outputs = affine(layer, values)
        self.watched = outputs if move is None else outputs + move(values)
        tape.watch(self.watched)
        self._layer = layer
        self._bias = float(layer.use_bias)
        self._rows = rows
        self._values = by_example(values, rows)
        self._products: OuterProducts | None = None

    def squared_norm(self, slope: Any) -> Any:
        """See ``LayerUse``."""
        x, d = positions(self._values), positions(slope)
        self._products = OuterProducts(x, d, bias=self._layer.use_bias)
        return self._products.squared_norm()

    def clipped(
        self, slope: Any, kept: Any, scale: Any, cap: float | None
    ) -> list[tuple[Any, Any]]:
        """See ``LayerUse``."""
        assert self._products is not None, slope  # squared_norm was called with it
        layer = self._layer
        variables = [layer.kernel, layer.bias] if layer.use_bias else [layer.kernel]
        sums = self._products.clipped(kept, scale, cap)
        return list(zip(variables, sums, strict=True))

    def change(self, scaled: Any, inputs: Any) -> Any:
        """See ``LayerUse``."""
        inputs = by_example(inputs, self._rows)
        if len(inputs.shape) == 2:
            inner = tf.reduce_sum(inputs * self._values, 1) + self._bias
            return inner[:, None] * scaled
        x, others = positions(self._values), positions(inputs)
        inner = tf.matmul(others, x, transpose_b=True) + self._bias
        moved = tf.reshape(tf.matmul(inner, positions(scaled)), tf.shape(scaled))
        return _by_row(moved, self._rows)


class EmbeddingUse:
    """An Embedding layer in a forward pass.

    Args:
      layer: The layer.
      inputs: Its ids, (batch * rows, ...).
      move: The change of its outputs by moved weights, or None.
      tape: Watches the outputs.
      rows: Of each example.
    """

    def __init__(
        self, layer: Any, inputs: Any, move: Move, tape: Any, rows: int
    ) -> None:
        outputs = affine(layer, inputs)
        self.watched = outputs if move is None else outputs + move(inputs)
        tape.watch(self.watched)
        self._table = layer.embeddings
        self._num_rows = rows
        self._ids = by_example(table_ids(inputs), rows)

    def squared_norm(self, slope: Any) -> Any:
        """See ``LayerUse``."""
        return self._rows(slope).squared_norm()

    def clipped(
        self, slope: Any, kept: Any, scale: Any, cap: float | None
    ) -> list[tuple[Any, Any]]:
        """See ``LayerUse``."""
        return [(self._table, self._rows(slope).clipped(kept, scale, cap)[0])]

    def change(self, scaled: Any, inputs: Any) -> Any:
        """See ``LayerUse``."""
        del inputs  # the same ids
        return _by_row(self._rows(scaled).totals()[0], self._num_rows)

    def _rows(self, slope: Any) -> TableRows:
        return TableRows(self._ids, slope, self._table.shape)


def _by_row(value: Any, rows: int) -> Any:
    """Returns (batch, rows, ...) values shaped (batch * rows, ...)."""
    if rows == 1:
        return value
    return tf.reshape(value, tf.concat([[-1], tf.shape(value)[2:]], 0))
