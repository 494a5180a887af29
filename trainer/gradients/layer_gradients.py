"""Per-example gradients of one Dense or Embedding layer, from its inputs and outputs.

A dense layer ``z = x W + b`` is applied to an example at positions s = 1..P.  With
``d_s`` the derivative of the example's loss with respect to ``z_s``, its gradient is
``sum_s x_s^T d_s`` for W and ``sum_s d_s`` for b.  The gradient of an embedding is, for
each row that the example reads, the sum of ``d_s`` over the positions that read it.  If
an example has several rows, such as its views, the positions of all of them count.

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

#: Change of a layer's outputs by moved weights, as a function of its inputs.
Move = Callable[[Any], Any] | None


class LayerUse(Protocol):
    """One layer in a forward pass.

    Attributes:
      watched: Outputs before the activation, at which the losses are differentiated.
    """

    watched: Any

    def squared_norm(self, slope: Any) -> Any:
        """Returns an upper bound on each squared gradient norm, (batch,).

        Args:
          slope: Derivative of the losses at ``watched``, shaped by ``by_example``.
        """

    def clipped(
        self, slope: Any, kept: Any, scale: Any, cap: float | None
    ) -> list[tuple[Any, Any]]:
        """Returns each variable with its sum of scaled gradients.

        Args:
          slope: Derivative with which ``squared_norm`` was called before.
          kept: Examples that contribute, bool (batch,).
          scale: Factor per example, (batch,).
          cap: Largest coordinate of a scaled gradient; None for no bound.
        """

    def change(self, scaled: Any, inputs: Any) -> Any:
        """Returns the change of the outputs by moved weights.

        Args:
          scaled: Slope times the length of each example's move over the norm of its
            gradient, shaped by ``by_example``.
          inputs: Inputs of the layer in the pass with moved weights, (batch * rows,
            ...).
        """


class DenseUse:
    """A Dense layer in a forward pass.

    Args:
      layer: Keras layer.
      values: Inputs of the layer, (batch * rows, ..., in).
      move: Change of its outputs by moved weights; None for none.
      tape: Gradient tape that is to watch the outputs before the activation.
      rows: Number of rows per example.
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
        assert self._products is not None, slope  # made by squared_norm
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
      layer: Keras layer.
      inputs: Ids, (batch * rows, ...).
      move: Change of its outputs by moved weights; None for none.
      tape: Gradient tape that is to watch the outputs.
      rows: Number of rows per example.
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
        del inputs  # ids, which do not depend on weights
        return _by_row(self._rows(scaled).totals()[0], self._num_rows)

    def _rows(self, slope: Any) -> TableRows:
        return TableRows(self._ids, slope, self._table.shape)


def _by_row(value: Any, rows: int) -> Any:
    """Returns (batch, rows, ...) values shaped (batch * rows, ...)."""
    if rows == 1:
        return value
    return tf.reshape(value, tf.concat([[-1], tf.shape(value)[2:]], 0))
