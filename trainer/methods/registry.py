"""The sum of gradients that each training method makes of a physical batch.

Public: which method, by which path.  Sensitive: the sums.
"""

from __future__ import annotations

import math

from trainer.gradients import clipping
from trainer.gradients.clipping import GradientSum
from trainer.methods import bam
from trainer.model.trainable_model import TrainableModel
from trainer.settings.method_settings import BAM, BAM_SAM, NON_PRIVATE
from trainer.settings.train_settings import TrainSettings


def choose_path(model: TrainableModel, settings: TrainSettings) -> str:
    """Returns how the gradients of single examples are made."""
    if settings.method == BAM:
        return bam.choose_bam_path(model, settings.bam_variant or BAM_SAM)
    return clipping.choose_path(model)


def gradient_sum(
    model: TrainableModel,
    settings: TrainSettings,
    *,
    l2_norm_clip: float | None = None,
) -> GradientSum:
    """Returns the function that sums the gradients of a physical batch.

    Args:
      model: Checked by ``models.check_model``.
      settings: The method; DP-SAT differs from DP-SGD in the weights alone, and
        ModelMix in the clip of single coordinates.
      l2_norm_clip: Instead of that of ``settings``.

    Raises:
      InputError: the method cannot be had for this model.
    """
    if settings.method == NON_PRIVATE:
        return clipping.plain_sum(model)
    clip = settings.l2_norm_clip if l2_norm_clip is None else l2_norm_clip
    assert clip is not None  # checked by the settings
    if settings.method != BAM:
        factor = settings.linf_factor or 1
        cap = clip / math.sqrt(factor) if factor > 1 else None
        return clipping.clipped_sum(model, l2_norm_clip=clip, linf_norm_clip=cap)
    assert settings.bam_radius is not None  # checked by the settings
    return bam.bam_sum(
        model,
        l2_norm_clip=clip,
        radius=settings.bam_radius,
        variant=settings.bam_variant or BAM_SAM,
    )
