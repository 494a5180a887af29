"""The file of a budget: read, made once, and changed by one process at a time.

    FILE         table, plan, noise and epsilon of the runs, and what was charged
    FILE.lock    there while a process changes it

FILE names the table by digests of the files that it was read from, against which
guesses of rows could be checked: its owner alone may read it.

Formal guarantees:
  - those of `reservation`.
  - a run is charged before its first noise is drawn, and once, also if it is killed and
    resumed; so is a search.  Metrics and statistics are charged before they are on
    disk.
  - of two processes, one gets the last place, and no change is lost: of two at once,
    one is refused, also if one of them gives a link to the file.
  - a run that was charged goes on only with the file that says so, and one that began
    without a budget has no place in it: files that were rolled back, or copied before,
    are noticed where a run goes on, or a search after its first run.
  - a second budget in one folder, for a table with a source file in common, is refused,
    and one beside the note of a fit; of two that are made at once, one is refused.
  - what no epsilon covers is said from then on, for good, also in a closed budget.
  - *not* covered: runs and everything else that was not given this file.  Budgets in
    two folders do not know each other.

Sensitive: the file.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from accounting.core.validation import InputError
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.locks import locked_beside
from pipelines.files.storage import write_atomically
from pipelines.inputs.source_table import SourceTable
from trainer.run import released
from trainer.run.reservation import HEADER, Budget

#: Larger files are no budgets.
_MOST_BYTES = 1 << 24


def read(path: pathlib.Path) -> Budget:
    """Returns the budget in a file.

    Raises:
      InputError: no such file, or no budget.
    """
    if not path.is_file():
        raise InputError(
            f"Expected budget={path} to be a file. `dpsgd budget --help` shows how to "
            "make one."
        )
    return Budget.from_json(read_json(path))


def read_instead_of(
    path: pathlib.Path, epsilon: float | None, delta: float | None
) -> Budget:
    """Returns the budget in a file, which decides epsilon and delta of a release.

    Args:
      path: File of the budget.
      epsilon: Value of --epsilon; refused if given.
      delta: Value of --delta; refused if given.

    Raises:
      InputError: as `read`, or one is given.
    """
    for flag, value in (("--epsilon", epsilon), ("--delta", delta)):
        if value is not None:
            raise InputError(
                f"Expected no {flag} beside --budget, which decides it. Omit {flag}."
            )
    return read(path)


def create(path: pathlib.Path, budget: Budget) -> None:
    """Writes a new budget.

    Args:
      path: New file.
      budget: The budget.

    Raises:
      InputError: the file exists, or the folder has a budget for the same table, or the
        note of a fit of it.
    """
    path = path.resolve()  # as in `_replace`
    # One lock for all budgets of a folder, and for its note: two are made at once.
    with _alone(path, released.alone(path.parent)):
        released.check_no_fit(path.parent, budget.table.sources)
        if path.exists():
            raise InputError(
                f"Expected budget={path} not to exist: a budget is never replaced. "
                "Choose another name."
            )
        if others := of_tables(path.parent, [budget.table]):
            raise InputError(
                f"Expected no other budget for this table beside {path}; {others[0]} "
                "is one, and both would add. Give --budget of it, or reserve more runs "
                "before the first one."
            )
        _write(path, budget)


def of_tables(
    folder: pathlib.Path, tables: Sequence[SourceTable]
) -> list[pathlib.Path]:
    """Returns the budgets for tables, or for ones with a file in common.

    Args:
      folder: Folder that is searched, without those in it.
      tables: Tables, each of which may be that of a budget.
    """
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if _is_of_tables(path, tables)]


def places(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns where budgets and notes are looked for: here, and in a folder."""
    here = pathlib.Path()
    return [here] if folder.resolve() == here.resolve() else [here, folder]


def near(folder: pathlib.Path, tables: Sequence[SourceTable]) -> list[pathlib.Path]:
    """Returns the budgets of tables in the current folder, and in another one.

    Args:
      folder: As of `places`.
      tables: As of `of_tables`.
    """
    return [path for place in places(folder) for path in of_tables(place, tables)]


