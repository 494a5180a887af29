"""The sum of gradients that each training method makes of a physical batch.

Public: which method, by which path.  Sensitive: the sums.
"""

from __future__ import annotations

from accounting.validation import InputError
from trainer.gradients.clipping import GradientSum
from trainer.methods.base import Sums
from trainer.model.trainable_model import TrainableModel
from trainer.settings import method_settings
from trainer.settings.train_settings import TrainSettings


def _sums(settings: TrainSettings) -> Sums:
    sums = method_settings.get(settings.method).sums()
    if not isinstance(sums, Sums):
        raise InputError(
            f"Expected method={settings.method!r} to bring Sums, not "
            f"{type(sums).__name__}. Mend what it was registered with."
        )
    return sums


def choose_path(model: TrainableModel, settings: TrainSettings) -> str:
    """Returns how the gradients of single examples are made.

    Args:
      model: Checked by ``models.check_model``.
      settings: The method.
    """
    return _sums(settings).choose_path(model, settings)


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
    return _sums(settings).gradient_sum(model, settings, clip)
