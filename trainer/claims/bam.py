"""Bias-aware minimisation: per-example gradients a small step uphill, then clipped.

    u_i  = gradient of example i's loss at theta
    g_i  = gradient of example i's loss at  theta + lambda * u_i / ||u_i||
    sum_i  w_i * min(1, C / ||g_i||) * g_i

Clipping biases DP-SGD, and small gradients are clipped less.  BAM minimises the loss
plus ``lambda`` times the norm of each example's gradient, up to O(lambda^2) ("BAM SAM"
in the paper).  Sharpness-aware minimisation calls ``lambda`` the perturbation radius,
usually rho.

Formal guarantees:
  - Those of ``step.clipping``, for g_i, on every path.  In particular g_i is a function
    of the model's weights and row i alone, and is clipped: one row changes the sum by
    at most ``l2_norm_clip``, so that DP-SGD's accounting holds.
  - Where u_i = 0, g_i is the gradient at theta.
  - Where the terms of u_i cancel, ||u_i|| is replaced by the upper bound that
    ``gradient_parts`` clips: the step uphill is shorter, never longer.
  - A row whose u_i or g_i is not finite, or has a norm that overflows float32,
    contributes exactly nothing.
  - ``radius`` 0 gives DP-SGD.
  - All paths agree with a loop over the examples.

There are two paths.  ``one pass`` (see ``backward_pass``) recomputes everything that
depends on the weights, with each operation's outcome at the example's own weights.
``single examples`` computes each example separately, with its own copy of the weights.
Both process as many examples at a time as fit in a fixed amount of memory.

Public: radius and path.  Sensitive: every input and output.

References:
  Knolle et al. (2023), arXiv:2308.12018, Algorithm 2 and equation 14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.core.claim_names import GRAPH_GRADIENTS
from trainer.core.step.clipping import (
    MOST_GRADIENT_VALUES,
    ExampleGradient,
    ExampleGradients,
    SingleExamples,
    example_gradient,
)
from trainer.core.step.pure_graph import trace_eagerly
from trainer.core.tf_compat import keras, tf
from trainer.gradients.backward_pass import BackwardPass, backward, num_formed_values
from trainer.gradients.paths import (
    ONE_PASS,
    SINGLE_EXAMPLES,
    choose_path,
    example_gradients,
)
from trainer.gradients.proof import ids_depend_on_weights, proof_of
from trainer.model.trainable_model import TrainableModel
from trainer.run.hooks import Hooks
from trainer.settings.train_settings import TrainSettings


@contextlib.contextmanager
def replaced_weights(model: TrainableModel, weights: Sequence[Any]) -> Iterator[None]:
    """Replaces the weights of ``model`` within a context of a graph.

    Args:
      model: Model that is built.
      weights: A tensor for each variable, in order and of its shape.

    Raises:
      InputError: the model read one of its variables; it is raised at the end.
    """
    graph = tf.compat.v1.get_default_graph()
    num_before = len(graph.get_operations())
    with keras.StatelessScope(zip(model.optimized, weights, strict=True)):
        yield
    # By the operations, not by a tape, which sees no raw read of a handle.
    names = {id(variable.handle): variable.name for variable in model.variables}
    own = {
        inner.op.name: names[id(outer)]
        for outer, inner in graph.captures
        if id(outer) in names
    }
    for operation in graph.get_operations()[num_before:]:
        for read in (own.get(value.op.name) for value in operation.inputs):
            if read is not None:
                raise InputError(
                    f"Expected {read} to be read as a keras.Variable; the model reads "
                    "its tf.Variable, which cannot be moved for one example. Use the "
                    "result of add_weight as it is, or another --method."
                )


def check_replaceable(model: TrainableModel) -> None:
    """Checks that ``replaced_weights`` can replace the weights of a model.

    Args:
      model: Model that is built.

    Raises:
      InputError: a layer does not read a weight as a Keras variable.
    """

    def replaced(columns: Any) -> Any:
        weights = [tf.zeros(v.shape, v.dtype) for v in model.variables]
        with replaced_weights(model, weights):
            return model.losses(columns)

    trace_eagerly(replaced, model.column_specs)


#: Arrays of the size of the weights per example: u_i, the moved weights, and g_i.
_COPIES = 3


def choose_bam_path(model: TrainableModel, settings: Any = None) -> str:
    """Returns the fastest path that is exact.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings of the run, which do not change the path.
    """
    del settings
    if choose_path(model) != ONE_PASS:
        return SINGLE_EXAMPLES
    # Moved weights would move the rows that are read, too.
    return SINGLE_EXAMPLES if ids_depend_on_weights(proof_of(model)) else ONE_PASS


def bam_gradients(
    model: TrainableModel, *, radius: float, path: str | None = None
) -> ExampleGradients:
    """Returns the g_i of single examples.

    Args:
      model: A model that ``check_model`` accepted.
      radius: ``lambda``, at least 0.
      path: "one pass" or "single examples"; None for the fastest that is exact.

    Raises:
      InputError: the weights cannot be replaced for one example.
    """
    if radius == 0:
        return example_gradients(model)
    if (path or choose_bam_path(model)) == ONE_PASS:
        return _one_pass(model, radius)
    check_replaceable(model)
    return SingleExamples(model, _uphill(model, radius), copies=_COPIES)


def ascent_scale(norms: Any, real: Any, radius: float) -> tuple[Any, Any]:
    """Returns which rows count, and the factor from gradient to step of each.

    Args:
      norms: Norm of each row's gradient, shape (rows,), or a scalar for one row.
      real: Bools of the same shape: whether a row holds an example.
      radius: Length of the step, ``lambda``.

    Returns:
      Which rows are real and have a finite norm; and ``radius / norm`` for these rows,
      0 for all others and where the norm is 0.
    """
    counted = real & tf.math.is_finite(norms)
    scale = tf.math.divide_no_nan(tf.cast(radius, norms.dtype), norms)
    return counted, tf.where(counted, scale, 0.0)


def _one_pass(model: TrainableModel, radius: float) -> ExampleGradients:
    proof = proof_of(model)

    def of_rows(columns: dict[str, Any], real: Any) -> tuple[BackwardPass, Any]:
        here = backward(proof, columns, real.shape[0])
        counted, scale = ascent_scale(here.norms(), real, radius)
        return here.moved(scale), counted

    num_values = _COPIES * max(1, num_formed_values(proof))
    return ExampleGradients(
        model,
        of_rows,
        relies_on=[GRAPH_GRADIENTS],
        chunk_rows=max(1, MOST_GRADIENT_VALUES // num_values),
    )


def _uphill(model: TrainableModel, radius: float) -> ExampleGradient:
    """Returns the g_i of one example."""

    def gradient(row: Mapping[str, Any]) -> tuple[list[Any], Any]:
        direction = example_gradient(model, row)
        counted, scale = ascent_scale(tf.linalg.global_norm(direction), True, radius)
        weights = [
            variable + scale * value
            for variable, value in zip(model.variables, direction, strict=True)
        ]
        with replaced_weights(model, weights):
            return example_gradient(model, row, weights), counted

    return gradient


def _gradients_of(model: TrainableModel, settings: TrainSettings) -> ExampleGradients:
    return bam_gradients(model, radius=settings.method_settings["bam_radius"])


HOOKS = Hooks(choose_path=choose_bam_path, gradients=_gradients_of)
