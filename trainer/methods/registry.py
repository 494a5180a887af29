"""The hooks of a run's method, and its gradient sum.

Public: the method and its path.  Sensitive: the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accounting.plan import DpSgdPlan
from accounting.validation import InputError
from trainer.gradients.per_example import GradientSum
from trainer.methods.base import Hooks
from trainer.model.trainable_model import TrainableModel
from trainer.settings import methods
from trainer.settings.train_settings import TrainSettings
from trainer.workers import grid
from trainer.workers.grid import Grid


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


def modules_of(method: str) -> set[str]:
    """Returns the names of the modules whose functions a step of the method calls.

    Raises:
      InputError: as ``hooks_of``.
    """
    hooks = hooks_of(method)
    called = (hooks.choose_path, hooks.gradient_sum, hooks.optimizer, hooks.draw)
    found = (getattr(function, "__module__", None) for function in called)
    return {module for module in found if module is not None}


def choose_path(model: TrainableModel, settings: TrainSettings) -> str:
    """Returns the name of the path that computes per-example gradients.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings with the method.
    """
    return hooks_of(settings.method).choose_path(model, settings)


def sum_on_grid(
    model: TrainableModel,
    settings: TrainSettings,
    plan: DpSgdPlan,
    noise_multiplier: float | None,
) -> tuple[GradientSum, Grid | None]:
    """Returns the gradient sum of a run, clipped for the run's grid, and the grid.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings with the method and its clip norm.
      plan: Plan of the batches; its largest step bounds the sums on the grid.
      noise_multiplier: Noise multiplier of the run; None for a run without privacy,
        which has no grid.

    Raises:
      InputError: the method does not support this model, or no grid is fine enough.
      ValueError: a private run without a clip norm.
    """
    if noise_multiplier is None:
        return gradient_sum(model, settings), None
    if settings.l2_norm_clip is None:  # the loss is still "auto"
        raise ValueError("Expected the clip norm of a private run to be settled.")
    found = grid.make(
        l2_norm_clip=settings.l2_norm_clip,
        noise_multiplier=noise_multiplier,
        num_values=sum(v.shape.num_elements() for v in model.variables),
        most_examples=plan.truncated_batch_size or plan.num_examples,
    )
    return gradient_sum(model, settings, l2_norm_clip=found.clip), found


def gradient_sum(
    model: TrainableModel,
    settings: TrainSettings,
    *,
    l2_norm_clip: float | None = None,
) -> GradientSum:
    """Returns the function that sums the gradients of a physical batch.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings with the method and its clip norm.
      l2_norm_clip: Clip norm instead of that of ``settings``; None for the latter.

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
