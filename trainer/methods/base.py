"""What a training method does in a step; the rest of it is a `settings.methods.Method`.

Formal guarantees:
  - the sum of a physical batch changes by at most ``l2_norm_clip`` in norm with one
    row: a method promises it, and its tests show it.
  - what happens before a step sees no example: ``before_step`` is given what was drawn
    and what was released, and no batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from trainer.gradients.clipping import GradientSum
from trainer.gradients.noise import DrawStep
from trainer.model.trainable_model import TrainableModel
from trainer.settings.train_settings import TrainSettings


class MethodOptimizer(Protocol):
    """An optimizer of a method's own, in place of a Keras optimizer."""

    @property
    def variables(self) -> list[Any]:
        """All state between two steps beside the weights, for checkpoints."""

    def build(self, variables: Sequence[Any]) -> None:
        """Makes what state is not made yet."""

    def before_step(self, drawn: Sequence[np.ndarray]) -> None:
        """Prepares a step, before its gradients are taken.

        Args:
          drawn: What ``Hooks.draw`` draws beside the noise.  Sensitive.
        """

    def apply_gradients(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Updates the weights.

        Args:
          pairs: (noisy gradient, variable), in the order of the variables.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a method does in a step.

    Attributes:
      choose_path: Returns how the gradients of single examples are made, in a word.
      gradient_sum: (model, settings, l2_norm_clip) -> a function of a physical batch.
        One row changes its value by at most ``l2_norm_clip`` in norm; None, and no
        bound, of a method without privacy.
      optimizer: (settings, num_steps, variables) -> an optimizer of the method's own;
        None for that of the settings.
      draw: What is drawn for ``before_step``, beside the noise of every variable, as a
        function of the key of the run and the step; None for nothing.

    Raises of the functions:
      InputError: the method does not support this model.
    """

    choose_path: Callable[[TrainableModel, TrainSettings], str]
    gradient_sum: Callable[[TrainableModel, TrainSettings, float | None], GradientSum]
    optimizer: Callable[[TrainSettings, int, Sequence[Any]], MethodOptimizer] | None = (
        None
    )
    draw: DrawStep | None = None
