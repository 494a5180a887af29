"""A folder that appears under its name complete, or not at all, by one process.

    OUT.unfinished/lock        locked by the process that works there
    OUT.unfinished/job.json    digest of the job, if the same command resumes it
    OUT.unfinished/failed      the job ended with an error
    OUT.unfinished/data/       becomes OUT

Formal guarantees:
  - One process at a time works for ``out``.  Of several at once one does the work, and
    each other one is refused.
  - ``out`` gets its name when all its files are on the disk, and replaces nothing.
  - A job with a record, killed at any moment, is resumed by the same command, which
    also removes what the job needed.  Another command is refused, unless the job ended
    with an error: then it gives way.
  - Without a record nothing is left after an error or a signal, and what a killed
    process left is removed by the next command.
  - Nothing else is removed: a folder OUT.unfinished of other origin is refused.
  - Only this user may enter OUT.unfinished, and ``out`` unless ``mode`` says otherwise.

Sensitive: everything in OUT.unfinished; the record is a digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError, check_local
from pipelines.core.files.locks import LOCK_NAME, in_use, locked
from pipelines.files.folders import (
    is_free,
    make_parents,
    make_private_folder,
    refuse_used,
    remove_empty,
    usable_folder,
)
from pipelines.files.stopping import on_signals
from pipelines.files.storage import flush_to_disk, write_atomically

_JOB, _FAILED, _DATA, _RESULT = "job.json", "failed", "data", "result"
#: Processes that may remove the folder between its making and its locking.
_MOST_RIVALS = 100


@dataclasses.dataclass
class Unfinished:
    """The folder of an unfinished job, locked by this process.

    Attributes:
      out: The path that the user gave.
      final: The folder that the job makes.
      work: OUT.unfinished, for whatever the job needs.
    """

    out: pathlib.Path
    final: pathlib.Path
    work: pathlib.Path
    _is_begun: bool = dataclasses.field(default=False, init=False)

    @property
    def data(self) -> pathlib.Path:
        """The folder that becomes ``out``."""
        return self.work / _DATA

    @property
    def has_record(self) -> bool:
        """Whether a job was begun here that can be resumed."""
        return (self.work / _JOB).exists()

    def begin_or_continue(
        self, job: Mapping[str, Any], depends_on: str
    ) -> dict[str, Any] | None:
        """Records a new job, or checks that it is the recorded one.

        Args:
          job: Description of the job, as JSON; its digest is recorded.
          depends_on: Parts of the description, in words for the message.

        Returns:
          None; if ``out`` is there already, the ``result`` that was given to
          ``finish``, which is to be called again.

        Raises:
          InputError: the folder is of another job, which did not end with an error.
        """
        if self._has_failed and not self._is_of(job):
            self._start_over()
        if not self.has_record:
            self.data.mkdir(0o700)
            self._write({"job": fingerprint(job)})
        if not self._is_of(job):
            self.refuse_another(depends_on)
        (self.work / _FAILED).unlink(missing_ok=True)
        self._is_begun = True
        return dict(self._read()[_RESULT]) if self.is_published else None

    def begin(self, mode: int) -> None:
        """Begins a job without a record, which cannot be resumed.

        Args:
          mode: Permissions of ``out``, before the umask.

        Raises:
          InputError: the folder is of another job, which did not end with an error.
        """
        if self._has_failed:
            self._start_over()
        if self.has_record:
            self.refuse_another("command or options")
        self.data.mkdir(mode)

    @property
    def _has_failed(self) -> bool:
        return (self.work / _FAILED).exists()

    @property
    def is_published(self) -> bool:
        """Whether ``data`` has its name, and only the clean-up is left."""
        return not self.data.exists() and _RESULT in self._read()

    def _start_over(self) -> None:
        self.give_up()
        self.clear()
        refuse_used(self.out)

    def _is_of(self, job: Mapping[str, Any]) -> bool:
        return self._read().get("job") == fingerprint(job)

    def refuse_another(self, depends_on: str) -> NoReturn:
        """Refuses to go on with another job than the recorded one, which stays.

        Args:
          depends_on: What differs, in words.

        Raises:
          InputError: always.
        """
        self._is_begun = False
        raise InputError(
            f"Expected {self.work} to be of the same job: its {depends_on} were "
            "others. Give those again to finish it, or remove what it made by "
            f"`rm -r {shlex.quote(str(self.work))}`."
        )

    def _read(self) -> dict[str, Any]:
        """Returns the record; an empty one if it is damaged or missing."""
        try:
            found = json.loads((self.work / _JOB).read_bytes())
        except (FileNotFoundError, ValueError):
            found = None
        return found if isinstance(found, dict) else {}

    def _write(self, record: Mapping[str, Any]) -> None:
        write_atomically(self.work / _JOB, json.dumps(record).encode(), mode=0o600)

    def give_up(self) -> None:
        """Forgets the job: nothing of it is left when the context ends."""
        (self.work / _JOB).unlink(missing_ok=True)

    def note_error(self) -> None:
        """Notes that the job ended with an error, so that it gives way to another."""
        if self._is_begun and self.has_record:
            (self.work / _FAILED).touch()

    def clear(self, but: tuple[str, ...] = ()) -> None:
        """Removes everything except the lock.

        Args:
          but: Names of further files that stay.
        """
        for name in sorted(set(os.listdir(self.work)) - {LOCK_NAME, *but}):
            path = self.work / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def finish(self, result: Mapping[str, Any] | None = None) -> None:
        """Gives ``data`` its name, and removes what else the job needed.

        Args:
          result: What the same command is to know if this is interrupted, as JSON.

        Raises:
          InputError: ``out`` cannot be written.
        """
        with _written(self.out):
            if not self.is_published:
                self._publish(dict(result or {}))
            self.clear(but=(_JOB,))
            # Last: while it is there, the same command removes the rest.
            self.give_up()

    def _publish(self, result: dict[str, Any]) -> None:
        for path in self.data.rglob(".*"):  # a killed process was writing it
            path.unlink()
        for path in (*self.data.rglob("*"), self.data):
            flush_to_disk(path)
        if self.has_record:
            self._write({**self._read(), _RESULT: result})
        os.rename(self.data, self.final)
        flush_to_disk(self.final.parent)


def _at(out: str | os.PathLike[str]) -> Unfinished:
    final = pathlib.Path(os.path.realpath(out))
    work = final.parent / f"{final.name}.unfinished"
    return Unfinished(pathlib.Path(out), final, work)


def is_resumable(out: str | os.PathLike[str]) -> bool:
    """Whether a job for ``out`` was begun that the same command is to finish."""
    return _at(out).has_record


def is_made(out: str | os.PathLike[str]) -> bool:
    """Whether a job made ``out``, which is not empty, and its clean-up is done."""
    return not is_free(pathlib.Path(out)) and not is_resumable(out)


@contextlib.contextmanager
def unfinished_folder(out: str | os.PathLike[str]) -> Iterator[Unfinished]:
    """Yields the locked folder in which ``out`` is made.

    It is kept if the job has a record and did not finish; otherwise it is removed.

    Args:
      out: New or empty folder, or that of a job that was killed in its clean-up.

    Raises:
      InputError: ``out`` is in use or cannot be made, or another process works for it.
    """
    check_local("--out", out)
    folder = _at(out)
    made = list[pathlib.Path]()
    with contextlib.ExitStack() as held:
        held.callback(remove_empty, made)
        _enter(folder, held, made)
        with _kept_if_recorded(folder):
            _check_begun(folder)
            yield folder


def _enter(
    folder: Unfinished, held: contextlib.ExitStack, made: list[pathlib.Path]
) -> None:
    """Makes and locks the folder of a job."""
    with usable_folder(folder.out, "--out"):
        if not folder.work.exists():
            refuse_used(folder.out)
    for _ in range(_MOST_RIVALS):
        # The process that had the folder removes it, at any moment until it is locked.
        with (
            usable_folder(folder.out, "--out"),
            contextlib.suppress(FileNotFoundError),
        ):
            make_parents(folder.final, made)
            _check_origin(folder)
            made.append(folder.work)
            make_private_folder(folder.work, remedy="Name another --out.")
            held.enter_context(locked(folder.work, folder.out))
            return
    raise in_use(folder.out)


def _check_origin(folder: Unfinished) -> None:
    """Refuses a folder that no job can have left."""
    work = folder.work
    names = set(os.listdir(work)) if work.is_dir() else {work.name}
    if os.path.lexists(work) and names and not names & {LOCK_NAME, _JOB}:
        raise InputError(
            f"Expected {work} to be what an unfinished job left; it is something else. "
            "Move it away, or name another --out."
        )


def _check_begun(folder: Unfinished) -> None:
    """Refuses an ``out`` that is in use; removes what a job without a record left."""
    if folder.is_published and not is_free(folder.final):
        return
    if not folder.data.exists():  # removed by another hand
        folder.give_up()
    if not folder.has_record:
        folder.clear()
    refuse_used(folder.out)


@contextlib.contextmanager
def _kept_if_recorded(folder: Unfinished) -> Iterator[None]:
    """Removes what a job without a record leaves."""
    try:
        yield
    except InputError:
        folder.note_error()
        raise
    finally:
        # A second signal must not interrupt this.
        with on_signals(lambda _: None), contextlib.suppress(OSError):
            if not folder.has_record:
                folder.clear()


@contextlib.contextmanager
def _written(out: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into an InputError with a remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(
            f"Expected to be able to write --out {out}: {reason}. Make room or "
            "restore access, then give the same command again."
        ) from None


@contextlib.contextmanager
def staged_folder(
    out: str | os.PathLike[str], *, mode: int = 0o700
) -> Iterator[pathlib.Path]:
    """Yields a folder that becomes ``out``; nothing is left after an error.

    Args:
      out: New or empty folder.
      mode: Permissions of the folder, before the umask.

    Raises:
      InputError: as ``unfinished_folder``, or ``out`` cannot be written.
    """
    with unfinished_folder(out) as folder, _written(folder.out):
        folder.begin(mode)
        yield folder.data
        folder.finish()
