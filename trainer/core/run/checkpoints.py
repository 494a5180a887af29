"""Checkpoints: the state of a run after some step, complete or absent.

Formal guarantees:
  - ``load`` returns exactly what the last finished ``save`` was given, bit for bit; a
    save that was killed leaves the one before it.
  - A file that was cut short, edited, or saved under another key or by a run of another
    id, plan, manifest, model or setting is refused.

The state between two steps, weights and optimizer slots, is a function of released
noisy sums.  It is nevertheless kept in ``private``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from accounting.core.validation import InputError
from pipelines.core.batches.stored import PRIVATE_NAME
from trainer.core.run import authenticated_arrays

CHECKPOINT_NAME = "checkpoint.npz"

_LABEL = "checkpoint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The state from which a run continues.

    Attributes:
      num_steps_executed: Number of executed steps.
      arrays: Weights and optimizer variables, in a fixed order.
      points: The curve so far.
      held_out: Digest of the held-out examples of the curve; empty without any.
      relies_on: Names of the claims that the steps relied on.
    """

    num_steps_executed: int
    arrays: tuple[np.ndarray, ...]
    points: tuple[dict[str, Any], ...]
    held_out: str
    relies_on: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Saves and loads the checkpoint of one run.

    Attributes:
      run: The folder of the run.
      run_key: Sub-key of the noise key that authenticates the checkpoint.  Sensitive.
    """

    run: pathlib.Path
    run_key: bytes = dataclasses.field(repr=False)

    @property
    def path(self) -> pathlib.Path:
        """Path of the checkpoint."""
        return self.run / PRIVATE_NAME / CHECKPOINT_NAME

    def save(self, state: State) -> None:
        """Replaces the checkpoint by ``state``."""
        header = {
            "num_steps": state.num_steps_executed,
            "points": state.points,
            "held_out": state.held_out,
            "relies_on": state.relies_on,
        }
        arrays = {f"array_{index}": a for index, a in enumerate(state.arrays)}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        authenticated_arrays.write(
            self.path, arrays, key=self.run_key, label=_LABEL, mode=0o600
        )

    def load(self) -> State | None:
        """Returns the checkpoint; None if there is none.

        Raises:
          InputError: it is damaged, or of another run.
        """
        return self.parse(self.read())

    def read(self) -> bytes:
        """Returns the bytes of the checkpoint; empty if there is none."""
        return self.path.read_bytes() if self.path.exists() else b""

    def parse(self, data: bytes) -> State | None:
        """Returns the checkpoint in bytes that ``read`` of this or another worker read.

        Raises:
          InputError: it is damaged, or of another run.
        """
        if not data:
            return None
        try:
            arrays = authenticated_arrays.parse(data, key=self.run_key, label=_LABEL)
        except authenticated_arrays.DamagedError:
            raise InputError(
                f"Expected {self.path} to be a checkpoint of this run; it is damaged, "
                "or of another key, other initial weights or another "
                "--checkpoint-every. Give the same command as before, or start again "
                "in an empty --out folder."
            ) from None
        header = json.loads(arrays.pop("header").tobytes())
        return State(
            num_steps_executed=header["num_steps"],
            arrays=tuple(arrays[f"array_{index}"] for index in range(len(arrays))),
            points=tuple(header["points"]),
            held_out=header["held_out"],
            relies_on=tuple(header["relies_on"]),
        )

    def remove(self) -> None:
        """Removes the checkpoint of a finished run."""
        self.path.unlink(missing_ok=True)
