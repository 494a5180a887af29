"""Adam whose second moment has a floor under the root.

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) (g^2 + floor^2)
    w <- w - rate * m^ / (sqrt(v^) + 1e-7)         m^, v^: without the bias of the start

A gradient with noise has the same noise in every coordinate, and v^ of a coordinate is
mostly the square of that noise, which is public.  What varies between coordinates is
then chance, most of all in the first steps, and the few large gradients, which the root
shrinks to the size of the others.  A floor of a few times the noise leaves the chance
out: coordinates below it move as with momentum, and those above it as with Adam.

Public: the floor, which is a function of the plan.

References:
  Tang, Shpilevskiy, Lecuyer (2024), arXiv:2312.14334, that noise dominates v^, so that
  Adam is momentum with another rate.  They subtract the noise from v^ to undo this.
"""

from __future__ import annotations

from typing import Any

from accounting.core.validation import check_float
from trainer.tf_compat import keras, tf


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
          gradient: Its gradient.
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
