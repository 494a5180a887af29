"""Clipped sums of gradients that are computed one example at a time.

The reference of the other path, and the only one for models that it does not
understand.  The gradient of a single example is traced once; the same graph runs for
every example, for as many at a time as fit a fixed memory.

Formal guarantees:
  - Those of ``clipping``: the gradient of an example is computed without the others.
  - The traced gradient is a function of the example and the weights: no operation of
    its graph writes, draws, or calls Python (see ``model.pure_graph``).

Sensitive: everything here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.gradients.engine.proof import proof_of
from trainer.gradients.engine.traced_losses import trace_eagerly
from trainer.gradients.per_example import (
    GradientSum,
    cap_coordinates,
    clip_scale,
    keep_rows,
    real_rows,
    scale_rows,
    squared_norms,
    sum_in_chunks,
)
from trainer.model.layers.plain_layers import has_recurrent_layers, plain_layers
from trainer.model.pure_graph import check_pure
from trainer.model.trainable_model import TrainableModel
from trainer.tf_compat import tf

#: Largest number of values of per-example gradients that are held at a time: 256 MiB.
MOST_GRADIENT_VALUES = 1 << 26

#: Columns of one row -> its gradient for each variable, and whether it may contribute.
ExampleGradient = Callable[[Mapping[str, Any]], tuple[list[Any], Any]]


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


def single_examples_sum(
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

    Raises:
      InputError: ``gradient`` does more than compute its results.
    """
    of_example = _traced(model, gradient)

    def chunk_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        stacked, valid = tf.vectorized_map(of_example, keep_rows(columns, real))
        norms = tf.sqrt(squared_norms(stacked))
        counted, scale = clip_scale(norms, real & valid, l2_norm_clip)
        clipped = [scale_rows(g, counted, scale) for g in stacked]
        return [tf.reduce_sum(cap_coordinates(g, linf_norm_clip), 0) for g in clipped]

    copies *= _copies_of_gradients(model)
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


def _traced(model: TrainableModel, gradient: ExampleGradient) -> Callable[[Any], Any]:
    """Returns the traced gradient of an example, whose columns have no batch axis."""

    def of_example(example: Mapping[str, Any]) -> tuple[list[Any], Any]:
        return gradient({name: value[tf.newaxis] for name, value in example.items()})

    specs = {
        name: tf.TensorSpec(spec.shape[1:], spec.dtype)
        for name, spec in model.column_specs.items()
    }
    traced = trace_eagerly(of_example, specs)
    check_pure(traced.graph, "the gradient of the model's loss")
    return lambda example: traced({name: example[name] for name in specs})


def _copies_of_gradients(model: TrainableModel) -> int:
    """Returns the number of copies of an example's gradient that memory holds.

    The backward pass of one example holds one for each time step.
    """
    traced = proof_of(model).traced
    if not has_recurrent_layers(model.network) or traced is None:
        return 1
    return traced.time_steps
