"""Iterates of a run, kept in its folder for use after training.

    RUN/iterates/step-00000120.npz   the trainable weights after 120 steps

An iterate is as public as the model: the guarantee of a private run is for all of its
iterates together.  Optimizer slots and noise are not in it.  ``numpy.load`` reads it;
its arrays, in order, are the ``trainable_weights`` of the exported Keras model.

Formal guarantees:
  - The kept steps are known before the run: their number bounds the disk space, and
    nothing has to be removed.
  - A file is complete or absent, and a replayed step writes the same bytes.
  - An iterate that is missing, edited, of another run or of another step is refused.

Public: iterates.  Sensitive: the key that authenticates them.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from accounting.core.validation import InputError
from trainer.core.run import authenticated_arrays
from trainer.report.run_files import ITERATES_NAME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Iterates:
    """The kept iterates of one run.

    Attributes:
      run: The folder of the run.
      run_key: Sub-key of the noise key that authenticates the iterates.  Sensitive.
      steps: Numbers of steps after which an iterate is kept, ascending.
    """

    run: pathlib.Path
    run_key: bytes = dataclasses.field(repr=False)
    steps: tuple[int, ...]

    def path(self, step: int) -> pathlib.Path:
        """Returns where the weights after ``step`` steps are."""
        return self.run / ITERATES_NAME / f"step-{step:08d}.npz"

    def keep(self, step: int, weights: Sequence[np.ndarray]) -> None:
        """Writes the ``weights`` after ``step`` steps; see `load`."""
        path = self.path(step)
        path.parent.mkdir(exist_ok=True)
        arrays = {f"weight_{index}": array for index, array in enumerate(weights)}
        authenticated_arrays.write(
            path, arrays, key=self.run_key, label=f"iterate {step}"
        )

    def load(self, step: int) -> list[np.ndarray]:
        """Returns the weights after ``step`` steps.

        Raises:
          InputError: the file is missing, or this run did not write it.
        """
        path = self.path(step)
        try:
            arrays = authenticated_arrays.read(
                path, key=self.run_key, label=f"iterate {step}"
            )
        except (FileNotFoundError, authenticated_arrays.DamagedError):
            raise InputError(
                f"Expected {path} to be the iterate that this run wrote; it is missing "
                "or was changed. Restore it, or start again in an empty --out folder."
            ) from None
        return [arrays[f"weight_{index}"] for index in range(len(arrays))]

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return map(self.load, self.steps)

    def recover(self, num_steps_executed: int) -> None:
        """Removes leftovers of a kill; checks that all iterates up to a step exist.

        Raises:
          InputError: an iterate is missing or was changed.
        """
        for leftover in (self.run / ITERATES_NAME).glob(".step-*"):
            leftover.unlink()  # of a write that was killed
        for step in self.steps:
            if step <= num_steps_executed:
                self.load(step)
