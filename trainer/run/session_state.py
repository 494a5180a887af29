"""What changes while a run trains, and goes on from its last checkpoint.

Formal guarantees:
  - After ``restore``, variables, steps done and curve are bit for bit those of the last
    finished ``save``.
  - A run goes on with the held-out examples that it began with.
  - What is saved is fixed by the variables that were given: their order is their name.

Public: steps and curve.  The variables follow from released noisy sums.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from accounting.validation import InputError
from trainer.run.checkpoints import Checkpoints, State

#: Seconds between checkpoints where no number of steps is given.
_CHECKPOINT_SECONDS = 60.0


class SessionState:
    """The state of one run between two steps.

    Args:
      checkpoints: Where it is saved.
      variables: All that a later step or a result depends on, in a fixed order.
      every: Steps between checkpoints; by time if None.
      held_out: Digest of the held-out examples: a curve is of one set of them.

    Attributes:
      num_steps_executed: Steps that are done.
      points: The curve so far: dicts with ``step`` and metrics.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        variables: Sequence[Any],
        *,
        every: int | None,
        held_out: str,
    ) -> None:
        self._checkpoints = checkpoints
        self._variables = list(variables)
        self._every = every
        self._held_out = held_out
        self._saved_at = time.monotonic()
        self.num_steps_executed = 0
        self.points: list[dict[str, Any]] = []

    def restore(self) -> bool:
        """Goes back to the checkpoint; saves the first one where there is none.

        Returns:
          Whether there was one.

        Raises:
          InputError: it is damaged, of another run, or its curve is of other held-out
            examples.
        """
        state = self._checkpoints.load()
        if state is None:
            self.save()
            return False
        if state.held_out != self._held_out:
            raise InputError(
                "Expected --eval to hold the examples that the first "
                f"{state.num_steps_executed} steps of this run were evaluated on; they "
                "differ. Give the same folder as before, or start again in an empty "
                "--out folder."
            )
        for variable, value in zip(self._variables, state.arrays, strict=True):
            variable.assign(value)
        self.points = list(state.points)
        self.num_steps_executed = state.num_steps_executed
        return True

    def save(self) -> None:
        """Replaces the checkpoint."""
        self._checkpoints.save(
            State(
                num_steps_executed=self.num_steps_executed,
                arrays=tuple(variable.numpy() for variable in self._variables),
                points=tuple(self.points),
                held_out=self._held_out,
            )
        )
        self._saved_at = time.monotonic()

    @property
    def save_is_due(self) -> bool:
        """Whether a checkpoint is to be saved after this step."""
        if self._every is not None:
            return self.num_steps_executed % self._every == 0
        return time.monotonic() - self._saved_at >= _CHECKPOINT_SECONDS
