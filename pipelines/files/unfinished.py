"""A staged folder whose job is resumed: see ``staged_folder``.

    OUT.unfinished/job.json    digest of the job
    OUT.unfinished/failed      the job ended with an error

Formal guarantees, beside those of ``staged_folder``:
  - A job with a record, killed at any moment, is resumed by the same command, which
    also removes what the job needed.  Another command that resumes its job is refused,
    unless the job ended with an error: then it gives way.

Sensitive: everything in OUT.unfinished; the record is a digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError
from pipelines.files.folders import is_free, refuse_used
from pipelines.files.staged_folder import (
    DATA_NAME,
    clear,
    publish,
    staged_folder,  # noqa: F401, until its users name its own module
    work_folder,
    work_path,
    writable,
)
from pipelines.files.stopping import on_signals
from pipelines.files.storage import write_atomically

_JOB, _FAILED, _RESULT = "job.json", "failed", "result"


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
        return self.work / DATA_NAME

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

    @property
    def _has_failed(self) -> bool:
        return (self.work / _FAILED).exists()

    @property
    def is_published(self) -> bool:
        """Whether ``data`` has its name, and only the clean-up is left."""
        return not self.data.exists() and _RESULT in self._read()

    def _start_over(self) -> None:
        self.give_up()
        clear(self.work)
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

    def finish(self, result: Mapping[str, Any] | None = None) -> None:
        """Gives ``data`` its name, and removes what else the job needed.

        Args:
          result: What the same command is to know if this is interrupted, as JSON.

        Raises:
          InputError: ``out`` cannot be written.
        """
        with writable(self.out):
            if not self.is_published:
                self._write({**self._read(), _RESULT: dict(result or {})})
                publish(self.work)
            clear(self.work, but=(_JOB,))
            # Last: while it is there, the same command removes the rest.
            self.give_up()


def _at(out: str | os.PathLike[str]) -> Unfinished:
    final = pathlib.Path(os.path.realpath(out))
    return Unfinished(pathlib.Path(out), final, work_path(out))


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
    folder = _at(out)
    with work_folder(out), _kept_if_recorded(folder):
        _check_begun(folder)
        yield folder


def _check_begun(folder: Unfinished) -> None:
    """Refuses an ``out`` that is in use; removes what a job without a record left."""
    if folder.is_published and not is_free(folder.final):
        return
    if not folder.data.exists():  # removed by another hand
        folder.give_up()
    if not folder.has_record:
        clear(folder.work)
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
                clear(folder.work)
