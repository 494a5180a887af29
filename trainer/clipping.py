"""Sums of clipped per-example gradients of one physical batch.

    sum_i  w_i * min(1, C / ||g_i||) * g_i,      g_i = gradient of example i's loss

Formal guarantees:
  - Each real row contributes a vector of L2 norm at most ``l2_norm_clip`` (up to
    float32 rounding) that depends on this row and the weights of the model alone.
  - A row of weight 0 contributes exactly nothing, whatever it holds, NaN included.
  - A real row whose gradient is not finite, or whose norm overflows float32,
    contributes exactly nothing, as a ghost would.  That is a bounded function of the
    row, so that the sensitivity is unchanged; it is reported nowhere, since how many
    rows it befell is a count of examples.
  - All paths agree with a loop over the examples.

Three paths.  ``book-keeping`` (see ``bookkeeping``) is for models whose weights are all
in Dense and Embedding layers that are used once.  ``vectorized`` is for all other
models; it holds the gradients of as many examples as fit a fixed memory.  ``registry``
takes the norms from TF Privacy's layer registry and back-propagates a second time
through the weighted loss; it is for the models that book-keeping is for, and is there
to be compared with.

Public: the path.  Sensitive: every input and output.

References:
  Goodfellow (2015), arXiv:1510.01799; Lee and Kifer (2020), arXiv:2009.03106.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accounting.validation import check_choice
from trainer import bookkeeping
from trainer.models import TrainableModel, binary_cross_entropy
from trainer.rows import align, clip_scale, keep_rows, zero_others
from trainer.settings import LABEL
from trainer.tf_privacy import clip_grads, layer_registry, tf

BOOKKEEPING = "book-keeping"
REGISTRY = "registry"
VECTORIZED = "vectorized"

#: Values of per-example gradients that the vectorised path holds at a time: 256 MiB.
_MOST_GRADIENT_VALUES = 1 << 26

#: (columns, weight) -> one tensor or ``tf.IndexedSlices`` per trainable variable.
GradientSum = Callable[[Mapping[str, Any], Any], list[Any]]


def choose_path(model: TrainableModel) -> str:
    """Returns the fastest path that is exact for ``model``."""
    return BOOKKEEPING if bookkeeping.is_exact(model) else VECTORIZED


def clipped_sum(
    model: TrainableModel, *, l2_norm_clip: float, path: str | None = None
) -> GradientSum:
    """Returns the function that sums the clipped gradients of a physical batch.

    Args:
      model: Checked by ``models.check_model``.
      l2_norm_clip: Above 0; infinity leaves gradients as they are.
      path: "book-keeping", "vectorized" or "registry"; the first that is exact if None.
    """
    path = path or choose_path(model)
    check_choice("path", path, tuple(_PATHS))
    return _PATHS[path](model, l2_norm_clip)


def plain_sum(model: TrainableModel) -> GradientSum:
    """Returns the function that sums gradients without clipping.  Not private."""

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        return _weighted_gradient(model, columns, weight > 0, tf.ones_like(weight))

    return gradient_sum


def _weighted_gradient(
    model: TrainableModel, columns: Mapping[str, Any], kept: Any, scale: Any
) -> list[Any]:
    """Returns the gradient of the sum of ``scale`` times the loss of kept rows."""
    # 0 times NaN is NaN in the matrix products of back-propagation: what may not
    # contribute must not enter the forward pass either.
    safe = keep_rows(columns, kept)
    with tf.GradientTape() as tape:
        losses = binary_cross_entropy(safe[LABEL], model.logits(safe))
        total = tf.reduce_sum(tf.where(kept, losses * scale, 0.0))
    return tape.gradient(
        total, model.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )


def _registry_sum(model: TrainableModel, l2_norm_clip: float) -> GradientSum:
    registry = layer_registry.make_default_layer_registry()

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = weight > 0
        safe = keep_rows(columns, real)
        norms = clip_grads.compute_gradient_norms(
            model.network,
            registry,
            model.inputs(safe),
            safe[LABEL],
            per_example_loss_fn=lambda y, z, _: binary_cross_entropy(y, z),
        )
        counted, scale = clip_scale(norms, real, l2_norm_clip)
        return _weighted_gradient(model, safe, counted, scale)

    return gradient_sum


def _vectorized_sum(model: TrainableModel, l2_norm_clip: float) -> GradientSum:
    def example_gradient(example: Mapping[str, Any]) -> list[Any]:
        row = {name: tf.expand_dims(value, 0) for name, value in example.items()}
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(binary_cross_entropy(row[LABEL], model.logits(row)))
        gradients = tape.gradient(
            loss, model.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    def chunk_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = weight > 0
        stacked = tf.vectorized_map(example_gradient, keep_rows(columns, real))
        squares = [tf.reduce_sum(g**2, list(range(1, len(g.shape)))) for g in stacked]
        counted, scale = clip_scale(tf.sqrt(tf.add_n(squares)), real, l2_norm_clip)
        return [
            tf.reduce_sum(zero_others(g, counted) * align(scale, g), 0) for g in stacked
        ]

    num_values = sum(variable.shape.num_elements() for variable in model.variables)
    return _in_chunks(chunk_sum, model, max(1, _MOST_GRADIENT_VALUES // num_values))


def _in_chunks(
    chunk_sum: GradientSum, model: TrainableModel, chunk_rows: int
) -> GradientSum:
    """Returns the sum of ``chunk_sum`` over chunks of rows, one after the other."""

    def split(value: Any, num_chunks: int) -> Any:
        padding = num_chunks * chunk_rows - value.shape[0]
        rest = [[0, 0]] * (len(value.shape) - 1)
        padded = tf.pad(value, [[0, padding], *rest])
        return tf.reshape(padded, (num_chunks, chunk_rows, *value.shape[1:]))

    def add_chunk(total: list[Any], chunk: tuple[Any, Any]) -> list[Any]:
        return [a + b for a, b in zip(total, chunk_sum(*chunk), strict=True)]

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        num_chunks = -(-weight.shape[0] // chunk_rows)
        if num_chunks <= 1:
            return chunk_sum(columns, weight)
        parts = {name: split(value, num_chunks) for name, value in columns.items()}
        return tf.foldl(
            add_chunk,
            (parts, split(weight, num_chunks)),
            initializer=[tf.zeros_like(variable) for variable in model.variables],
            parallel_iterations=1,
        )

    return gradient_sum


_PATHS: dict[str, Callable[[TrainableModel, float], GradientSum]] = {
    BOOKKEEPING: bookkeeping.bookkeeping_sum,
    VECTORIZED: _vectorized_sum,
    REGISTRY: _registry_sum,
}
