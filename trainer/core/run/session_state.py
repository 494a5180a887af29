"""The state of a run that changes in training, saved in and restored from checkpoints.

Formal guarantees:
  - After ``restore``, variables, number of steps and curve are bit for bit those of the
    last finished ``save``.
  - A run resumes only with the held-out examples that it began with.
  - Variables are saved and restored in the order in which they were given.
  - All workers restore the chief's checkpoint; only the chief saves one.

Public: steps and curve.  The variables are functions of released noisy sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.core.run.checkpoints import Checkpoints, State
from trainer.core.step.workers import Alone, Workers

#: Seconds between checkpoints if no number of steps is given.
_CHECKPOINT_SECONDS = 60.0


class SessionState:
    """The state of one run between two steps.

    Args:
      checkpoints: Where to save the state.
      variables: All variables that later steps or results depend on, in a fixed order.
      every: Steps between checkpoints; by time if None.
      held_out: Digest of the held-out examples of the curve, empty without any; None
        for a worker that is not the chief.
      relies_on: Claims that the steps of this process rely on.
      after_save: Called after each save, by the chief.
      workers: All workers of the run.

    Attributes:
      points: The curve so far: dicts with ``step`` and metrics.
      relies_on: Claims that the steps so far rely on, of every process.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        variables: Sequence[Any],
        *,
        every: int | None,
        held_out: str | None,
        relies_on: tuple[str, ...] = (),
        after_save: Callable[[], None] = lambda: None,
        workers: Workers | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._variables = list(variables)
        self._every = every
        self._held_out = held_out
        self._after_save = after_save
        self._workers: Workers = workers or Alone()
        self._saved_at = time.monotonic()
        self.points: list[dict[str, Any]] = []
        self.relies_on = relies_on

    def restore(self) -> int | None:
        """Restores the checkpoint, and returns its number of executed steps.

        If there is none, saves the first one and returns None.

        Raises:
          InputError: the checkpoint is damaged, of another run, or its curve is of
            other held-out examples.
        """
        chief = self._workers.is_chief
        sent = self._workers.chiefs(self._checkpoints.read() if chief else b"")
        state = self._workers.together(lambda: self._parse(sent))
        if state is None:
            self.save(0)
            return None
        for variable, value in zip(self._variables, state.arrays, strict=True):
            variable.assign(value)
        self.points = list(state.points)
        self.relies_on = (*self.relies_on, *state.relies_on)
        return state.num_steps_executed

    def _parse(self, data: bytes) -> State | None:
        state = self._checkpoints.parse(data)
        if state is not None and self._held_out not in (None, state.held_out):
            raise InputError(
                "Expected --eval to hold the examples that the first "
                f"{state.num_steps_executed} steps of this run were evaluated on; they "
                "differ. Give the same folder as before, or start again in an empty "
                "--out folder."
            )
        return state

    def save(self, num_steps_executed: int) -> None:
        """Replaces the checkpoint by the current state."""
        if not self._workers.is_chief:
            return
        assert self._held_out is not None  # the chief gave it
        self._checkpoints.save(
            State(
                num_steps_executed=num_steps_executed,
                arrays=tuple(variable.numpy() for variable in self._variables),
                points=tuple(self.points),
                held_out=self._held_out,
                relies_on=self.relies_on,
            )
        )
        self._after_save()
        self._saved_at = time.monotonic()

    def save_is_due(self, num_steps_executed: int) -> bool:
        """Returns whether a checkpoint is due after this number of steps."""
        if self._every is not None:
            return num_steps_executed % self._every == 0
        return time.monotonic() - self._saved_at >= _CHECKPOINT_SECONDS
