"""A requested run: settings, folders and files.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re

from accounting.core.validation import InputError
from pipelines.files.paths import StrPath
from trainer.settings.setting import (
    OUTPUT,
    PRIVACY,
    check_declared,
    setting,
)
from trainer.settings.train_settings import TrainSettings

#: A path object keeps one of the two slashes after the scheme.
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_COPY = "Copy it here, or mount the store."
_ONE_STORE = "Give a folder here; `dpsgd train` alone keeps a run in a store."


def check_local(remedy: str = _COPY, /, **paths: StrPath | None) -> None:
    """Refuses paths that are not on this machine.

    Args:
      remedy: End of the message.
      **paths: Paths by the names of their settings; None for no path.

    Raises:
      InputError: a path is in a store.
    """
    for name, path in paths.items():
        if path and _REMOTE.match(os.fspath(path)):
            raise InputError(
                f"Expected {name}={path} on this machine, not in a store. {remedy}"
            )


def check_batches(path: StrPath) -> None:
    """Checks the path of a folder of batches, here or in a store.

    Raises:
      InputError: a path object was made from a store's path.
    """
    if isinstance(path, os.PathLike) and _REMOTE.match(os.fspath(path)):
        raise InputError(
            f"Expected batches={path} of a store as text: a path object has lost a "
            "slash. Give a str, such as 's3://bucket/batches'."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A run of ``dpsgd train``.

    Attributes:
      settings: Training settings.
      batches: Folder that ``dpsgd batches`` wrote; a str if it is in a store.
      held_out: Held-out examples whose metrics are published unprotected: a folder of
        Parquet files with the columns of the batches.  None for none.
      run: Folder for the results: new, empty, or of this run, unfinished.
      store: Folder in a store (``s3://``) that keeps ``run``, which is then new or
        empty; None for a run that stays here.
      batches_used_before: Accept batches that another private run has used.  Nothing is
        proven for both runs together, and the privacy statement says so.
      checkpoint_every: Steps between checkpoints.  [default: one per minute]
    """

    settings: TrainSettings
    batches: StrPath
    held_out: pathlib.Path | None
    run: pathlib.Path
    store: str | None = None
    batches_used_before: bool = setting(False, group=PRIVACY)
    checkpoint_every: int | None = setting(None, group=OUTPUT, at_least=1)

    def __post_init__(self) -> None:
        check_batches(self.batches)
        check_local(_ONE_STORE, out=self.run)
        check_local(eval=self.held_out)
        self._check_evaluation()
        check_declared(self)

    def _check_evaluation(self) -> None:
        if self.held_out is not None:
            return
        for name, value in (
            ("metric", self.settings.metric),
            ("uncertainty", self.settings.uncertainty),
        ):
            if value is not None:
                raise InputError(
                    f"Expected --eval beside --{name} {value}, which is of held-out "
                    f"examples. Add --eval, or omit --{name}."
                )
