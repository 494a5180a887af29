"""The checkpoints of a run: what one holds is what the run has released.

    RUN/private/checkpoints/00000007.json           the seventh commit; never removed
    RUN/private/checkpoints/00000007-1f2e3d4c.npz   its arrays
    RUN/private/may_go_on                           the run may go on from there

Steps after the last checkpoint are no output.  A run that was killed goes on from it,
takes them again with new noise, and is the run that was never killed:

*Theorem.*  Let x_t = F_t(x_{t-1}, B_t, R_t) be the state after step t, with the batches
B and the noise R, and o(x) what may be published of a state.  An attempt begins at a
committed state, and either commits a later one or is lost.  H is what was published so
far, and the record of losses.  If

  (C1) the noise R of each attempt is fresh, and independent of everything else;
  (C2) a committed state is complete: an attempt reads it, its batches, R and public
       settings, and nothing else;
  (C3) given H, which attempt commits, and where, does not depend on the attempts' R;
  (C4) a committed state has at most one committed successor, and is never undone;
  (C5) everything visible is a function of H and of independent randomness;

then what is published has the law of an uninterrupted run whose commits an outsider
placed by H, and every guarantee for the release of all o(x_t) holds as it is.

*Proof*, by induction over the commits.  Given the past and the committed x_c, the paths
of the attempts from x_c are independent and of one law, that of F_{c+1}, F_{c+2}, ...
(C1, C2).  Which of them commits, and after which step, is chosen by H alone (C3), so
that the path that commits has that law, too.  One attempt extends the chain (C4).  The
rest is post-processing (C5).  Without C3 it is false: to redo a step unless an event E
happens gives the law of the step given E.

*Noise of bands* takes off a part of that of the steps before, which only the process
that drew it knows.  After a commit, this process goes on from (x_c, W), and any other
from x_c with noise that begins anew.  Given the past, all of these paths are
independent, and which of them commits is chosen by H alone, as above: what is published
has the law of a run in which an outsider says by H, after each commit, whether noise
begins anew.  `accounting.core.samplers.cyclic_poisson` proves the guarantee for that.

Who keeps the conditions:
  - C1: ``session.Session.steps`` draws a secret for each attempt; noise of bands is in
    the memory of ``noise.NoiseStream`` alone, and is never written.
  - C2: ``trainer.training_loop`` saves every variable of the step; a step with any
    other state is refused there.
  - C3: an error of a step, of the model, of a callback or of values ends the run for
    good: ``end`` removes ``may_go_on``.  Only signals, kills, lost hosts, and a lack of
    memory or disk are gone on from.
  - C4: here.  A commit is a file that is created exclusively, under the number after
    the one that the attempt began at; the attempt that finds the file there stops.
  - C5: files, callbacks and lines about a state follow its commit.

Formal guarantees:
  - ``last`` returns, bit for bit, what the last finished ``commit`` was given; a commit
    that was killed is no commit.  It never returns an older one: a last commit whose
    arrays are missing or damaged is refused.
  - Of several processes that commit after the same commit, one does.
  - A commit is on the disk before ``commit`` returns.
  - *not* covered: a folder that is copied, or restored from a backup, and finished
    twice.

The state between two steps is a function of released noisy sums.  It is nevertheless
kept in ``private``.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from accounting.core.validation import InputError, header, read_fields
from pipelines.core.batches.reader import PRIVATE_NAME
from trainer.core.run.redact_errors import InterruptedRunError

FOLDER_NAME = "checkpoints"
MAY_GO_ON_NAME = "may_go_on"

#: Bump when what a commit holds changes.
CHECKPOINT_VERSION = 1

_ENTRY = re.compile(r"\d{8}\.json")
#: The end of a remedy, where a run cannot go on.
OR_ANEW = "or begin a new run, on batches of its own, in another folder."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """The functions of a file system, here or in a store.

    Attributes:
      create: (path, contents) -> whether it wrote the file, which did not exist; on the
        disk before it returns.
      read: Returns the contents of a file.
      names: Returns the names in a folder; none if there is no folder.
      make_folder: Makes a folder, unless it exists.
      remove: Removes a file, unless it is gone.
    """

    create: Callable[[str, bytes], bool]
    read: Callable[[str], bytes]
    names: Callable[[str], set[str]]
    make_folder: Callable[[str], object]
    remove: Callable[[str], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The state of a run after a step.

    Attributes:
      step: Number of executed steps.
      arrays: Every variable that a later step or result depends on, by name.
      public: What else the run goes on with, as JSON; public.
    """

    step: int
    arrays: Mapping[str, np.ndarray]
    public: Mapping[str, Any]


