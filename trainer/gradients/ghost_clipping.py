"""Clipped sums with one forward and one backward pass, for Dense and Embedding layers.

Back-propagation to the outputs of all layers, before their activations, gives every
derivative from which a layer's part of each example's gradient follows (see
``layer_gradients``): the norm of each example's gradient, and then, after scaling, the
sum of the clipped gradients:

    n_i^2 = sum over layers of the squared norm of the layer's part
    s_i   = min(1, C / n_i)
    sum   = X^T (s * D)         (dense, one position),   rows s_i d_i       (embedding)

The same inner products give the outputs of a layer after the weights of each example
have moved along this example's own gradient, without a copy of the weights per example.
To inputs ``x'`` a move by ``c_i`` times the gradient adds

    c_i (<x'_i, x_i> + 1) d_i     (dense),     c_i d_i     (embedding)

where an example's derivatives add up over the positions of a dense layer, and over
equal ids of an embedding.  ``bam`` back-propagates a second time through such outputs.

Formal guarantees: those of ``clipping``, for models that ``is_exact`` accepts.

Sensitive: everything here.

References:
  Goodfellow (2015), arXiv:1510.01799, for the norms; Bu et al. (2023),
  arXiv:2210.00038, for the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from trainer.gradients.gradient_parts import by_example
from trainer.gradients.interception import intercepted_calls
from trainer.gradients.layer_gradients import DenseUse, EmbeddingUse, LayerUse
from trainer.gradients.per_example import (
    align,
    clip_scale,
    keep_rows,
    real_rows,
    zero_others,
)
from trainer.gradients.traced_model import activate, ghost_layers, ghost_obstacle
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import keras, tf

#: A layer -> inputs -> change of its outputs.
Moves = Mapping[Any, Callable[[Any], Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """The layers' uses in one pass, and the derivatives of the losses by their outputs.

    Everything is per example, ``by_example`` where one has several rows.  Sensitive.
    """

    model: TrainableModel
    uses: dict[Any, LayerUse]
    slopes: dict[Any, Any]

    def norms(self) -> Any:
        """Returns a bound on the L2 norm of each example's gradient, shape (batch,)."""
        squares = [
            use.squared_norm(self.slopes[layer]) for layer, use in self.uses.items()
        ]
        return tf.sqrt(tf.add_n(squares))

    def moves(self, kept: Any, scale: Any) -> Moves:
        """Returns, of each layer, inputs -> change of outputs, for ``backward``.

        Each kept example's weights move by ``scale`` times its gradient.

        Args:
          kept: bool of shape (batch,).
          scale: Factor per example, shape (batch,).
        """
        moves = {}
        for layer, use in self.uses.items():
            slope = zero_others(self.slopes[layer], kept)
            scaled = slope * align(scale, slope)
            moves[layer] = functools.partial(use.change, scaled)
        return moves

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
        kept, scale = clip_scale(self.norms(), real, l2_norm_clip)
        cap = None if linf_norm_clip in (None, math.inf) else linf_norm_clip
        found = {
            variable.ref(): gradient
            for layer, use in self.uses.items()
            for variable, gradient in use.clipped(self.slopes[layer], kept, scale, cap)
        }
        return [found[variable.ref()] for variable in self.model.variables]


def is_exact(model: TrainableModel) -> bool:
    """Whether the sums here are those of ``model``'s per-example gradients."""
    return ghost_obstacle(model) is None


def bookkeeping_sum(
    model: TrainableModel,
    l2_norm_clip: float,
    linf_norm_clip: float | None = None,
) -> Callable[[Mapping[str, Any], Any], list[Any]]:
    """Returns the function that sums the clipped gradients of a physical batch.

    Args:
      model: Accepted by ``is_exact``.
      l2_norm_clip: Above 0; infinity leaves gradients as they are.
      linf_norm_clip: Bound on single coordinates, afterwards; None for none.
    """

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        found = backward(model, keep_rows(columns, real))
        return found.clipped_sum(real, l2_norm_clip, linf_norm_clip)

    return gradient_sum


def backward(
    model: TrainableModel, columns: Mapping[str, Any], moves: Moves | None = None
) -> BackwardPass:
    """Returns one forward and backward pass.

    Args:
      model: Accepted by ``is_exact``.
      columns: Rows that may not contribute hold values as good as any.
      moves: From another pass over the same rows: the example's own weights.
    """
    tape = tf.GradientTape(watch_accessed_variables=False)
    uses: dict[Any, LayerUse] = {}
    rows = model.rows_per_example

    def call(layer: Any, inputs: Any) -> Any:
        move = moves[layer] if moves is not None else None
        use = _USES[type(layer)](layer, inputs, move, tape, rows)
        uses[layer] = use
        return activate(layer, use.watched)

    with tape, intercepted_calls(ghost_layers(model), call):
        loss = tf.reduce_sum(model.losses(columns))
    slopes = tape.gradient(
        loss,
        [use.watched for use in uses.values()],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    slopes = [by_example(slope, rows) for slope in slopes]
    return BackwardPass(
        model=model, uses=uses, slopes=dict(zip(uses, slopes, strict=True))
    )


_USES: dict[type, Callable[[Any, Any, Any, Any, int], LayerUse]] = {
    keras.layers.Dense: DenseUse,
    keras.layers.Embedding: EmbeddingUse,
}
