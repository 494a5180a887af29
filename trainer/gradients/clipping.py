"""Sums of clipped per-example gradients of one physical batch.

    sum_i  w_i * min(1, C / ||g_i||) * g_i,      g_i = gradient of example i's loss

Formal guarantees:
  - A row of positive weight contributes a vector of L2 norm at most ``l2_norm_clip``
    (up to a relative error of 1e-4, also where its terms cancel), which depends only on
    this row and the weights of the model.
  - With ``linf_norm_clip``, each coordinate of this vector is then clipped to it.
  - A row of weight 0 contributes exactly nothing, whatever it holds, NaN included.
  - A row whose label the loss does not accept contributes exactly nothing.
  - A row whose gradient is not finite, or whose norm overflows float32, contributes
    exactly nothing.  Its contribution is a function of the row within the clip, so that
    the sensitivity is unchanged.  The number of such rows is sensitive, and is never
    reported.
  - All paths agree with a loop over the examples.

Three paths:

  - ``book-keeping`` (see ``ghost_clipping``): the traced graph proves that rows do not
    mix, and that only Dense and Embedding layers read weights, each once (see
    ``traced_model``).
  - ``operations`` (see ``operation_clipping``): the traced graph proves that rows do
    not mix, and only known operations use weights.
  - ``vectorized``: all other models.  Each example is computed by itself, for as many
    examples at a time as fit a fixed memory.

Public: the path.  Sensitive: every input and output.

References:
  Goodfellow (2015), arXiv:1510.01799; Xiao, Wan and Devadas (2023), arXiv:2210.03843,
  Algorithm 2, for clipping coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.validation import check_choice
from trainer.gradients import ghost_clipping
from trainer.gradients.operations import operation_clipping
from trainer.gradients.operations.plain_layers import plain_layers
from trainer.gradients.per_example import (
    cap_coordinates,
    clip_scale,
    keep_rows,
    real_rows,
    scale_rows,
    squared_norms,
    sum_in_chunks,
)
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import tf

BOOKKEEPING = "book-keeping"
OPERATIONS = "operations"
VECTORIZED = "vectorized"

#: Largest number of values of per-example gradients that the vectorised path holds at a
#: time: 256 MiB.
MOST_GRADIENT_VALUES = 1 << 26

#: (columns, weight) -> a tensor or ``tf.IndexedSlices`` per trainable variable.  Each
#: slice is of one example, and no example has two nonzero slices of one row (see
#: ``workers.grid``).
GradientSum = Callable[[Mapping[str, Any], Any], list[Any]]


def choose_path(model: TrainableModel) -> str:
    """Returns the fastest path that is exact for ``model``."""
    if ghost_clipping.is_exact(model):
        return BOOKKEEPING
    exact = operation_clipping.operations_obstacle(model) is None
    return OPERATIONS if exact else VECTORIZED


def clipped_sum(
    model: TrainableModel,
    *,
    l2_norm_clip: float,
    linf_norm_clip: float | None = None,
    path: str | None = None,
) -> GradientSum:
    """Returns the function that sums the clipped gradients of a physical batch.

    Args:
      model: Model that ``check_model`` accepts.
      l2_norm_clip: Largest L2 norm, above 0; infinity for no clipping.
      linf_norm_clip: Largest coordinate after the L2 clip, above 0; None or infinity
        for no bound.
      path: "book-keeping", "operations" or "vectorized"; None for ``choose_path``.
    """
    path = path or choose_path(model)
    check_choice("path", path, tuple(_PATHS))
    cap = None if linf_norm_clip == math.inf else linf_norm_clip
    return _PATHS[path](model, l2_norm_clip, cap)


def plain_sum(model: TrainableModel) -> GradientSum:
    """Returns the function that sums gradients without clipping.  Not private."""

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        # 0 times NaN is NaN in the products of the backward pass: rows that may not
        # contribute must not enter the forward pass.
        real = real_rows(model, columns, weight)
        safe = keep_rows(columns, real)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.where(real, model.losses(safe), 0.0))
        return tape.gradient(
            total, model.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )

    return gradient_sum


def _vectorized_sum(
    model: TrainableModel, l2_norm_clip: float, linf_norm_clip: float | None
) -> GradientSum:
    return vectorized_sum(
        model,
        l2_norm_clip,
        lambda row: (example_gradient(model, row), tf.constant(True)),
        linf_norm_clip=linf_norm_clip,
    )


def example_gradient(
    model: TrainableModel, row: Mapping[str, Any], weights: Sequence[Any] | None = None
) -> list[Any]:
    """Returns the gradient of one example's loss, a tensor per variable.  Sensitive.

    Args:
      model: Model and its loss.
      row: Columns by name, each (1, ...).
      weights: Weights that replace the model's variables; None for the variables.
    """
    sources = model.variables if weights is None else list(weights)
    with tf.GradientTape() as tape, plain_layers(model.network):
        tape.watch(sources)
        loss = tf.reduce_sum(model.losses(row))
    gradients = tape.gradient(
        loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return [tf.convert_to_tensor(value) for value in gradients]


#: Columns of one row -> its gradient for each variable, and whether it may contribute.
ExampleGradient = Callable[[Mapping[str, Any]], tuple[list[Any], Any]]


def vectorized_sum(
    model: TrainableModel,
    l2_norm_clip: float,
    gradient: ExampleGradient,
    *,
    copies: int = 1,
    linf_norm_clip: float | None = None,
) -> GradientSum:
    """Returns the function that sums ``gradient`` of single examples, clipped.

    Args:
      model: Model and its loss.
      l2_norm_clip: Largest L2 norm, above 0; infinity for no clipping.
      gradient: Gradient of one example, a function of its row and the weights alone.
      copies: Number of values per weight that ``gradient`` holds at a time.
      linf_norm_clip: Largest coordinate after the L2 clip; None for no bound.
    """

    def of_example(example: Mapping[str, Any]) -> tuple[list[Any], Any]:
        return gradient({name: value[tf.newaxis] for name, value in example.items()})

    def chunk_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        stacked, valid = tf.vectorized_map(of_example, keep_rows(columns, real))
        norms = tf.sqrt(squared_norms(stacked))
        counted, scale = clip_scale(norms, real & valid, l2_norm_clip)
        clipped = [scale_rows(g, counted, scale) for g in stacked]
        return [tf.reduce_sum(cap_coordinates(g, linf_norm_clip), 0) for g in clipped]

    copies *= operation_clipping.copies_of_gradients(model)
    num_values = copies * sum(v.shape.num_elements() for v in model.variables)

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        return list(
            sum_in_chunks(
                lambda rows: chunk_sum(*rows),
                (dict(columns), weight),
                num_rows=weight.shape[0],
                chunk_rows=max(1, MOST_GRADIENT_VALUES // num_values),
                initial=[tf.zeros_like(variable) for variable in model.variables],
            )
        )

    return gradient_sum


def _operations_sum(
    model: TrainableModel, l2_norm_clip: float, linf_norm_clip: float | None
) -> GradientSum:
    return operation_clipping.operations_sum(
        model,
        l2_norm_clip,
        linf_norm_clip,
        otherwise=_vectorized_sum(model, l2_norm_clip, linf_norm_clip),
    )


_PATHS: dict[str, Callable[[TrainableModel, float, float | None], GradientSum]] = {
    BOOKKEEPING: ghost_clipping.bookkeeping_sum,
    OPERATIONS: _operations_sum,
    VECTORIZED: _vectorized_sum,
}
