"""DP-SGD's sum of clipped gradients, and the unclipped sum of training without privacy.

Public: the path.  Sensitive: the sums.
"""

from __future__ import annotations

from trainer.gradients import clipping
from trainer.gradients.per_example import GradientSum
from trainer.methods.base import Hooks
from trainer.model.trainable_model import TrainableModel
from trainer.settings.train_settings import TrainSettings


def choose_path(model: TrainableModel, settings: TrainSettings) -> str:
    """Returns the fastest path that is exact for the model.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings of the run, which do not change the path.
    """
    del settings
    return clipping.choose_path(model)


def clipped_sum(
    model: TrainableModel, settings: TrainSettings, clip: float | None
) -> GradientSum:
    """Returns DP-SGD's sum of the clipped gradients of a physical batch.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings of the run, which do not change the sum.
      clip: Bound on the L2 norm of one example's gradient, above 0.
    """
    del settings
    assert clip is not None  # checked by the settings
    return clipping.clipped_sum(model, l2_norm_clip=clip)


def _plain_sum(
    model: TrainableModel, settings: TrainSettings, clip: float | None
) -> GradientSum:
    del settings, clip  # nothing is clipped
    return clipping.plain_sum(model)


DP_SGD_HOOKS = Hooks(choose_path=choose_path, gradient_sum=clipped_sum)
NON_PRIVATE_HOOKS = Hooks(choose_path=choose_path, gradient_sum=_plain_sum)
