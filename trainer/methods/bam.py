"""Bias-aware minimisation: per-example gradients a small step uphill, then clipped.

    u_i  = gradient of example i's loss at theta
    g_i  = gradient of example i's loss at  theta + lambda * u_i / ||u_i||     ("sam")
       or  u_i + lambda * H_i u_i / ||u_i||,  H_i its Hessian at theta         ("hvp")
    sum_i  w_i * min(1, C / ||g_i||) * g_i

Clipping is what biases DP-SGD, and small gradients are clipped less.  Both variants
descend the loss plus ``lambda`` times the norm of each example's gradient: "hvp" is its
exact gradient, "sam" the same up to O(lambda^2) by a second gradient instead of a
Hessian ("BAM FWD-REV" and "BAM SAM" of the paper).  ``lambda`` is what sharpness-aware
minimisation calls the radius of the perturbation, usually rho.

Formal guarantees:
  - Those of ``clipping``, for g_i, on every path.  In particular g_i is a function of
    the weights of the model and of row i alone, and is clipped: the sum changes by at
    most ``l2_norm_clip`` with one row, as in DP-SGD, so that DP-SGD's accounting holds.
  - Where u_i = 0, g_i is the gradient at theta.
  - Where the terms of u_i cancel, the bound on its norm that is clipped elsewhere (see
    ``layer_gradients``) stands for ||u_i||: the step uphill is shorter, never longer.
  - A row whose u_i or g_i is not finite, or has a norm that overflows float32,
    contributes exactly nothing.
  - ``radius`` 0 gives DP-SGD.
  - All paths agree with a loop over the examples.

Three paths.  ``book-keeping`` (see ``ghost_clipping``) moves no weights: along its own
gradient a layer's outputs change by inner products that are at hand.  ``operations``
(see ``operation_clipping``) computes what follows from the weights once more, with the
outcome of each use for weights of the example's own (see ``moved_weights``).
``vectorized`` takes each example by itself, with a copy of the weights; "hvp" always
takes it.  The last two hold as many examples at a time as fit a fixed memory.

Public: radius, variant and path.  Sensitive: every input and output.

References:
  Knolle et al. (2023), arXiv:2308.12018, Algorithm 2 and equations 13 and 14.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accounting.validation import check_choice, check_float
from trainer.gradients import ghost_clipping
from trainer.gradients.clipping import (
    BOOKKEEPING,
    MOST_GRADIENT_VALUES,
    OPERATIONS,
    VECTORIZED,
    ExampleGradient,
    GradientSum,
    choose_path,
    clipped_sum,
    example_gradient,
    plain_sum,
    vectorized_sum,
)
from trainer.gradients.clipping_bias import AscentSums
from trainer.gradients.functional_weights import check_replaceable, replaced_weights
from trainer.gradients.operations import operation_clipping
from trainer.gradients.per_example import keep_rows, real_rows, sum_in_chunks
from trainer.methods.base import Hooks
from trainer.model.trainable_model import TrainableModel
from trainer.settings.built_in_methods import BAM_HVP, BAM_SAM, BAM_VARIANTS
from trainer.settings.train_settings import TrainSettings
from trainer.tf_compat import tf

#: Copies of the weights that an example needs at a time: u_i, where to, and g_i.
_COPIES = 3

#: A norm that next to no gradient is below.
_LEAST_CLIP = 1e-10


def choose_bam_path(model: TrainableModel, variant: str = BAM_SAM) -> str:
    """Returns the fastest path that is exact.

    Args:
      model: Checked by ``models.check_model``.
      variant: "sam" or "hvp".
    """
    return choose_path(model) if variant == BAM_SAM else VECTORIZED


def bam_sum(
    model: TrainableModel,
    *,
    l2_norm_clip: float,
    radius: float,
    variant: str = BAM_SAM,
    path: str | None = None,
) -> GradientSum:
    """Returns the function that sums the clipped gradients of a physical batch.

    Args:
      model: Checked by ``check_model``.
      l2_norm_clip: Above 0; infinity leaves gradients as they are.
      radius: ``lambda``, at least 0.
      variant: "sam" or "hvp".
      path: "book-keeping", "operations" or "vectorized"; the first that is exact if
        None.

    Raises:
      InputError: name, value, bound; or weights that cannot be replaced for one
        example.
    """
    check_float("bam_radius", radius, at_least=0)
    check_choice("bam_variant", variant, BAM_VARIANTS)
    path = path or choose_bam_path(model, variant)
    paths = (VECTORIZED,) if variant == BAM_HVP else (*_PASSES, VECTORIZED)
    check_choice("path", path, paths)
    if radius == 0:
        return clipped_sum(model, l2_norm_clip=l2_norm_clip)
    if path in _PASSES:
        return _PASSES[path](model, l2_norm_clip, radius)
    if variant == BAM_SAM:
        check_replaceable(
            model, remedy="Give bam_variant='hvp', as a flag: --bam-variant hvp."
        )
    return _vectorized_sum(model, l2_norm_clip, radius, variant)


def ascent_scale(norms: Any, real: Any, radius: float) -> tuple[Any, Any]:
    """Returns which rows count, and by what their gradients are scaled to a step.

    Args:
      norms: Norms of the gradients of all rows, shape (rows,); or of one, a scalar.
      real: Which rows hold an example, of the same shape.
      radius: Length of the step, ``lambda``.

    Returns:
      Which rows are real with a finite norm; and ``radius / norm`` for those, 0 where
      the norm is 0 or the row does not count.
    """
    counted = real & tf.math.is_finite(norms)
    scale = tf.math.divide_no_nan(tf.cast(radius, norms.dtype), norms)
    return counted, tf.where(counted, scale, 0.0)


def _bookkeeping_sum(
    model: TrainableModel, l2_norm_clip: float, radius: float
) -> GradientSum:
    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        safe = keep_rows(columns, real)
        here = ghost_clipping.backward(model, safe)
        counted, scale = ascent_scale(here.norms(), real, radius)
        uphill = ghost_clipping.backward(model, safe, here.moves(counted, scale))
        return uphill.clipped_sum(counted, l2_norm_clip)

    return gradient_sum


def _operations_sum(
    model: TrainableModel, l2_norm_clip: float, radius: float
) -> GradientSum:
    def of_chunk(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        real = real_rows(model, columns, weight)
        num_rows = weight.shape[0]
        here = operation_clipping.backward(model, keep_rows(columns, real), num_rows)
        counted, scale = ascent_scale(here.norms(), real, radius)
        return here.moved(counted, scale).clipped_sum(counted, l2_norm_clip)

    def gradient_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        return list(
            sum_in_chunks(
                lambda rows: of_chunk(*rows),
                (dict(columns), weight),
                num_rows=weight.shape[0],
                chunk_rows=max(1, MOST_GRADIENT_VALUES // (_COPIES * num_values)),
                initial=[tf.zeros_like(variable) for variable in model.variables],
            )
        )

    num_values = max(1, operation_clipping.num_formed_values(model))
    otherwise = _vectorized_sum(model, l2_norm_clip, radius, BAM_SAM)
    return operation_clipping.as_proven(model, gradient_sum, otherwise)


#: Paths that take one pass at the weights, and one uphill of them.
_PASSES = {BOOKKEEPING: _bookkeeping_sum, OPERATIONS: _operations_sum}


def _vectorized_sum(
    model: TrainableModel, l2_norm_clip: float, radius: float, variant: str
) -> GradientSum:
    gradient = (_uphill if variant == BAM_SAM else _penalized)(model, radius)
    return vectorized_sum(model, l2_norm_clip, gradient, copies=_COPIES)


def _uphill(model: TrainableModel, radius: float) -> ExampleGradient:
    """The gradient at the end of a step of length ``radius`` along the gradient."""

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


def _penalized(model: TrainableModel, radius: float) -> ExampleGradient:
    """The gradient of the loss plus ``radius`` times the norm of its gradient."""

    def gradient(row: Mapping[str, Any]) -> tuple[list[Any], Any]:
        with tf.GradientTape() as tape:
            here = example_gradient(model, row)
            # The derivative of <u, v> for a constant v is the Hessian times v.
            norm = tf.stop_gradient(tf.linalg.global_norm(here))
            counted, scale = ascent_scale(norm, True, radius)
            product = tf.add_n(
                [tf.reduce_sum(u * tf.stop_gradient(scale * u)) for u in here]
            )
        bend = tape.gradient(
            product, model.variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return [u + h for u, h in zip(here, bend, strict=True)], counted

    return gradient


def _path_of(model: TrainableModel, settings: TrainSettings) -> str:
    return choose_bam_path(model, settings.method_settings["bam_variant"])


def _sum_of(
    model: TrainableModel, settings: TrainSettings, clip: float | None
) -> GradientSum:
    assert clip is not None  # checked by the settings
    return bam_sum(
        model,
        l2_norm_clip=clip,
        radius=settings.method_settings["bam_radius"],
        variant=settings.method_settings["bam_variant"],
    )


def _ascent_of(model: TrainableModel, optimizer: Any) -> AscentSums:
    """The sum of the examples' directions beside that of their gradients."""
    del optimizer  # gradients are taken at the weights that it updates
    # Clipped to next to nothing, every gradient is its direction.
    directions = clipped_sum(model, l2_norm_clip=_LEAST_CLIP)
    gradients = plain_sum(model)
    return lambda *batch: (gradients(*batch), directions(*batch))


HOOKS = Hooks(choose_path=_path_of, gradient_sum=_sum_of, ascent=_ascent_of)
