"""One step of DP-SGD over any number of physical batches.

    theta <- optimizer(theta, (1 / b) * (noise + sum of clipped gradients))

The sums start at the noise of the step and every physical batch adds to them: so noise
is added once per step by construction, however many batches a step has, and also when
all of its rows are padding.

Formal guarantees:
  - The noise enters exactly once per step.
  - The divisor is the constant ``expected_batch_size``, whatever the step holds.
  - Batches of a step may arrive in any split; only the sum of their gradients counts.

Public: the updated weights (they are the mechanism's output).  Sensitive: the sums.

References:
  Abadi et al. (2016), arXiv:1607.00133, Algorithm 1, with the divisor of
  Chua et al. (2024), arXiv:2411.04205.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from accounting.validation import check_int
from trainer.clipping import GradientSum
from trainer.tf_privacy import tf


class Step:
    """Runs steps: ``begin(noise)``, ``add(columns, weight)`` any times, ``finish()``.

    Args:
      variables: The trainable variables.
      gradient_sum: From ``clipping``; its outputs match ``variables``.
      optimizer: Any Keras optimizer.
      expected_batch_size: The plan's constant divisor.
      autograph: Whether ``gradient_sum`` needs AutoGraph; compiling takes longer then.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        gradient_sum: GradientSum,
        optimizer: Any,
        *,
        expected_batch_size: int,
        autograph: bool = False,
    ) -> None:
        check_int("expected_batch_size", expected_batch_size, at_least=1)
        self._variables = list(variables)
        self._gradient_sum = gradient_sum
        self._optimizer = optimizer
        self._divisor = float(expected_batch_size)
        self._sums = [
            tf.Variable(tf.zeros_like(variable), trainable=False)
            for variable in self._variables
        ]
        optimizer.build(self._variables)
        self._add = tf.function(self._accumulate, autograph=autograph)
        self._finish = tf.function(self._apply, autograph=False)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the variables, in order."""
        return [tuple(variable.shape) for variable in self._variables]

    def begin(self, noise: Sequence[np.ndarray]) -> None:
        """Starts a step with its noise, one array per variable.  Sensitive."""
        for total, values in zip(self._sums, noise, strict=True):
            total.assign(values)

    def add(self, columns: Mapping[str, Any], weight: Any) -> None:
        """Adds the gradients of one physical batch.  Sensitive."""
        self._add(dict(columns), weight)

    def finish(self) -> None:
        """Updates the variables."""
        self._finish()

    def _accumulate(self, columns: Mapping[str, Any], weight: Any) -> None:
        gradients = self._gradient_sum(columns, weight)
        for total, gradient in zip(self._sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                total.scatter_add(gradient)
            else:
                total.assign_add(gradient)

    def _apply(self) -> None:
        gradients = [total / self._divisor for total in self._sums]
        pairs = zip(gradients, self._variables, strict=True)
        self._optimizer.apply_gradients(pairs)
