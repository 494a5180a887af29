"""The hooks of a run's method, and the bounded sum that is made of them."""

from __future__ import annotations

from typing import Any

from accounting.core.claim import AUTO_CLIP
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from trainer.core import claims
from trainer.core.step.adaptive_clip import AdaptiveClip
from trainer.core.step.bounded_sum import BoundedSum, StepSum
from trainer.core.step.per_example import GradientSum, clipped
from trainer.gradients.clipping import plain_sum
from trainer.methods.base import Hooks
from trainer.model.trainable_model import TrainableModel
from trainer.settings import methods
from trainer.settings.train_settings import TrainSettings


def hooks_of(method: str) -> Hooks:
    """Returns what a method does in a step.

    Raises:
      InputError: no such method, or it brings no ``Hooks``.
    """
    found = methods.get(method).hooks()
    if not isinstance(found, Hooks):
        raise InputError(
            f"Expected method={method!r} to bring Hooks, not "
            f"{type(found).__name__}. Register it with them."
        )
    return found


def choose_path(model: TrainableModel, settings: TrainSettings) -> str:
    """Returns the name of the path that computes per-example gradients.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings with the method.
    """
    return hooks_of(settings.method).choose_path(model, settings)


def step_sum(
    model: TrainableModel,
    settings: TrainSettings,
    plan: DpSgdPlan,
    noise_multiplier: float | None,
) -> StepSum:
    """Returns the sum of a run: a ``BoundedSum``, except without privacy.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings with the method and its clip norm.
      plan: Plan of the batches.
      noise_multiplier: Noise multiplier of the run; None for a run without privacy.

    Raises:
      InputError: the method does not support this model, or no grid is fine enough.
    """
    hooks = hooks_of(settings.method)
    if hooks.gradients is None or noise_multiplier is None:
        return StepSum(gradient_sum(model, settings), plan)
    clip: Any = settings.l2_norm_clip
    if clip == AUTO_CLIP:
        assert settings.clip_quantile is not None  # settled with the clip
        clip = AdaptiveClip(settings.clip_quantile)
    linf_factor = hooks.linf_factor(model, settings) if hooks.linf_factor else 1
    return BoundedSum(
        hooks.gradients(model, settings),
        plan,
        l2_norm_clip=clip,
        noise_multiplier=noise_multiplier,
        linf_factor=linf_factor,
        relies_on=_claims(model, settings),
    )


def _claims(model: TrainableModel, settings: TrainSettings) -> list[str]:
    """Returns the claims of the method, and of how the rows of an example are made."""
    claim = methods.get(settings.method).claim
    found = [] if claim is None else [claim]
    if model.prepare is not None or model.description.get("views", 1) > 1:
        found.append(claims.VIEWS)
    if "rows_per_user" in model.description:
        found.append(claims.USER_ROWS)
    if settings.selection is not None:
        found.append(claims.SELECTION)
    return found


def gradient_sum(model: TrainableModel, settings: TrainSettings) -> GradientSum:
    """Returns the sum of a method's gradients, clipped but on no grid.  Not private.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings with the method and its clip norm.

    Raises:
      InputError: the method does not support this model.
      ValueError: the clip norm adapts.
    """
    hooks = hooks_of(settings.method)
    clip = settings.l2_norm_clip
    if isinstance(clip, str):  # each step has its own: no sum without the step's
        raise ValueError(f"Expected l2_norm_clip={clip!r} to be a number here.")
    if hooks.gradients is None or clip is None:
        found = plain_sum(model)
    else:
        found = clipped(hooks.gradients(model, settings), l2_norm_clip=clip)
    prepare = model.prepare or dict
    return lambda columns, weight: found(prepare(columns), weight)
