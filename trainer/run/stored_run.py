"""A run whose folder is in a store: made in a folder here, and copied there.

Formal guarantees:
  - The objects of a finished run are the files of the same run here, byte for byte.
  - A run that is killed at any moment goes on from its last checkpoint in the store, on
    any machine that has the noise key, and ends with the same bytes.
  - The id of the run is in the store before the first step; what a checkpoint needs is
    there before the checkpoint, and all results before the record says "complete".
  - The noise key is not copied.
  - Of two runs that write to one folder, at most one goes on after its next checkpoint.

In a store with folders, such as Hadoop, no file is replaced in one step: a run killed
between the two begins again at step 0, with the same bytes.  Its id is never replaced.

Public: what is outside of ``private``, as in the folder here.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

from accounting.core.validation import InputError
from pipelines.batches.folder import MANIFEST_NAME, PRIVATE_NAME
from pipelines.files import storage
from pipelines.files.folders import check_folder, usable_folder
from pipelines.files.locks import LOCK_NAME
from pipelines.files.paths import is_remote, join
from trainer.core.run.checkpoints import CHECKPOINT_NAME
from trainer.core.run.run_record import MAC_NAME, RECORD_NAME, RUN_ID_NAME
from trainer.report.run_files import ITERATES_NAME
from trainer.run.preflight import check_unfinished
from trainer.settings.request import Request

#: What a run goes on from.  The rest are results, which it makes again.
_STATE = (PRIVATE_NAME, ITERATES_NAME, MANIFEST_NAME, RECORD_NAME)
_RUN_ID = f"{PRIVATE_NAME}/{RUN_ID_NAME}"
#: Sent after all others, in this order.
_LAST = (
    f"{PRIVATE_NAME}/{CHECKPOINT_NAME}",
    f"{PRIVATE_NAME}/{MAC_NAME}",
    RECORD_NAME,
)


class StoreError(InputError):
    """The store does not accept the run."""


def fetch(request: Request) -> None:
    """Copies an unfinished run from its store into its folder here.

    Raises:
      InputError: the folder in the store cannot be read, or holds something else than
        an unfinished run; the folder here is not empty; the noise key is missing.
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
        paths = [p for p in storage.walk(store, lambda _: True) if _is_kept(p)]
        if not paths:
            return
        check_unfinished(store, {path[0] for path in paths})
        _check_key(request)
        for path in paths:
            if path[0] in _STATE:
                _fetch(join(store, *path), folder.joinpath(*path))


def _is_kept(path: tuple[str, ...]) -> bool:
    """Whether a file is neither a lock nor left unfinished by a killed process."""
    return not any(name.startswith(".") for name in path) and path[-1] != LOCK_NAME


def _check_key(request: Request) -> None:
    key = request.noise_key_file
    if key is not None and not key.exists():
        raise InputError(
            f"Expected --noise-key-file {key} to exist: the run in {request.store} "
            "began with its noise key. Copy that file here, or choose another --out."
        )


def _fetch(source: str, path: pathlib.Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = storage.read_bytes(source, patient=True)
    storage.write_atomically(path, data, mode=0o600)


class StoredRun:
    """The folder of one run in a store.

    Args:
      folder: The folder here.
      store: The folder in the store; None for a run that stays here.
      resumes: Whether the folder here was fetched from the store.
    """

    def __init__(
        self, folder: pathlib.Path, store: str | None, *, resumes: bool
    ) -> None:
        self._folder = folder
        self._store = store
        # What was fetched is sent once more: some of it may be new.
        fetched = self._files() if store and resumes else ()
        self._sent: dict[str, tuple[int, ...]] = {name: () for name, _ in fetched}

    def send(self) -> None:
        """Copies the files that are new or changed since the last call; deletes others.

        Raises:
          StoreError: the store failed or refused access, or another run has the folder.
        """
        if self._store is None:
            return
        with self._plain_errors():
            found = dict(self._files())
            if self._has_id(self._store):
                self._sent[_RUN_ID] = found[_RUN_ID]
            for name in sorted(found, key=_order):
                if self._sent.get(name) != found[name]:
                    self._copy(name, self._store)
                    self._sent[name] = found[name]
            for name in self._sent.keys() - found.keys():
                storage.delete(join(self._store, name))
                del self._sent[name]

    def _has_id(self, store: str) -> bool:
        """Whether this run has the folder; a free one may still be taken."""
        try:
            found = storage.read_bytes(join(store, _RUN_ID), patient=True)
        except FileNotFoundError:
            found = b""
        ours = (self._folder / _RUN_ID).read_bytes()
        if found != ours and (found or self._sent):
            raise StoreError(
                f"Expected {store} to be of this run alone; another run has written to "
                "it since, or its files were removed. Choose another --out."
            )
        return found == ours

    def _files(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the name of each file here, and what changes with its content."""
        for path in storage.walk(self._folder, lambda _: True):
            name = "/".join(path)
            if _is_kept(path):
                found = (self._folder / name).stat()
                yield name, (found.st_ino, found.st_mtime_ns, found.st_size)

    def _copy(self, name: str, store: str) -> None:
        path = join(store, name)
        storage.make_folder(path.rpartition("/")[0])
        storage.copy_to_store(self._folder / name, path)

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
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


def _order(name: str) -> tuple[int, str]:
    """Returns a key that sorts the id of the run first, and ``_LAST`` last."""
    place = _LAST.index(name) + 1 if name in _LAST else -(name == _RUN_ID)
    return place, name
