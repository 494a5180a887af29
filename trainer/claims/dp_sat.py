"""DP-SAT: gradients at weights moved along the previous noisy gradient.

    eps    = rho * g_{t-1} / ||g_{t-1}||      (global norm; 0 at the first step)
    g_t    = (1 / b) (sum of clipped per-example gradients at w + eps, plus noise)
    w      <- optimizer(w, g_t)               at w itself

Formal guarantees:
  - The move is a function of noisy gradients that were released before: it is
    post-processing, and DP-SGD's accounting holds.
  - The weights are moved once per step, however many physical batches it has, and
    restored bit for bit before the optimizer updates them: no checkpoint, evaluation or
    export sees moved weights.
  - ``radius`` 0 gives DP-SGD.

The previous noisy gradient is part of the state, since the next step needs it.  It has
a value for every weight, so that noise cannot be lazy.

Public: everything here follows from released noisy gradients.

References:
  Park et al. (2023), arXiv:2306.05651, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from accounting.core.validation import check_float
from trainer.core.tf_compat import raw_variable, tf
from trainer.run.hooks import Hooks, MethodOptimizer
from trainer.settings.train_settings import TrainSettings

#: Added to the norm, as by the authors: the first step has no previous gradient.
_LEAST_NORM = 1e-16


class SharpnessAwareOptimizer(MethodOptimizer):
    """A Keras optimizer for gradients at moved weights.

    Its checkpoints hold the previous noisy gradient.

    Args:
      optimizer: Keras optimizer that updates the weights.
      variables: The trainable variables.
      radius: ``rho``, the L2 norm of a move, at least 0.
    """

    def __init__(
        self, optimizer: Any, variables: Sequence[Any], *, radius: float
    ) -> None:
        check_float("sat_radius", radius, at_least=0)
        self._weights = [raw_variable(variable) for variable in variables]
        self._radius = radius
        self._saved = [tf.Variable(v, trainable=False) for v in self._weights]
        previous = [
            tf.Variable(tf.zeros_like(v), trainable=False) for v in self._weights
        ]
        super().__init__(optimizer, previous=previous, buffers=self._saved)
        self._move = tf.function(self._move_weights, autograph=False)

    def before_step(self, drawn: Sequence[np.ndarray] = ()) -> None:
        """Moves the weights, until ``apply_gradients`` restores them.

        Args:
          drawn: Empty.
        """
        del drawn
        self._move()

    def apply_gradients(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Restores the weights and updates them with noisy gradients.

        Args:
          pairs: (noisy mean gradient, variable), in the order of the variables.
        """
        pairs = list(pairs)
        for weight, saved in zip(self._weights, self._saved, strict=True):
            weight.assign(saved)
        for previous, (gradient, _) in zip(self._previous, pairs, strict=True):
            previous.assign(gradient)
        self._optimizer.apply_gradients(pairs)

    def _move_weights(self) -> None:
        norm = tf.linalg.global_norm([tf.identity(p) for p in self._previous])
        scale = self._radius / (norm + _LEAST_NORM)
        for weight, saved, previous in zip(
            self._weights, self._saved, self._previous, strict=True
        ):
            # A copy: subtracting the move again would leave rounding errors.
            saved.assign(weight)
            weight.assign_add(scale * previous)


def _optimizer_of(
    settings: TrainSettings, optimizer: Any, variables: Sequence[Any]
) -> SharpnessAwareOptimizer:
    return SharpnessAwareOptimizer(
        optimizer, variables, radius=settings.method_settings["sat_radius"]
    )


HOOKS = Hooks(optimizer=_optimizer_of)
