"""The contract of a step; the rest of a training method is a `settings.methods.Method`.

A method brings the gradient of each example, a function of this row and of earlier
releases alone, and never learns the clip: ``bounded_sum`` clips.  A method's own
optimizer prepares each step from earlier releases and drawn values alone: it is given
no batch.

Formal guarantees:
  - The trainer draws the noise of every variable in every step, whatever else a method
    draws.
  - Nothing is drawn for a method without an optimizer of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from accounting.core.validation import InputError
from trainer.core.step.noise import DrawStep
from trainer.core.step.per_example import ExampleGradients
from trainer.model.trainable_model import TrainableModel
from trainer.settings.train_settings import TrainSettings


class MethodOptimizer(Protocol):
    """A method's own optimizer, instead of a Keras optimizer."""

    @property
    def variables(self) -> list[Any]:
        """All state between two steps except the weights, for checkpoints."""

    @property
    def buffers(self) -> list[Any]:
        """The variables that ``before_step`` fills anew, for no checkpoint."""

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state that does not exist yet.

        Args:
          variables: The trainable variables.
        """

    def before_step(self, drawn: Sequence[np.ndarray]) -> None:
        """Prepares a step, before its gradients are computed.

        Args:
          drawn: Arrays from ``Hooks.draw``, without the noise.  Sensitive.
        """

    def apply_gradients(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Updates the weights.

        Args:
          pairs: (noisy mean gradient, variable), in the order of the variables.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a method does in a step.

    Attributes:
      choose_path: (model, settings) -> name of the path that computes per-example
        gradients.
      gradients: (model, settings) -> gradients of single examples; None for a method
        without privacy, whose gradients are summed as they are.
      linf_factor: (model, settings) -> p: each coordinate of a clipped gradient is
        clipped to the clip norm over the root of p; None for no bound.
      optimizer: (settings, Keras optimizer, variables) -> the method's own optimizer;
        None for the Keras optimizer.
      draw: Draws the arrays for ``before_step``, as a function of the run's key and
        the step; None if there are none.

    Raises:
      InputError: ``draw`` without ``optimizer``.  The functions raise it for a model
        that the method does not support.
    """

    choose_path: Callable[[TrainableModel, TrainSettings], str]
    gradients: Callable[[TrainableModel, TrainSettings], ExampleGradients] | None
    linf_factor: Callable[[TrainableModel, TrainSettings], float] | None = None
    optimizer: Callable[[TrainSettings, Any, Sequence[Any]], MethodOptimizer] | None = (
        None
    )
    draw: DrawStep | None = None

    def __post_init__(self) -> None:
        if self.draw is not None and self.optimizer is None:
            raise InputError(
                "Expected Hooks with draw to bring an optimizer, whose before_step "
                "gets what is drawn. Omit draw, or bring one."
            )
