"""The two paths to the gradients of single examples, and sums of these gradients.

  - ``one pass`` (``backward_pass``) needs a traced graph which proves that rows do not
    mix, and that only known operations use weights.
  - ``single examples`` (``core.step.clipping``) serves all other models.  Each example
    is computed by itself, for as many examples at a time as fit a fixed memory.

Both have the guarantees of ``core.step.clipping``, and agree with a loop over the
examples.

Public: the path.  Sensitive: every input and output.

References:
  Goodfellow (2015), arXiv:1510.01799.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accounting.core.validation import check_choice
from trainer.core.step.clipping import (
    ExampleGradients,
    GradientSum,
    SingleExamples,
    clipped,
    real_rows,
)
from trainer.core.tf_compat import tf
from trainer.gradients import proof
from trainer.gradients.backward_pass import one_pass
from trainer.model.trainable_model import TrainableModel

ONE_PASS = "one pass"
SINGLE_EXAMPLES = "single examples"


def choose_path(model: TrainableModel) -> str:
    """Returns the fastest path that is exact for ``model``."""
    return ONE_PASS if proof.obstacle(model) is None else SINGLE_EXAMPLES


def example_gradients(
    model: TrainableModel, path: str | None = None
) -> ExampleGradients:
    """Returns the gradients of single examples, whose graph is traced once per model.

    Args:
      model: Model that ``check_model`` accepts.
      path: "one pass" or "single examples"; None for ``choose_path``.

    Raises:
      InputError: the loss is not a function of columns and weights.
    """
    path = path or choose_path(model)
    check_choice("path", path, (ONE_PASS, SINGLE_EXAMPLES))
    return one_pass(model) if path == ONE_PASS else model.kept(SingleExamples)


def clipped_sum(
    model: TrainableModel, *, path: str | None = None, **clips: Any
) -> GradientSum:
    """Returns DP-SGD's sum of clipped gradients of a physical batch.

    Args:
      model: Model that ``check_model`` accepts.
      path: "one pass" or "single examples"; None for ``choose_path``.
      **clips: As for ``core.step.clipping.clipped``.

    Raises:
      InputError: as for `example_gradients`.
    """
    return clipped(example_gradients(model, path), **clips)


def plain_sum(model: TrainableModel) -> GradientSum:
    """Returns the function that sums gradients without clipping.  Not private."""

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        # 0 times NaN is NaN in the products of the backward pass: a row that may not
        # contribute, whose own gradient may be NaN, is replaced by the first that may.
        real = real_rows(model, columns, weight)
        rows = tf.where(real, tf.range(tf.size(real)), tf.argmax(real, 0, tf.int32))
        safe = {name: tf.gather(value, rows) for name, value in columns.items()}
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.where(real, model.losses(safe), 0.0))
        found = tape.gradient(
            total, model.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        any_real = tf.reduce_any(real)
        return tf.nest.map_structure(
            lambda values: (
                tf.where(any_real, values, tf.zeros_like(values))
                if values.dtype.is_floating
                else values  # indices of slices
            ),
            found,
            expand_composites=True,
        )

    return tf.function(gradient_sum, autograph=False)
