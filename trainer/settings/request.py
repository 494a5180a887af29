"""A run that is asked for: settings, and the folders and files of this machine.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re

from accounting.validation import InputError, check_int
from trainer.settings.train_settings import TrainSettings


def check_local(**paths: pathlib.Path | None) -> None:
    """Accepts paths of this machine, by their names; None is no path.

    Raises:
      InputError: a path in a store.
    """
    for name, path in paths.items():
        # A path object has lost one of the two slashes after the scheme.
        if path and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", os.fspath(path)):
            raise InputError(
                f"Expected {name}={path} on this machine: training reads and writes "
                "local paths alone. Copy it here, or mount the store."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What ``dpsgd train`` is asked to do.

    Attributes:
      settings: What to train, and how.
      batches: Folder that ``dpsgd batches`` wrote.
      held_out: Folder of Parquet files with the columns of the batches.
      run: Folder for the results; new or empty, or of this run, unfinished.
      noise_key_file: Where the noise key is, or is made; in the run's ``private`` if
        None.
      checkpoint_every: Steps between checkpoints; by time if None.
      tensorboard: Folder for TensorBoard's event file of the curve, or None.
      csv: File for the curve, or None.

    Raises:
      InputError: name, value, bound, remedy.
    """

    settings: TrainSettings
    batches: pathlib.Path
    held_out: pathlib.Path
    run: pathlib.Path
    noise_key_file: pathlib.Path | None = None
    checkpoint_every: int | None = None
    tensorboard: pathlib.Path | None = None
    csv: pathlib.Path | None = None

    def __post_init__(self) -> None:
        check_local(
            batches=self.batches,
            eval=self.held_out,
            out=self.run,
            noise_key_file=self.noise_key_file,
            tensorboard=self.tensorboard,
            csv=self.csv,
        )
        if self.checkpoint_every is not None:
            check_int("checkpoint_every", self.checkpoint_every, at_least=1)
