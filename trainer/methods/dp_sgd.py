"""Sums of clipped per-example gradients at the weights, and of unclipped ones.

DP-SAT differs from DP-SGD in the weights alone, and ModelMix in the clip of single
coordinates.

Public: the path.  Sensitive: the sums.
"""

from __future__ import annotations

import math

from trainer.gradients import clipping
from trainer.gradients.clipping import GradientSum
from trainer.methods.base import Sums
from trainer.model.trainable_model import TrainableModel
from trainer.settings.train_settings import TrainSettings


def _path(model: TrainableModel, _: TrainSettings) -> str:
    return clipping.choose_path(model)


def _clipped_sum(
    model: TrainableModel, settings: TrainSettings, clip: float | None
) -> GradientSum:
    assert clip is not None  # checked by the settings
    factor = settings.linf_factor or 1
    cap = clip / math.sqrt(factor) if factor > 1 else None
    return clipping.clipped_sum(model, l2_norm_clip=clip, linf_norm_clip=cap)


def _plain_sum(
    model: TrainableModel, _: TrainSettings, clip: float | None
) -> GradientSum:
    del clip  # nothing is clipped
    return clipping.plain_sum(model)


CLIPPED = Sums(choose_path=_path, gradient_sum=_clipped_sum)
UNCLIPPED = Sums(choose_path=_path, gradient_sum=_plain_sum)
