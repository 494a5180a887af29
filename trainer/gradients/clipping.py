"""Sums of clipped per-example gradients of one physical batch.

    sum_i  w_i * min(1, C / ||g_i||) * g_i,      g_i = gradient of example i's loss

Formal guarantees:
  - Each real row contributes a vector of L2 norm at most ``l2_norm_clip`` (up to a
    relative error of 1e-4, also where its terms cancel) that depends on this row and
    the weights of the model alone.
  - With ``linf_norm_clip`` its coordinates are then clipped to that, too.
  - A row of weight 0 contributes exactly nothing, whatever it holds, NaN included.
  - Nor does a real row with a label that the loss does not take.
  - A real row whose gradient is not finite, or whose norm overflows float32,
    contributes exactly nothing, as a ghost would.  That is a bounded function of the
    row, so that the sensitivity is unchanged; it is reported nowhere, since how many
    rows it befell is a count of examples.
  - All paths agree with a loop over the examples.

Three paths.  ``book-keeping`` (see ``ghost_clipping``) is for models whose traced graph
proves that it is exact: weights are read by Dense and Embedding layers alone, each used
once, and rows do not mix (see ``traced_model``).  ``operations`` (see
``operation_clipping``) is for models whose rows are proven not to mix, and whose
weights are used by operations that are known, wherever they are.  ``vectorized`` is for
all other models; it computes each example by itself and holds the gradients of as many
as fit a fixed memory.

Public: the path.  Sensitive: every input and output.

References:
  Goodfellow (2015), arXiv:1510.01799; Xiao, Wan and Devadas (2023), arXiv:2210.03843,
  Algorithm 2, for the clip of coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accounting.validation import check_choice
from trainer.gradients import ghost_clipping
from trainer.gradients.operations import operation_clipping
from trainer.gradients.operations.plain_layers import plain_layers
from trainer.gradients.per_example import (
    align,
    cap_coordinates,
    clip_scale,
    keep_rows,
    real_rows,
    sum_in_chunks,
    zero_others,
)
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import tf

BOOKKEEPING = "book-keeping"
OPERATIONS = "operations"
VECTORIZED = "vectorized"

#: Values of per-example gradients that the vectorised path holds at a time: 256 MiB.
MOST_GRADIENT_VALUES = 1 << 26

#: (columns, weight) -> one tensor or ``tf.IndexedSlices`` per trainable variable; each
#: value of these is of one example, whose rows are distinct (see ``grid``).
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
      model: Checked by ``check_model``.
      l2_norm_clip: Above 0; infinity leaves gradients as they are.
      linf_norm_clip: Above 0: of single coordinates, afterwards; None for none.
      path: "book-keeping", "operations" or "vectorized"; the first that is exact if
        None.
    """
    path = path or choose_path(model)
    check_choice("path", path, tuple(_PATHS))
    return _PATHS[path](model, l2_norm_clip, linf_norm_clip)


def plain_sum(model: TrainableModel) -> GradientSum:
    """Returns the function that sums gradients without clipping.  Not private."""

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        # 0 times NaN is NaN in the matrix products of back-propagation: what may not
        # contribute must not enter the forward pass either.
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
    """Returns the gradient of one example's loss, from columns of one row.  Sensitive.

    Args:
      model: Any.
      row: Columns with a leading dimension of 1.
      weights: What the model computes with at the moment; its variables if None.
    """
    sources = model.variables if weights is None else list(weights)
    with tf.GradientTape() as tape, plain_layers(model.network):
        tape.watch(sources)
        loss = tf.reduce_sum(model.losses(row))
    gradients = tape.gradient(
        loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return [tf.convert_to_tensor(value) for value in gradients]


#: Columns of one row -> its gradient for each variable, and whether it may count.
ExampleGradient = Callable[[Mapping[str, Any]], tuple[list[Any], Any]]


def vectorized_sum(
    model: TrainableModel,
    l2_norm_clip: float,
    gradient: ExampleGradient,
    *,
    copies: int = 1,
    linf_norm_clip: float | None = None,
) -> GradientSum:
    """Returns the clipped sum of what ``gradient`` gives for one example at a time.

    Args:
      model: Any.
      l2_norm_clip: Above 0; infinity leaves gradients as they are.
      gradient: May not depend on other rows.  Sensitive output.
      copies: Values per weight of the model that ``gradient`` needs at a time.
      linf_norm_clip: Bound on single coordinates of the clipped gradient; None
        for none.
    """

    def of_example(example: Mapping[str, Any]) -> tuple[list[Any], Any]:
        return gradient({name: value[tf.newaxis] for name, value in example.items()})

    def chunk_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        stacked, valid = tf.vectorized_map(of_example, keep_rows(columns, real))
        squares = [
            tf.reduce_sum(tf.square(g), list(range(1, len(g.shape)))) for g in stacked
        ]
        norms = tf.sqrt(tf.add_n(squares))
        counted, scale = clip_scale(norms, real & valid, l2_norm_clip)
        clipped = [zero_others(g, counted) * align(scale, g) for g in stacked]
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
