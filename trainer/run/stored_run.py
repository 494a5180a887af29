"""A run whose folder is in a store: made in a folder here, and copied there.

Checkpoints are in the store from the start (see ``trainer.training_loop``), and public
files are copied there after each commit.  So a run that is killed at any moment goes on
from its last checkpoint in the store, on any machine.  The record says "complete" when
all results are there.  If two runs write to one folder, at most one goes on after its
next checkpoint.

Public: what is outside of ``private``, as in the folder here.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

from accounting.core.validation import InputError
from pipelines.batches.folder import MANIFEST_NAME, PRIVATE_NAME
from pipelines.core.files.locks import LOCK_NAME
from pipelines.files import storage
from pipelines.files.outputs import check_folder, usable_folder
from pipelines.files.storage import is_remote, join
from trainer.core.run.checkpoints import FOLDER_NAME, MAY_GO_ON_NAME
from trainer.core.run.redact_errors import InterruptedRunError
from trainer.core.run.run_record import RECORD_NAME, RUN_ID_NAME
from trainer.report.run_files import ITERATES_NAME
from trainer.run.preflight import check_unfinished
from trainer.settings.requests import Request

#: What a run goes on with.  The rest are results, which it makes again.
_STATE = (PRIVATE_NAME, ITERATES_NAME, MANIFEST_NAME, RECORD_NAME)
_RUN_ID = f"{PRIVATE_NAME}/{RUN_ID_NAME}"
#: What is in the store alone.
_OF_STORE = (FOLDER_NAME, MAY_GO_ON_NAME)


class StoreError(InterruptedRunError):
    """The store does not accept the run."""


def fetch(request: Request) -> None:
    """Copies an unfinished run from its store into its folder here.

    Raises:
      InputError: the folder in the store cannot be read, or holds something else than
        an unfinished run; the folder here is not empty.
    """
    store, folder = request.store, request.run
    if store is None:
        return
    check_folder(store, "--out")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(
            f"Expected run={folder} to be empty, since the run in {store} is copied "
            "to it. Choose another folder here."
        )
    with usable_folder(store, "--out"):
        try:
            paths = [p for p in storage.walk(store) if _is_kept(p)]
        except FileNotFoundError:  # in a store with folders, a new one
            return
        if not paths:
            return
        check_unfinished(store, {path.split("/")[0] for path in paths})
        for path in paths:
            if path.split("/")[0] in _STATE:
                _fetch(join(store, path), folder / path)


def _is_kept(path: str) -> bool:
    """Whether a file is copied: no lock, no checkpoint, not left unfinished."""
    parts = path.split("/")
    hidden = any(name.startswith(".") for name in parts)
    return not (hidden or parts[-1] == LOCK_NAME or set(parts[1:2]) & {*_OF_STORE})


def _fetch(source: str, path: pathlib.Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = storage.read_bytes(source)
    storage.write_atomically(path, data, mode=0o600)


class StoredRun:
    """The folder of one run in a store.

    Args:
      folder: The folder here.
      store: The folder in the store; None for a run that stays here.
    """

    def __init__(self, folder: pathlib.Path, store: str | None) -> None:
        self._folder = folder
        self._store = store
        self._sent: dict[str, tuple[int, ...]] = {}

    def send(self, *, complete: bool) -> None:
        """Copies the files that are new or changed since the last call.

        Args:
          complete: Whether the run is; then its record is copied last, else first.

        Raises:
          StoreError: the store failed or refused access.
        """
        if self._store is None:
            return
        with self.plain_errors():
            found = dict(self._files())
            for name in sorted(
                found, key=lambda name: ((name == RECORD_NAME) is complete, name)
            ):
                if self._sent.get(name) != found[name]:
                    self._copy(name, self._store)
                    self._sent[name] = found[name]

    def take(self) -> None:
        """Takes a free folder in the store; refuses that of another run.

        Raises:
          StoreError: another run has the folder, or the store failed.
        """
        if self._store is None:
            return
        place, ours = join(self._store, _RUN_ID), (self._folder / _RUN_ID).read_bytes()
        with self.plain_errors():
            storage.make_folder(place.rpartition("/")[0])
            storage.create(place, ours, mode=0o600)
            if storage.read_bytes(place) != ours:
                raise StoreError(
                    f"Expected {self._store} to be of this run alone; another run has "
                    "written to it. Choose another --out."
                )

    def _files(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the name of each file here, and what changes with its content."""
        for name in storage.walk(self._folder):
            if _is_kept(name) and name != _RUN_ID:  # ``take`` wrote it, for good
                found = (self._folder / name).stat()
                yield name, (found.st_ino, found.st_mtime_ns, found.st_size)

    def _copy(self, name: str, store: str) -> None:
        path = join(store, name)
        storage.make_folder(path.rpartition("/")[0])
        storage.copy_to_store(self._folder / name, path)

    @contextlib.contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Says of errors of the store what the user can do."""
        try:
            yield
        except OSError as error:
            if not is_remote(str(error.filename)):
                raise
            raise StoreError(
                f"Expected to write {error.filename}: {error.strerror}. Restore access "
                "to it, and give the same command again: the run goes on from its last "
                "checkpoint in the store."
            ) from None
