"""What a training method does with a physical batch; see `method_settings.Method`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from trainer.gradients.clipping import GradientSum
from trainer.model.trainable_model import TrainableModel
from trainer.settings.train_settings import TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """How a method sums the gradients of a physical batch.

    Attributes:
      choose_path: Returns how the gradients of single examples are made, in a word.
      gradient_sum: (model, settings, l2_norm_clip) -> a function of a physical batch.
        One row changes its value by at most ``l2_norm_clip`` in norm; None, and no
        bound, of a method without privacy.

    Raises of both:
      InputError: the method does not support this model.
    """

    choose_path: Callable[[TrainableModel, TrainSettings], str]
    gradient_sum: Callable[[TrainableModel, TrainSettings, float | None], GradientSum]
