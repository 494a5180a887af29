"""An exponential moving average of the weights, with warm-up.

    average_0 = theta_0
    average_t = (1 - beta_t) average_{t-1} + beta_t theta_t,
    beta_t    = max(1 - decay, 9 / (10 + t)),      t = 1, 2, ...

The average is a function of released weights: it costs no privacy.

Formal guarantees:
  - Training does not depend on the average.
  - ``swapped`` leaves the variables bit for bit as they were.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, equation 3; the warm-up is that of De et
  al. (2022), arXiv:2204.13650, decay_t = min(decay, (1 + t) / (10 + t)).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from accounting.validation import check_float, check_int
from trainer.tf_privacy import tf


def newest_weight(num_updates: int, decay: float) -> float:
    """Returns ``beta_t``, the weight of the newest iterate after ``t`` updates.

    Example:
      >>> newest_weight(1, decay=0.99)
      0.8181818181818182
      >>> round(newest_weight(100_000, decay=0.99), 6)
      0.01
    """
    check_int("num_updates", num_updates, at_least=1)
    check_float("ema_decay", decay, at_least=0, below=1)
    return max(1 - decay, 9 / (10 + num_updates))


class MovingAverage:
    """Averages ``variables``; ``update`` after every step."""

    def __init__(self, variables: Sequence[Any], decay: float) -> None:
        self._sources = list(variables)
        self._decay = decay
        self.variables = [tf.Variable(v, trainable=False) for v in self._sources]
        self._blend = tf.function(self._move, autograph=False)

    def update(self, num_updates: int) -> None:
        """Takes in the weights after ``num_updates`` steps."""
        self._blend(tf.constant(newest_weight(num_updates, self._decay)))

    def _move(self, newest: Any) -> None:
        for average, source in zip(self.variables, self._sources, strict=True):
            average.assign_add(tf.cast(newest, source.dtype) * (source - average))

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Puts the average in the place of the variables."""
        saved = [source.numpy() for source in self._sources]
        try:
            for source, average in zip(self._sources, self.variables, strict=True):
                source.assign(average)
            yield
        finally:
            for source, value in zip(self._sources, saved, strict=True):
                source.assign(value)
