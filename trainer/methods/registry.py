"""What the method of a run does in its steps.

Public: which method, by which path.  Sensitive: the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accounting.validation import InputError
from trainer.gradients.clipping import GradientSum
from trainer.methods.base import Hooks
from trainer.model.trainable_model import TrainableModel
from trainer.settings import methods
from trainer.settings.train_settings import TrainSettings


def hooks_of(method: str) -> Hooks:
    """Returns what a method does in a step.

    Raises:
      InputError: no such method, or it does not say.
    """
    found = methods.get(method).hooks()
    if not isinstance(found, Hooks):
        raise InputError(
            f"Expected method={method!r} to bring Hooks, not "
            f"{type(found).__name__}. Register it with them."
        )
    return found


def modules_of(method: str) -> set[str]:
    """Returns the modules of the functions that a step of the method calls.

    Raises:
      InputError: no such method, or it does not say.
    """
    hooks = hooks_of(method)
    called = (hooks.choose_path, hooks.gradient_sum, hooks.optimizer, hooks.draw)
    found = (getattr(function, "__module__", None) for function in called)
    return {module for module in found if module is not None}


def choose_path(model: TrainableModel, settings: TrainSettings) -> str:
    """Returns how the gradients of single examples are made.

    Args:
      model: Checked by ``models.check_model``.
      settings: The method.
    """
    return hooks_of(settings.method).choose_path(model, settings)


def gradient_sum(
    model: TrainableModel,
    settings: TrainSettings,
    *,
    l2_norm_clip: float | None = None,
) -> GradientSum:
    """Returns the function that sums the gradients of a physical batch.

    Args:
      model: Checked by ``models.check_model``.
      settings: The method.
      l2_norm_clip: Instead of that of ``settings``.

    Raises:
      InputError: the method does not support this model.
    """
    clip = settings.l2_norm_clip if l2_norm_clip is None else l2_norm_clip
    found = hooks_of(settings.method).gradient_sum(model, settings, clip)
    prepare = model.prepare
    if prepare is None:
        return found

    def prepared_sum(columns: Mapping[str, Any], weight: Any) -> list[Any]:
        return found(prepare(columns), weight)

    return prepared_sum
