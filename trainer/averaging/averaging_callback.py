"""Averages of the weights in ``model.fit``, as a Keras callback.

    averages = AverageWeights(AggregationSettings(ema_decay=0.999))
    model.fit(..., callbacks=[averages])
    with averages.swapped("ema"):
        model.evaluate(...)

A step is one update by the optimizer, which may take several batches.

Formal guarantees:
  - The averages and the iterates are those of ``averaging`` for the same updates.
  - A second ``fit`` continues where the first ended.

Public: the averages, if the iterates are public.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from accounting.core.validation import InputError
from trainer.averaging.averages import TrainingAverages
from trainer.settings.aggregation_settings import AggregationSettings
from trainer.tf_compat import keras


class AverageWeights(keras.callbacks.Callback):
    """Computes the averages of ``settings``, and trains over one if these say so.

    Args:
      settings: Settings of averages during training; ``keep_last`` and
        ``evaluate_averages`` are only for ``dpsgd train``.

    Raises:
      InputError: no average is requested, or a setting is only for ``dpsgd train``.
    """

    def __init__(self, settings: AggregationSettings) -> None:
        super().__init__()
        others = settings.keep_last is not None or settings.evaluate_averages
        if others or not settings.averages_every_step:
            raise InputError(
                "Expected ema_decay or tail, and neither keep_last nor "
                "evaluate_averages, for a callback. `dpsgd train` has these."
            )
        self._settings = settings
        self._averages: TrainingAverages | None = None
        self._first = self._done = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the averages at the weights in the first ``fit``."""
        if self._averages is None:
            weights = self.model.trainable_variables
            self._averages = TrainingAverages(weights, self._settings)
            self._first = self._updates()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the weights to an average if the step starts there.

        Args:
          batch: Index of the batch; unused, as a step may take several.
          logs: Keras's logs; unused.
        """
        # Within a step the weights do not change.
        self._known().before_step(self._done)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Updates the averages if the batch ended a step; see `on_train_batch_begin`.

        Raises:
          InputError: Keras executed several steps since the last call.
        """
        done = self._updates() - self._first
        if done == self._done:
            return
        if done != self._done + 1:
            raise InputError(
                f"Expected one update between two calls of the callback, not "
                f"{done - self._done}. Compile with steps_per_execution=1."
            )
        self._done = done
        self._known().after_step(done)

    @contextlib.contextmanager
    def swapped(self, name: str) -> Iterator[None]:
        """Replaces the weights by the average "ema" or "uta" within the context."""
        with self._known().swapped(name):
            yield

    def _updates(self) -> int:
        return int(self.model.optimizer.iterations)

    def _known(self) -> TrainingAverages:
        if self._averages is None:
            raise InputError("Expected model.fit to have begun before its averages.")
        return self._averages