def _is_of_tables(path: pathlib.Path, tables: Sequence[SourceTable]) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return False
        with path.open("rb") as file:
            data = file.read(1)
            data += file.read() if data == b"{" else b""  # tables may be beside it
        fields = json.loads(data)
        if fields["format"] != HEADER["format_name"]:
            return False
        sources = fields["table"]["sources"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return any(not table.is_apart(sources) for table in tables)


def charge(
    path: pathlib.Path,
    *,
    run_id: str,
    batches_id: str,
    folder: pathlib.Path,
    begins: bool,
    uncovered: Sequence[str] = (),
    key: str = "",
) -> None:
    """Gives a run its place in the budget, before its first noise is drawn.

    Args:
      path: File of the budget.
      run_id: Random id of the run.  Sensitive.
      batches_id: ``Manifest.batches_id`` of its batches.
      folder: Folder of the run.
      begins: Whether the run has not executed a step.
      uncovered: What no epsilon covers of it, in words.
      key: ``key_name`` of its batches.

    Raises:
      InputError: as `Budget.charged`, or a run that goes on and was never charged.
    """

    def change(before: Budget) -> Budget:
        found = before.charged(run_id, batches_id, str(folder), uncovered, key=key)
        if not begins and found.charges != before.charges:
            raise _rolled_back(path, folder)
        return found

    _replace(path, change)


def charge_search(
    path: pathlib.Path,
    *,
    search_id: str,
    part: str,
    folder: pathlib.Path,
    begins: bool,
    uncovered: Sequence[str] = (),
) -> None:
    """Gives a search the place of all runs, before its first noise is drawn.

    Args:
      path: File of the budget.
      search_id: Random id of the search.  Sensitive.
      part: Part of the table by which its runs are scored.
      folder: Folder of the search.
      begins: Whether none of its runs was scored.
      uncovered: What no epsilon covers of it, in words.

    Raises:
      InputError: as `Budget.searched`, or a search that goes on and was never charged.
    """

    def change(before: Budget) -> Budget:
        found = before.searched(search_id, part, str(folder))
        if not begins and found != before:
            raise _rolled_back(path, folder)
        return found.marked(uncovered)

    _replace(path, change)


def mark(path: pathlib.Path, tables: Sequence[SourceTable], what: str) -> None:
    """Says for good that no epsilon covers something, before it reads the table.

    Args:
      path: File of the budget, which may be closed.
      tables: Tables that are read.
      what: What no epsilon covers, in words.

    Raises:
      InputError: none of them is the budget's.
    """

    def change(before: Budget) -> Budget:
        if all(before.table.is_apart(table.sources) for table in tables):
            raise InputError(
                f"Expected rows of the table of {path}; these were read from other "
                "files. Omit --budget, or give that of their table."
            )
        return before.marked([what])

    _replace(path, change)


def charge_winner(
    path: pathlib.Path, *, run_id: str, batches_id: str, folder: pathlib.Path
) -> None:
    """Names the best run of the search, which may be evaluated once.

    Args:
      path: File of the budget.
      run_id: Random id of the run.  Sensitive.
      batches_id: ``Manifest.batches_id`` of its batches.
      folder: Folder of the run.
    """
    _replace(path, lambda found: found.with_winner(run_id, batches_id, str(folder)))


def _rolled_back(path: pathlib.Path, folder: pathlib.Path) -> InputError:
    return InputError(
        f"Expected {folder} to be charged in {path} before it began; it is not: it "
        "began without --budget, or the file was rolled back. Restore the file, or "
        "omit --budget."
    )


def charge_evaluation(path: pathlib.Path, *, run_id: str, part: str) -> None:
    """Marks the metrics of a run as released, before anybody sees them.

    Args:
      path: File of the budget.
      run_id: Random id of the run.  Sensitive.
      part: Part of the table that they are of.

    Raises:
      InputError: as `Budget.evaluated`.
    """
    _replace(path, lambda found: found.evaluated(run_id, part))


def charge_statistics(path: pathlib.Path, *, part: str, file: str) -> None:
    """Marks statistics of a part as released, before anybody sees them.

    Args:
      path: File of the budget.
      part: Part of the table.
      file: Where they will be.

    Raises:
      InputError: as `Budget.with_statistics`.
    """
    _replace(path, lambda found: found.with_statistics(part, file))


def close(path: pathlib.Path) -> Budget:
    """Leaves no place for anything more, and returns the closed budget.

    Args:
      path: File of the budget.

    Raises:
      InputError: as `Budget.closed`.
    """
    return _replace(path, Budget.closed)


def _replace(path: pathlib.Path, change: Callable[[Budget], Budget]) -> Budget:
    """Replaces a budget by what ``change`` makes of it, while no other process does."""
    path = path.resolve()  # a link stays one: its place would have a budget of its own
    with _alone(path, locked_beside(path)):
        before = read(path)
        after = change(before)
        if after != before:
            _write(path, after)
    return after


def _write(path: pathlib.Path, budget: Budget) -> None:
    write_atomically(path, pretty_json(budget.to_json()), mode=0o600)


@contextlib.contextmanager
def _alone(path: pathlib.Path, lock: AbstractContextManager[None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except OSError as error:
            raise InputError(
                f"Expected budget={path} to be in a folder that can be written: "
                f"{error.strerror}. Choose another one."
            ) from None
        yield