class Checkpoints:
    """The chain of commits of one run.

    Args:
      run: Folder of the run, here or in a store.
      files: Functions of its file system.

    Attributes:
      number: Number of commits.
    """

    def __init__(self, run: str, files: Files) -> None:
        self._run, self._files = run, files
        self._folder = f"{run}/{PRIVATE_NAME}/{FOLDER_NAME}"
        self._token = f"{run}/{PRIVATE_NAME}/{MAY_GO_ON_NAME}"
        self._arrays_name: str | None = None
        self.number = 0

    def check_newest(self) -> None:
        """Refuses a chain that another process has extended since.

        Raises:
          InputError: another process has gone on with the run.
        """
        newest = self._newest()
        if newest is not None and newest != self.number:
            raise InputError(
                f"Expected {self._run} to be of this process alone; another one has "
                "gone on with the run. Make the model again, to go on from there."
            )

    def last(self) -> State | None:
        """Returns the last committed state, which the next commit follows; or None.

        Raises:
          InputError: the last commit is damaged.
        """
        newest = self._newest()
        if newest is None:
            return None
        entry = self._files.read(self._entry(newest))
        name = self._fields(entry)["arrays"]
        try:
            arrays = self._files.read(f"{self._folder}/{name}")
        except FileNotFoundError:
            raise self._damaged() from None
        state = self.parse(entry, arrays)
        self.number, self._arrays_name = newest, name
        self._remove_earlier()
        return state

    def _newest(self) -> int | None:
        """Returns the number of the last commit in the folder; None without one."""
        names = filter(_ENTRY.fullmatch, self._files.names(self._folder))
        return max((int(name.partition(".")[0]) for name in names), default=None)

    def _entry(self, number: int) -> str:
        return f"{self._folder}/{number:08d}.json"

    def check_may_go_on(self, state: State) -> None:
        """Refuses a run that has ended for good.

        Args:
          state: The last state of the run.

        Raises:
          InputError: the run has ended for good.
        """
        if MAY_GO_ON_NAME in self._files.names(f"{self._run}/{PRIVATE_NAME}"):
            return
        raise InputError(
            f"Expected the run in {self._run} to be one that may go on; it ended for "
            f"good at step {state.step}, by an error of its code or its values, or "
            "since callbacks saw every step: to take steps again until they suit would "
            "void its guarantee. What it released keeps it. Use it as it is, "
            f"{OR_ANEW}"
        )

    def encoded(self, state: State, name: str = "") -> tuple[bytes, bytes]:
        """Returns a state as contents of a commit and of its file of arrays.

        Args:
          state: The state.
          name: Name of the file of arrays.
        """
        arrays = _encoded(state.arrays)
        fields = {
            **header(CHECKPOINT_VERSION),
            "step": state.step,
            "arrays": name,
            "arrays_checksum": zlib.crc32(arrays),
            "public": dict(state.public),
        }
        fields["checksum"] = _checksum(fields)
        return json.dumps(fields, indent=2).encode(), arrays

    def parse(self, entry: bytes, arrays: bytes) -> State:
        """Returns the state that ``encoded`` was given, at this or another worker.

        Args:
          entry: Contents of a commit.
          arrays: Contents of its file of arrays.

        Raises:
          InputError: the commit or its arrays are damaged.
        """
        fields = self._fields(entry)
        if fields["arrays_checksum"] != zlib.crc32(arrays):
            raise self._damaged()
        with np.load(io.BytesIO(arrays), allow_pickle=False) as found:
            values = dict(found)
        return State(step=fields["step"], arrays=values, public=fields["public"])

    def _fields(self, entry: bytes) -> dict[str, Any]:
        try:
            fields: dict[str, Any] = json.loads(entry)
            is_whole = fields.pop("checksum") == _checksum(fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            is_whole = False
        if not is_whole:
            raise self._damaged()
        names = ("step", "arrays", "arrays_checksum", "public")
        return read_fields(fields, names, kind="checkpoint", version=CHECKPOINT_VERSION)

    def commit(self, state: State) -> None:
        """Makes a state the last one, for good.

        Raises:
          InterruptedRunError: another process has gone on with the run.
        """
        number, is_first = self.number + 1, False
        if number == 1:
            self._files.make_folder(self._folder)
            is_first = self._files.create(self._token, b"")
        name = f"{number:08d}-{secrets.token_hex(4)}.npz"
        entry, arrays = self.encoded(state, name)
        self._files.create(f"{self._folder}/{name}", arrays)
        path = self._entry(number)
        # A store that was asked twice, since its answer was lost, finds its own file.
        if not self._files.create(path, entry) and self._files.read(path) != entry:
            self._remove(name)
            if is_first:  # the other one may have ended for good
                self.end()
            raise InterruptedRunError(
                f"Expected {self._run} to be of this process alone; another one has "
                "gone on with the run. Wait for it, or choose another folder."
            )
        before, self._arrays_name = self._arrays_name, name
        self.number = number
        self._remove(before)

    def end(self) -> None:
        """Ends the run for good: no process goes on with it."""
        self._files.remove(self._token)

    def finish(self) -> None:
        """Removes all arrays of a complete run; no process goes on with it."""
        self.end()
        self._remove_earlier()
        self._remove(self._arrays_name)

    def _remove(self, name: str | None) -> None:
        if name is not None:
            self._files.remove(f"{self._folder}/{name}")

    def _remove_earlier(self) -> None:
        """Removes arrays of other commits, which kills have left."""
        kept = self._arrays_name
        assert kept is not None  # there is a commit
        for name in self._files.names(self._folder):
            # Not those of the next one, which another process may be committing.
            if name.endswith(".npz") and name != kept and name[:8] <= kept[:8]:
                self._remove(name)

    def _damaged(self) -> InputError:
        return InputError(
            f"Expected the last checkpoint in {self._folder} to be as it was written; "
            f"it is missing or damaged, and the run never goes back to an older one. "
            f"Restore it, {OR_ANEW}"
        )


def has_ended(run: pathlib.Path) -> bool:
    """Whether the run in a folder here has steps, and no process goes on with it.

    It is complete, or an error ended it for good.
    """
    private = run / PRIVATE_NAME
    has_commits = any((private / FOLDER_NAME).glob("*.json"))
    return has_commits and not (private / MAY_GO_ON_NAME).exists()


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields).encode())


def _encoded(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **cast(dict, arrays))
    return cast(bytes, buffer.getbuffer())  # no copy: it may be most of the memory
