"""Iterates of a run, kept in its folder for use after training.

    RUN/iterates/step-00000120.npz   the trainable weights after 120 steps

An iterate is as public as the model: the guarantee of a private run is for all of its
iterates together.  Optimizer slots and noise are not in it.  ``numpy.load`` reads it;
its arrays, in order, are the ``trainable_weights`` of the exported Keras model.

The kept steps are known before the run: their number bounds the disk space.  A file is
complete or absent, and is written when its state is committed.

Public: iterates.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import zipfile
from collections.abc import Iterator, Sequence

import numpy as np

from accounting.core.validation import InputError
from pipelines.files.storage import write_atomically
from trainer.report.run_files import ITERATES_NAME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Iterates:
    """The kept iterates of one run.

    Attributes:
      run: The folder of the run.
      steps: Numbers of steps after which an iterate is kept, ascending.
    """

    run: pathlib.Path
    steps: tuple[int, ...]

    def path(self, step: int) -> pathlib.Path:
        """Returns where the weights after ``step`` steps are."""
        return self.run / ITERATES_NAME / f"step-{step:08d}.npz"

    def keep(self, step: int, weights: Sequence[np.ndarray]) -> None:
        """Writes the ``weights`` after ``step`` steps; see `load`."""
        path = self.path(step)
        path.parent.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, **{f"weight_{i}": array for i, array in enumerate(weights)})
        write_atomically(path, buffer.getvalue())

    def load(self, step: int) -> list[np.ndarray]:
        """Returns the weights after ``step`` steps.

        Raises:
          InputError: the file is missing or damaged.
        """
        path = self.path(step)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return [arrays[f"weight_{index}"] for index in range(len(arrays))]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise InputError(
                f"Expected {path} to be the iterate that this run wrote; it is missing "
                "or damaged. Restore it, or begin a new run in an empty folder."
            ) from None

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return map(self.load, self.steps)
