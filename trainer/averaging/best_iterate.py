"""The best iterate of a run without privacy, by the loss of rows that train nothing.

Noise and clip keep a private model from learning rows by heart.  A model without them
may be at its best long before the last step, and a comparison with its last iterate
would flatter privacy.  So about a tenth of the training rows train nothing; the model
is the iterate, among those of the curve, with the least loss on them.  Rows for the
evaluation have no say.

Public: the number of the step.  Sensitive: rows and losses.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from trainer.core.run.batches import Element
from trainer.core.run.withheld import withhold_values
from trainer.tf_compat import tf

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

    @withhold_values
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
