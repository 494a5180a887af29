"""Averages of the weights during training, and the best iterate without privacy.

theta_t are the weights after t steps, theta_0 the initial weights.

    EMA   average_0 = theta_0
          average_t = (1 - beta_t) average_{t-1} + beta_t theta_t,
          beta_t    = max(1 - decay, 9 / (10 + t)),      t = 1, 2, ...
    UTA   average_t = (theta_{t-m+1} + ... + theta_t) / m,      m = min(tail, t + 1)

Training over aggregates from step tau: every step t >= tau starts at average_t instead
of theta_t.  Optimizer slots are not averaged.  Averages are functions of released
weights, and a step may start at any such function: neither costs privacy.  Without
``train_over``, training does not depend on the averages.

The tail average is the sum of the last ``tail`` iterates in double precision over their
number, rounded once.  The sum is recomputed every ``tail`` updates, so that rounding
errors do not accumulate.  It needs ``tail`` + 2 copies of the weights.

*The best iterate of a run without privacy* has the least loss of rows that train
nothing.  Noise and clip keep a private model from learning rows by heart.  A model
without them may be at its best long before the last step, and a comparison with its
last iterate would flatter privacy.  So about a tenth of the training rows train
nothing, and choose among the iterates of the curve.  Rows for the evaluation have no
say.

Public: averages, and the number of the step.  Sensitive: rows and losses.

References:
  Shejwalkar et al. (2025), arXiv:2210.01864, Algorithm 1 and equation 3; the warm-up is
  that of De et al. (2022), arXiv:2204.13650, decay_t = min(decay, (1 + t) / (10 + t)).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from accounting.core.validation import check_float, check_int
from trainer.core.run.redact_errors import redact_errors
from trainer.core.run.session import Element
from trainer.core.tf_compat import tf
from trainer.model.evaluation import Evaluator
from trainer.model.weights import weights_of
from trainer.report.run_files import PREDICTION
from trainer.run.iterates import (
    Iterates,
    OutputsByName,
    ema_weights,
    majority_metrics,
    weighted_mean,
)
from trainer.settings.train_settings import (
    EMA,
    OMV,
    OPA,
    PAST_EMA,
    UPA,
    UTA,
    AggregationSettings,
)


def newest_weight(num_updates: int, decay: float) -> float:
    """Returns ``beta_t``, the weight of the newest iterate after ``t`` updates.

    Args:
      num_updates: t, at least 1.
      decay: Decay of the moving average after its warm-up, in [0, 1).

    Raises:
      InputError: a value is out of range.

    Example:
      >>> newest_weight(1, decay=0.99)
      0.8181818181818182
      >>> round(newest_weight(100_000, decay=0.99), 6)
      0.01
    """
    check_int("num_updates", num_updates, at_least=1)
    check_float("ema_decay", decay, at_least=0, below=1)
    return max(1 - decay, 9 / (10 + num_updates))


class Average(Protocol):
    """An average of the weights, in variables that a checkpoint can hold."""

    @property
    def variables(self) -> list[Any]:
        """All variables of the average."""

    def update(self, num_updates: int) -> None:
        """Updates the average after ``num_updates`` steps: 1, 2, ... in order."""

    def values(self) -> list[Any]:
        """Returns the average, one tensor per weight."""


class MovingAverage:
    """The EMA of ``weights``."""

    def __init__(self, weights: Sequence[Any], decay: float) -> None:
        self._weights = list(weights)
        self._decay = decay
        self.variables = [tf.Variable(v, trainable=False) for v in self._weights]
        self._blend = tf.function(self._move, autograph=False)

    def update(self, num_updates: int) -> None:
        self._blend(tf.constant(newest_weight(num_updates, self._decay)))

    def _move(self, newest: Any) -> None:
        for average, weight in zip(self.variables, self._weights, strict=True):
            average.assign_add(tf.cast(newest, weight.dtype) * (weight - average))

    def values(self) -> list[Any]:
        return list(self.variables)


class TailAverage:
    """The UTA of ``weights``: a ring of the last ``tail`` iterates, and their sum."""

    def __init__(self, weights: Sequence[Any], tail: int) -> None:
        check_int("tail", tail, at_least=1)
        self._weights = list(weights)
        self._tail = tail
        # Each copy is read once per round, so copies need not be on an accelerator.
        with tf.device("CPU"):
            self._rings = [
                tf.Variable(tf.zeros((tail, *v.shape), v.dtype), trainable=False)
                for v in self._weights
            ]
            self._totals = [
                tf.Variable(tf.zeros(v.shape, tf.float64), trainable=False)
                for v in self._weights
            ]
            self._num_updates = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._replace = tf.function(self._put, autograph=False)
        self._replace(tf.constant(0))

    @property
    def variables(self) -> list[Any]:
        return [*self._rings, *self._totals, self._num_updates]

    def update(self, num_updates: int) -> None:
        slot = num_updates % self._tail
        self._replace(tf.constant(slot))
        if slot == self._tail - 1:
            self._sum_anew()
        self._num_updates.assign(num_updates)

    def _put(self, slot: Any) -> None:
        for ring, total, weight in zip(
            self._rings, self._totals, self._weights, strict=True
        ):
            gone = tf.cast(ring.sparse_read(slot), tf.float64)
            total.assign_add(tf.cast(weight, tf.float64) - gone)
            ring.scatter_update(tf.IndexedSlices(weight[tf.newaxis], slot[tf.newaxis]))

    def _sum_anew(self) -> None:
        for ring, total in zip(self._rings, self._totals, strict=True):
            total.assign(tf.zeros_like(total))
            for slot in range(self._tail):
                total.assign_add(tf.cast(ring.sparse_read(slot), tf.float64))

    def _times(self) -> range:
        """The numbers of updates of the iterates in the ring."""
        last = int(self._num_updates)
        return range(max(0, last - self._tail + 1), last + 1)

    def values(self) -> list[Any]:
        count = tf.constant(len(self._times()), tf.float64)
        return [
            tf.cast(total / count, weight.dtype)
            for total, weight in zip(self._totals, self._weights, strict=True)
        ]


class TrainingAverages(Mapping[str, Average]):
    """The averages of a run, by name.

    Args:
      weights: The trainable variables.
      settings: Settings of the averages, and of training over one.
    """

    def __init__(self, weights: Sequence[Any], settings: AggregationSettings) -> None:
        self._weights = list(weights)
        self._settings = settings
        self._averages: dict[str, Average] = {}
        if settings.ema_decay is not None:
            self._averages[EMA] = MovingAverage(weights, settings.ema_decay)
        if settings.tail is not None:
            self._averages[UTA] = TailAverage(weights, settings.tail)

    def __getitem__(self, name: str) -> Average:
        return self._averages[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._averages)

    def __len__(self) -> int:
        return len(self._averages)

    @property
    def variables(self) -> list[Any]:
        """All variables of the averages, in a fixed order."""
        return [v for average in self._averages.values() for v in average.variables]

    def before_step(self, step: int) -> None:
        """Sets the weights to an average if step ``step`` starts there."""
        name = self._settings.train_over
        if name is None or step < (self._settings.aggregate_from or 0):
            return
        for weight, value in zip(
            self._weights, self._averages[name].values(), strict=True
        ):
            weight.assign(value)

    def after_step(self, num_steps_executed: int) -> None:
        """Updates the averages after this number of steps."""
        for average in self._averages.values():
            average.update(num_steps_executed)

    @contextlib.contextmanager
    def swapped(self, name: str) -> Iterator[None]:
        """Replaces the weights by an average within the context."""
        with weights_of(self._weights, self._averages[name].values()):
            yield


class PastResults:
    """Evaluates the kept iterates of a finished run.

    Args:
      iterates: At least one.
      weights: The trainable variables of the model.
      evaluator: Evaluates the model on the held-out examples; None without any.
      settings: Settings of averages and exports.
    """

    def __init__(
        self,
        iterates: Iterates,
        weights: list[Any],
        evaluator: Evaluator | None,
        settings: AggregationSettings,
    ) -> None:
        self._iterates = iterates
        self._weights = weights
        self._evaluator = evaluator
        self._settings = settings

    def evaluate(self, export: Callable[[str], None]) -> dict[str, Any]:
        """Returns name -> metrics of every aggregate.

        Without an evaluator, there are none, and averages are only exported.
        ``export`` is called with each average to export, while the model has its
        weights.
        """
        evaluator, metrics = self._evaluator, {}
        for name, values in self._weight_averages().items():
            with weights_of(self._weights, values):
                if evaluator is not None:
                    metrics[name] = evaluator.metrics()
                if name in self._settings.export:
                    export(name)
        if evaluator is None:
            return {}
        labels, outputs = self._outputs(evaluator)
        metrics[OPA] = evaluator.metrics_of(labels, outputs.outputs)
        for vote in outputs.votes:
            metrics[OMV] = majority_metrics(labels, vote)
        return metrics

    def _weight_averages(self) -> dict[str, list[np.ndarray]]:
        count, decay = len(self._iterates.steps), self._settings.keep_decay
        return {
            PAST_EMA: weighted_mean(self._iterates, ema_weights(count, decay)),
            UPA: weighted_mean(self._iterates, np.full(count, 1 / count)),
        }

    def _outputs(self, evaluator: Evaluator) -> tuple[Any, OutputsByName]:
        loss = evaluator.model.loss
        labels, outputs = None, OutputsByName(loss.task, PREDICTION)
        for iterate in self._iterates:
            with weights_of(self._weights, iterate):
                labels, found = evaluator.outputs()
            outputs.add(found)
        return labels, outputs


#: One row in so many trains nothing.
ONE_IN = 10
#: More rows than these are left out, but not evaluated.
_MOST_ROWS = 2**14


class BestIterate:
    """The weights with the least mean loss so far, in variables for a checkpoint.

    Args:
      weights: The trainable variables.
      losses: Columns of a batch -> the loss of each row.
      batches: All batches of the run; they are read until there are enough rows.
    """

    def __init__(
        self,
        weights: Sequence[Any],
        losses: Callable[[Any], Any],
        batches: Iterable[Element],
    ) -> None:
        self._weights = list(weights)
        self._losses = tf.function(losses, autograph=False, reduce_retracing=True)
        self._parts = list(_held_out(batches))
        self._best = [tf.Variable(v, trainable=False) for v in self._weights]
        self._loss = tf.Variable(np.inf, dtype=tf.float64, trainable=False)
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def variables(self) -> list[Any]:
        """All of its variables."""
        return [*self._best, self._loss, self._step]

    @property
    def step(self) -> int:
        """Number of steps after which the weights were best."""
        return int(self._step)

    @redact_errors
    def update(self, num_steps_executed: int) -> None:
        """Keeps the weights after this number of steps if they are the best so far."""
        losses = [self._losses(columns).numpy() for columns in self._parts]
        # Without such rows, as in a tiny table, the last weights count as the best.
        loss = np.concatenate(losses).mean(dtype=np.float64) if losses else -np.inf
        if loss < float(self._loss) or not losses:
            self._loss.assign(loss)
            self._step.assign(num_steps_executed)
            for kept, weight in zip(self._best, self._weights, strict=True):
                kept.assign(weight)

    def restore(self) -> None:
        """Sets the weights to the best ones."""
        for kept, weight in zip(self._best, self._weights, strict=True):
            weight.assign(kept)


def without_held_out(batch: Element) -> Element:
    """Returns a batch in which the rows that train nothing are padding."""
    trains = _digests(batch["columns"]) % ONE_IN != 0
    return {**batch, "weight": batch["weight"] * trains.astype(np.float32)}


def _digests(columns: dict[str, Any]) -> np.ndarray:
    """Returns a number for each row, the same for equal rows of any batch."""
    values = [np.ascontiguousarray(columns[name]) for name in sorted(columns)]
    rows = np.concatenate(
        [value.reshape(len(value), -1).view(np.uint8) for value in values], axis=1
    )
    return np.array([zlib.crc32(row) for row in rows])


def _held_out(batches: Iterable[Element]) -> Iterator[dict[str, Any]]:
    """Yields the columns of the rows that train nothing, of equal rows one."""
    seen = set[int]()
    for batch in batches:
        digests = _digests(batch["columns"])
        found = (digests % ONE_IN == 0) & (np.asarray(batch["weight"]) > 0)
        new = {digests[place]: place for place in np.flatnonzero(found)}
        places = [place for digest, place in new.items() if digest not in seen]
        seen |= set(new)
        if places:
            yield {n: np.asarray(v)[places] for n, v in batch["columns"].items()}
        if len(seen) >= _MOST_ROWS:
            return
