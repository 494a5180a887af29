"""Ghost clipping: clipped sums of Dense and Embedding layers by one backward pass.

The backward pass gives the derivatives D of the losses with respect to the outputs of
all layers before their activations.  Together with the inputs X of the layers they give
the norm of each example's gradient, and the sum of the clipped gradients (see
``layer_gradients``):

    n_i^2 = sum over layers of the squared norm of the layer's gradient
    s_i   = min(1, C / n_i)
    sum   = X^T (s * D)         (dense, one position),   rows s_i d_i       (embedding)

They also give the outputs of a layer whose weights have moved by ``c_i`` times the
gradient of each example, without a copy of the weights per example.  For inputs ``x'``
the move adds

    c_i (<x'_i, x_i> + 1) d_i     (dense),     c_i d_i     (embedding)

summed over the positions of a dense layer, and over equal ids of an embedding.
``methods.bam`` takes a second backward pass through such outputs.

Formal guarantees: those of ``clipping``, for models that ``is_exact`` accepts.

Sensitive: everything here.

References:
  Goodfellow (2015), arXiv:1510.01799, for the norms; Bu et al. (2023),
  arXiv:2210.00038, for the sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from trainer.gradients.gradient_parts import by_example
from trainer.gradients.interception import intercepted_calls
from trainer.gradients.layer_gradients import DenseUse, EmbeddingUse, LayerUse
from trainer.gradients.per_example import (
    clip_scale,
    keep_rows,
    real_rows,
    scale_rows,
)
from trainer.gradients.traced_model import activate, ghost_layers, ghost_obstacle
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import keras, tf

#: For each layer, the change of its outputs as a function of its inputs.
Moves = Mapping[Any, Callable[[Any], Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """A forward and a backward pass through a model.  Sensitive.

    Attributes:
      model: The model.
      uses: Use of each layer in the forward pass.
      slopes: Derivative of the losses with respect to each layer's ``watched`` output,
        shaped by ``by_example``.
    """

    model: TrainableModel
    uses: dict[Any, LayerUse]
    slopes: dict[Any, Any]

    def norms(self) -> Any:
        """Returns an upper bound on the L2 norm of each gradient, (batch,)."""
        squares = [
            use.squared_norm(self.slopes[layer]) for layer, use in self.uses.items()
        ]
        return tf.sqrt(tf.add_n(squares))

    def moves(self, kept: Any, scale: Any) -> Moves:
        """Returns the moves of each example's weights by its scaled gradient.

        Args:
          kept: Examples whose weights move, bool (batch,).
          scale: Length of the move over the norm of the gradient, (batch,).
        """
        return {
            layer: functools.partial(
                use.change, scale_rows(self.slopes[layer], kept, scale)
            )
            for layer, use in self.uses.items()
        }

    def clipped_sum(
        self, real: Any, l2_norm_clip: float, linf_norm_clip: float | None = None
    ) -> list[Any]:
        """Returns the sum of the clipped gradients, a tensor per variable.

        Args:
          real: Examples that may contribute, bool (batch,).
          l2_norm_clip: Largest L2 norm, above 0; infinity for no clipping.
          linf_norm_clip: Largest coordinate after the L2 clip; None for no bound.
        """
        kept, scale = clip_scale(self.norms(), real, l2_norm_clip)
        found = {
            variable.ref(): gradient
            for layer, use in self.uses.items()
            for variable, gradient in use.clipped(
                self.slopes[layer], kept, scale, linf_norm_clip
            )
        }
        return [found[variable.ref()] for variable in self.model.variables]


def is_exact(model: TrainableModel) -> bool:
    """Whether ghost clipping gives the sums of the model's clipped gradients."""
    return ghost_obstacle(model) is None


def bookkeeping_sum(
    model: TrainableModel,
    l2_norm_clip: float,
    linf_norm_clip: float | None = None,
) -> Callable[[Mapping[str, Any], Any], list[Any]]:
    """Returns the function that sums the clipped gradients of a physical batch.

    Args:
      model: Model that ``is_exact`` accepts.
      l2_norm_clip: Largest L2 norm, above 0; infinity for no clipping.
      linf_norm_clip: Largest coordinate after the L2 clip; None for no bound.
    """

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        found = backward(model, keep_rows(columns, real))
        return found.clipped_sum(real, l2_norm_clip, linf_norm_clip)

    return gradient_sum


def backward(
    model: TrainableModel, columns: Mapping[str, Any], moves: Moves | None = None
) -> BackwardPass:
    """Returns one forward and one backward pass.

    Args:
      model: Model that ``is_exact`` accepts.
      columns: Columns by name, each (batch, ...), with zeros in the rows that may not
        contribute.
      moves: Moves of each example's weights, from a pass over the same columns; None
        for the weights as they are.
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
