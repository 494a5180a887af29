"""The hooks of a run's method, and the bounded sum that is made of them.

The hooks define a step; the rest of a training method is a `settings.methods.Method`.
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

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from accounting.core.claim import AUTO_CLIP
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from trainer.core import claim_names
from trainer.core.step.bounded_sum import BoundedSum, StepSum
from trainer.core.step.clipping import ExampleGradients, GradientSum, clipped
from trainer.core.step.grid import AdaptiveClip
from trainer.core.step.noise import DrawStep
from trainer.core.tf_compat import raw_variable
from trainer.gradients import paths
from trainer.gradients.paths import plain_sum
from trainer.model.trainable_model import TrainableModel
from trainer.settings import methods
from trainer.settings.train_settings import TrainSettings


class MethodOptimizer(abc.ABC):
    """A method's own optimizer, around a Keras optimizer.

    Args:
      optimizer: The Keras optimizer.
      previous: Variables of the method that a checkpoint holds.
      buffers: Variables that ``before_step`` fills anew, for no checkpoint.
    """

    def __init__(
        self, optimizer: Any, *, previous: list[Any], buffers: list[Any]
    ) -> None:
        self._optimizer, self._previous, self.buffers = optimizer, previous, buffers

    @property
    def variables(self) -> list[Any]:
        """All state between two steps except the weights, for checkpoints."""
        return [*map(raw_variable, self._optimizer.variables), *self._previous]

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state that does not exist yet.

        Args:
          variables: The trainable variables.
        """
        self._optimizer.build(variables)

    @abc.abstractmethod
    def before_step(self, drawn: Sequence[np.ndarray]) -> None:
        """Prepares a step, before its gradients are computed.

        Args:
          drawn: Arrays from ``Hooks.draw``, without the noise.  Sensitive.
        """

    @abc.abstractmethod
    def apply_gradients(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Updates the weights.

        Args:
          pairs: (noisy mean gradient, variable), in the order of the variables.
        """


def fastest_path(model: TrainableModel, settings: TrainSettings) -> str:
    """Returns the fastest path that is exact for the model.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings of the run, which do not change the path.
    """
    del settings
    return paths.choose_path(model)


def gradients(model: TrainableModel, settings: TrainSettings) -> ExampleGradients:
    """Returns the gradients of the examples' losses.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings of the run, which do not change them.
    """
    del settings
    return paths.example_gradients(model)


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

    choose_path: Callable[[TrainableModel, TrainSettings], str] = fastest_path
    gradients: Callable[[TrainableModel, TrainSettings], ExampleGradients] | None = (
        gradients
    )
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


DP_SGD_HOOKS = Hooks()
NON_PRIVATE_HOOKS = Hooks(gradients=None)


def hooks_of(method: str) -> Hooks:
    """Returns what a method does in a step.

    Raises:
      InputError: there is no such method, or it brings no ``Hooks``.
    """
    found = methods.get(method).hooks()
    if not isinstance(found, Hooks):
        raise InputError(
            f"Expected method={method!r} to bring Hooks, not "
            f"{type(found).__name__}. Register it with them."
        )
    return found


def choose_path(model: TrainableModel, settings: TrainSettings) -> str:
    """Returns the name of the path that computes per-example gradients.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings with the method.
    """
    return hooks_of(settings.method).choose_path(model, settings)


def step_sum(
    model: TrainableModel,
    settings: TrainSettings,
    plan: DpSgdPlan,
    noise_multiplier: float | None,
) -> StepSum:
    """Returns the sum of a run: a ``BoundedSum``, except without privacy.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings with the method and its clip norm.
      plan: Plan of the batches.
      noise_multiplier: Noise multiplier of the run; None for a run without privacy.

    Raises:
      InputError: the method does not support this model, or no grid is fine enough.
    """
    hooks = hooks_of(settings.method)
    if hooks.gradients is None or noise_multiplier is None:
        return StepSum(gradient_sum(model, settings), plan)
    clip: Any = settings.l2_norm_clip
    if clip == AUTO_CLIP:
        assert settings.clip_quantile is not None  # settled with the clip
        clip = AdaptiveClip(settings.clip_quantile)
    linf_factor = hooks.linf_factor(model, settings) if hooks.linf_factor else 1
    return BoundedSum(
        hooks.gradients(model, settings),
        plan,
        l2_norm_clip=clip,
        noise_multiplier=noise_multiplier,
        linf_factor=linf_factor,
        relies_on=_claims(model, settings),
    )


def _claims(model: TrainableModel, settings: TrainSettings) -> list[str]:
    """Returns the claims of the method, and of how the rows of an example are made."""
    claim = methods.get(settings.method).claim
    found = [] if claim is None else [claim]
    if model.prepare is not None or model.description.get("views", 1) > 1:
        found.append(claim_names.VIEWS)
    if settings.selection is not None:
        found.append(claim_names.SELECTION)
    return found


def gradient_sum(model: TrainableModel, settings: TrainSettings) -> GradientSum:
    """Returns the sum of a method's gradients, clipped but on no grid.  Not private.

    Args:
      model: A model that ``check_model`` accepted.
      settings: Settings with the method and its clip norm.

    Raises:
      InputError: the method does not support this model.
      ValueError: the clip norm adapts.
    """
    hooks = hooks_of(settings.method)
    clip = settings.l2_norm_clip
    if isinstance(clip, str):  # each step has its own: no sum without the step's
        raise ValueError(f"Expected l2_norm_clip={clip!r} to be a number here.")
    if hooks.gradients is None or clip is None:
        found = plain_sum(model)
    else:
        found = clipped(hooks.gradients(model, settings), l2_norm_clip=clip)
    prepare = model.prepare or dict
    return lambda columns, weight: found(prepare(columns), weight)
