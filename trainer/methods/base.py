"""What a training method does in a step; the rest of it is a `settings.methods.Method`.

A method promises, and its tests show, that one row changes the sum of a physical batch
by at most ``l2_norm_clip`` in norm.  What an optimizer of its own does before a step is
a function of what was released and of what was drawn: it is given no batch.

Formal guarantees:
  - the noise of a step is drawn by the trainer for every variable, whatever a method
    draws beside it.
  - what is drawn is used: nothing is drawn for a method without an optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from accounting.validation import InputError
from trainer.gradients.clipping import GradientSum
from trainer.gradients.clipping_bias import AscentSums
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
      ascent: (model, optimizer) -> what `clipping_bias` compares of a method that takes
        its gradients uphill; None of others.  Not private, and no part of a step.

    Raises:
      InputError: something is drawn, and no optimizer takes it.  The functions raise it
        if the method does not support a model.
    """

    choose_path: Callable[[TrainableModel, TrainSettings], str]
    gradient_sum: Callable[[TrainableModel, TrainSettings, float | None], GradientSum]
    optimizer: Callable[[TrainSettings, int, Sequence[Any]], MethodOptimizer] | None = (
        None
    )
    draw: DrawStep | None = None
    ascent: Callable[[TrainableModel, Any], AscentSums] | None = None

    def __post_init__(self) -> None:
        if self.draw is not None and self.optimizer is None:
            raise InputError(
                "Expected Hooks with draw to bring an optimizer, whose before_step "
                "gets what is drawn. Omit draw, or bring one."
            )
