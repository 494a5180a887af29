"""Optimizers, and learning rates that follow a schedule over the run.

*Adam with a floor* under the root of its second moment:

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) (g^2 + floor^2)
    w <- w - rate * m^ / (sqrt(v^) + 1e-7)         m^, v^: without the bias of the start

A gradient with noise has the same noise in every coordinate, and v^ of a coordinate is
mostly the square of that noise, which is public.  What varies between coordinates is
then chance, most of all in the first steps, and the few large gradients, which the root
shrinks to the size of the others.  A floor of a few times the noise leaves the chance
out: coordinates below it move as with momentum, and those above it as with Adam.  The
floor is a function of the plan, hence public.

*Learning rates*, for step t of the run:

    warm-up     rate * (t + 1) / warmup_steps                        t < warmup_steps
    constant    rate
    cosine, linear, exponential    from rate down to rate * final_fraction at the end
    trapezoid   constant in the first half of the steps, linear in the second

With ``--optimizer module:function``, ``function(learning_rate)`` returns a Keras
optimizer; the learning rate is a number or a Keras schedule.  The rate of a step is a
function of the settings, the number of steps and the step.  The step is a variable of
the optimizer, which a checkpoint holds: a run that goes on has the same rates.

Public: everything here.

References:
  Tang, Shpilevskiy, Lecuyer (2024), arXiv:2312.14334, that noise dominates v^, so that
  Adam is momentum with another rate.  They subtract the noise from v^ to undo this.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

from accounting.core.validation import InputError, check_float, check_int
from trainer.core.tf_compat import keras, tf
from trainer.model.user_code import load_function, one_line_errors
from trainer.settings.train_settings import (
    CONSTANT,
    COSINE,
    EXPONENTIAL,
    LINEAR,
    TRAPEZOID,
    TrainSettings,
)


class FlooredAdam(keras.optimizers.Adam):
    """Keras's Adam, to whose squared gradients the square of a floor is added.

    Args:
      rate: Learning rate: a number, or a Keras schedule.
      floor: Floor of the root of the second moment, at least 0.
    """

    def __init__(self, rate: Any, *, floor: float) -> None:
        check_float("floor", floor, at_least=0)
        super().__init__(rate)
        self.floor = floor

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Moves one variable.

        Args:
          gradient: Gradient of the variable.
          variable: The variable.
          learning_rate: Learning rate of the step.
        """
        second = self._velocities[self._get_variable_index(variable)]
        # The step multiplies it by beta_2, which leaves (1 - beta_2) floor^2.
        added = (1 / self.beta_2 - 1) * self.floor**2
        self.assign_add(second, tf.fill(second.shape, tf.cast(added, second.dtype)))
        super().update_step(gradient, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Returns Keras's configuration, and the floor."""
        return {**super().get_config(), "floor": self.floor}


#: Schedule -> the share of the rate after a part of the steps, with the final share.
_SHARES: dict[str, Callable[[Any, float], Any]] = {
    CONSTANT: lambda part, final: tf.ones_like(part),
    COSINE: lambda part, final: final + (1 - final) * (1 + tf.cos(math.pi * part)) / 2,
    LINEAR: lambda part, final: 1 - (1 - final) * part,
    EXPONENTIAL: lambda part, final: final**part,
    TRAPEZOID: lambda part, final: (
        final + (1 - final) * tf.clip_by_value(2 * (1 - part), 0.0, 1.0)
    ),
}


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """A linear rise to a rate, and then a schedule to the end of the run.

    Of Keras's schedules only the cosine has a warm-up, and none is a trapezoid.

    Args:
      name: One of ``SCHEDULES``.
      rate: Learning rate at the last step of the rise.
      warmup: Number of steps of the rise; 0 for none.
      steps: Number of steps after the rise, at least 1.
      final: Learning rate at the end, as a fraction of ``rate``.
    """

    def __init__(
        self, *, name: str, rate: float, warmup: int, steps: int, final: float
    ) -> None:
        super().__init__()
        self._name, self._rate, self._final = name, rate, final
        self._warmup, self._steps = warmup, steps

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate of a step, a float32 scalar."""
        step = tf.cast(step, tf.float32)
        rising = (step + 1) / max(1, self._warmup)
        part = tf.maximum(step - self._warmup, 0.0) / self._steps
        falling = _SHARES[self._name](part, self._final)
        return self._rate * tf.where(step < self._warmup, rising, falling)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            "name": self._name,
            "rate": self._rate,
            "warmup": self._warmup,
            "steps": self._steps,
            "final": self._final,
        }


def learning_rate(settings: TrainSettings, num_steps: int) -> Any:
    """Returns the learning rate: a number, or a Keras schedule.

    Args:
      settings: Settings with learning rate, schedule and warm-up.
      num_steps: Number of steps of the run.

    Raises:
      InputError: ``warmup_steps`` is not below ``num_steps``.
    """
    if settings.learning_rate is None:
        raise ValueError("Expected TrainSettings.for_plan to settle the learning rate.")
    warmup, name = settings.warmup_steps, settings.learning_rate_schedule
    check_int("warmup_steps", warmup, at_least=0, at_most=num_steps - 1)
    if name == CONSTANT and not warmup:
        return settings.learning_rate
    assert name is not None  # settled with the settings
    return Schedule(
        name=name,
        rate=settings.learning_rate,
        warmup=warmup,
        steps=num_steps - warmup,
        final=settings.final_learning_rate_fraction,
    )


def make_optimizer(settings: TrainSettings, num_steps: int) -> Any:
    """Returns the Keras optimizer of a run.

    Args:
      settings: Settings with optimizer and learning rate.
      num_steps: Number of steps of the run.

    Raises:
      InputError: as ``learning_rate``; or the user's function fails, or does not return
        a Keras optimizer.
    """
    rate = learning_rate(settings, num_steps)
    if ":" in settings.optimizer:
        return _of_ones_own(settings.optimizer, rate)
    if settings.optimizer == "momentum":
        return keras.optimizers.SGD(rate, momentum=0.9)
    if settings.adam_floor:
        return FlooredAdam(rate, floor=settings.adam_floor)
    return type(keras.optimizers.get(settings.optimizer))(rate)


def _of_ones_own(spec: str, rate: Any) -> Any:
    function = load_function(spec, "optimizer")
    with one_line_errors(f"optimizer={spec!r}"):
        optimizer = function(rate)
    _check_optimizer(optimizer, f"optimizer={spec!r} to return")
    return optimizer


def optimizer_of_keras(optimizer: Any) -> Any:
    """Returns the Keras optimizer that ``compile(optimizer=...)`` means.

    Args:
      optimizer: Name, configuration or instance.

    Raises:
      InputError: the optimizer is none of these, such as one of tf_keras.
    """
    with contextlib.suppress(ValueError, TypeError):
        optimizer = keras.optimizers.get(optimizer)
    _check_optimizer(optimizer, "optimizer in compile to be")
    return optimizer


def _check_optimizer(optimizer: Any, what: str) -> None:
    kind = type(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise InputError(
            f"Expected {what} a Keras optimizer, such as "
            "keras.optimizers.Adam(0.001), and none of tf_keras; it is "
            f"{repr(optimizer) if isinstance(optimizer, str) else name}."
        )
    for part in (optimizer, *getattr(optimizer, "optimizers", ())):
        is_scaled = isinstance(part, keras.optimizers.LossScaleOptimizer)
        needs_fit = part.use_ema and part.ema_overwrite_frequency is None
        if is_scaled or part.loss_scale_factor is not None or needs_fit:
            raise InputError(
                f"Expected {what} an optimizer that needs no part of Keras's own fit. "
                "Omit loss_scale_factor and the scale of the loss; give "
                "ema_overwrite_frequency beside use_ema."
            )
