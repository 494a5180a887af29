"""Gradients that are computed one example at a time.

The reference of all claims, and the only way for models that one pass does not
understand.  The gradient of a single example is traced once; the same graph runs for
every example, for as many at a time as fit a fixed memory.  Its form for several
examples is made once for each number of them.

Formal guarantees:
  - The gradient of an example is computed without the others, and its norm from it.
  - The traced gradient is a function of the example and the weights: no operation of
    its graph writes, draws, or calls Python (see ``core.step.pure_graph``).

Sensitive: everything here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.core import claim_names
from trainer.core.step.kernel_faults import check_products, dense, is_safe_together
from trainer.core.step.per_example import (
    ExampleGradients,
    cap_coordinates,
    scale_rows,
    squared_norms,
)
from trainer.core.step.pure_graph import check_pure
from trainer.core.step.tracing import trace_eagerly
from trainer.core.tf_compat import tf

if TYPE_CHECKING:
    from trainer.model.trainable_model import TrainableModel

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
    with tf.GradientTape() as tape, model.unrolled():
        tape.watch(sources)
        loss = tf.reduce_sum(model.losses(row))
    gradients = tape.gradient(
        loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return [*map(dense, gradients, sources)]


class SingleExamples(ExampleGradients):
    """Gradients that the core forms one example at a time.

    Args:
      model: Model and its loss.
      gradient: Gradient of one example, a function of its row and the weights alone;
        that of the loss if None.
      copies: Number of values per weight that ``gradient`` holds at a time.
      relies_on: Claims that ``gradient`` relies on.

    Raises:
      InputError: ``gradient`` does more than compute its results, or TensorFlow
        computes one of its products wrongly.
    """

    def __init__(
        self,
        model: TrainableModel,
        gradient: ExampleGradient | None = None,
        *,
        copies: int = 1,
        relies_on: Sequence[str] = (),
    ) -> None:
        def of_loss(row: Mapping[str, Any]) -> tuple[list[Any], Any]:
            return example_gradient(model, row), tf.constant(True)

        of_examples, of_trace = _traced(model, gradient or of_loss)

        def of_rows(columns: dict[str, Any], real: Any) -> tuple[_Stacked, Any]:
            stacked, valid = of_examples(columns)
            return _Stacked(stacked), valid

        num_values = (
            copies * of_trace * sum(v.shape.num_elements() for v in model.variables)
        )
        self.model = model
        self.of_rows = of_rows
        self.relies_on = claim_names.check(relies_on)
        self.chunk_rows = max(1, MOST_GRADIENT_VALUES // num_values)


class _Stacked:
    """Gradients by variable, each (batch, *shape); see ``RowGradients``."""

    def __init__(self, gradients: list[Any]) -> None:
        self._gradients = gradients

    def norms(self) -> Any:
        """Returns the L2 norm of each row's gradient, (batch,)."""
        return tf.sqrt(squared_norms(self._gradients))

    def scaled_sum(self, scale: Any, cap: float | None) -> list[Any]:
        """Returns the sum of the scaled gradients, a tensor per variable.

        Args:
          scale: Factor of each row, (batch,), 0 for those that add nothing.
          cap: Largest coordinate of a scaled gradient; None for no bound.
        """
        found = [cap_coordinates(scale_rows(g, scale), cap) for g in self._gradients]
        # A sum over rows, which need not be computed row by row as those within rows.
        return [tf.raw_ops.Sum(input=one, axis=0) for one in found]


def _traced(
    model: TrainableModel, gradient: ExampleGradient
) -> tuple[Callable[[Any], Any], int]:
    """Returns the traced gradient for several examples, and how often memory holds it.

    The columns of an example have no batch axis.  A backward pass through a recurrent
    layer holds a copy for each time step.
    """

    def of_example(example: Mapping[str, Any]) -> tuple[list[Any], Any]:
        with model.unrolled() as found:
            row = {name: value[tf.newaxis] for name, value in example.items()}
            gradients = gradient(row)
        lengths.extend(found)
        return gradients

    specs = {
        name: tf.TensorSpec(spec.shape[1:], spec.dtype)
        for name, spec in model.column_specs.items()
    }
    lengths: list[int] = []
    traced = trace_eagerly(of_example, specs)
    check_pure(traced.graph, "the gradient of the model's loss")
    check_products(traced.graph.get_operations())
    copies = max(lengths, default=1)
    together = is_safe_together(traced.graph, traced.inputs[: len(specs)])

    @functools.partial(tf.function, autograph=False)
    def of_columns(columns: Mapping[str, Any]) -> Any:
        if together:
            return tf.vectorized_map(traced, columns)
        return tf.map_fn(traced, columns, fn_output_signature=results)

    results = tf.nest.map_structure(
        lambda value: tf.TensorSpec(value.shape, value.dtype), traced.structured_outputs
    )
    return lambda columns: of_columns({name: columns[name] for name in specs}), copies
