"""DP-SGD: the gradients of the examples' losses; and training without privacy."""

from __future__ import annotations

from trainer.core.step.per_example import ExampleGradients
from trainer.gradients import clipping
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


def gradients(model: TrainableModel, settings: TrainSettings) -> ExampleGradients:
    """Returns the gradients of the examples' losses.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings of the run, which do not change them.
    """
    del settings
    return clipping.example_gradients(model)


DP_SGD_HOOKS = Hooks(choose_path=choose_path, gradients=gradients)
NON_PRIVATE_HOOKS = Hooks(choose_path=choose_path, gradients=None)
