"""What ``dpsgd fit`` released of a table, noted beside it.

    FOLDER/_released.json   in the folder of the table: its fits, with what they spent
    OUT/fit.id              which of them is the fit in OUT

Formal guarantees:
  - a fit is noted before its first noise is drawn, and once, also if it is killed and
    goes on.
  - another fit of a table with a source file in common is refused, unless its user
    accepts the epsilon of all together; of two of the same files that begin at once,
    one is refused.  Notes are looked for beside each file, and in all folders above; of
    a link, beside the file that it leads to.
  - so is one whose table has a budget beside it, or in the current folder.
  - that epsilon is a sum, as is delta: an upper bound whatever is chosen from earlier
    results (Rogers et al. 2016, arXiv:1605.08294), for one privacy unit.
  - after a fit no budget is made beside the note, or in the current folder.
  - *not* covered: a note that was deleted, edited or rolled back; a table that was
    copied, moved without its note, packed or edited; a folder in which nothing can be
    written, as is said then; a stage whose result was removed from OUT and made again;
    budgets elsewhere, and all that is neither a budget nor `dpsgd fit`.

Public: what fits spent, and their folders.  Sensitive: the file, as the digests of
`source_table` are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from accounting.core import deltas
from accounting.core.intervals import upper_text
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    NAMES,
    REPLACE_SPECIAL,
)
from accounting.core.validation import InputError
from accounting.core.versioned_json import header, read_fields
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.locks import locked_beside
from pipelines.files.storage import write_atomically
from pipelines.inputs.source_table import SourceTable

if TYPE_CHECKING:  # imports the accountant
    from trainer.run.reservation import Budget

NAME, ID_NAME = "_released.json", "fit.id"
ROW, USER = "row", "user"
_HEADER: Any = {"format_name": "dpsgd-released", "version": 1}
#: More than the rounding error of a sum of epsilons.
_ROUNDING = 1 + 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """What one fit, or everything in a budget, released or may release.

    Attributes:
      id: Random name of the fit; empty before it is noted.
      folder: Its folder, as it was named; of a budget the name of its file.
      sources: Digests of the files of its table.
      unit: ``ROW`` or ``USER``.
      epsilon: Of all that it releases.
      delta: Of all that it releases.
      uncovered: What no epsilon covers, in words.
    """

    id: str = ""
    folder: str
    sources: tuple[str, ...]
    unit: str
    epsilon: float
    delta: float
    uncovered: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table, as its note knows it.

    Attributes:
      folder: Folder of its files.
      sources: Their digests.
      folders: Folders of its files, where each may have been fitted alone.
    """

    folder: pathlib.Path
    sources: tuple[str, ...]
    folders: tuple[pathlib.Path, ...] = ()

    @classmethod
    def of(cls, pattern: str) -> Table:
        """Returns the table in files, of which samples alone are read.

        Args:
          pattern: A file, a folder or a glob.

        Raises:
          InputError: as `raw_files.list_files`.
        """
        from pipelines.inputs.source_table import source_digests  # after --help
        from pipelines.tables.raw_files import list_files

        # Where a link leads to: what was released is noted there.
        paths = [os.path.realpath(f.path) for f in list_files(pattern, partitions=True)]
        folders = sorted({os.path.dirname(path) for path in paths})
        return cls(
            folder=pathlib.Path(os.path.commonpath(folders)),
            sources=tuple(source_digests(paths)),
            folders=tuple(map(pathlib.Path, folders)),
        )

    @classmethod
    def of_fit(cls, folder: pathlib.Path, out: pathlib.Path) -> Table:
        """Returns the table of a fit.

        Args:
          folder: Folder of the table.
          out: Folder of the fit.

        Raises:
          InputError: no note in the folder of the table names the fit.
        """
        noted = _noted(folder / NAME)
        found = [each.sources for each in noted if each.id == _id_of(out)]
        if not found:
            raise InputError(
                f"Expected {folder / NAME} to name the fit in {out}. Give the folder "
                "of its table."
            )
        return cls(folder=folder, sources=found[0], folders=(folder,))

    @property
    def note(self) -> pathlib.Path:
        """The file that says what was released."""
        return self.folder / NAME

    def fits(self) -> list[Fit]:
        """Returns the fits of this table, or of one with a file in common, in order.

        Raises:
          InputError: the note cannot be read.
        """
        above = (p for each in self.folders for p in (each, *each.parents))
        notes = dict.fromkeys((self.folder, *above))
        found = (each for place in notes for each in _noted(place / NAME))
        of_table = {e.id: e for e in found if set(e.sources) & set(self.sources)}
        return [*of_table.values()]

    def releases(self) -> list[Fit]:
        """Returns the budgets and the fits of this table that are known.

        Raises:
          InputError: as `fits`.
        """
        from trainer.run import budget  # after --help: the accountant

        tables = [SourceTable(sources=self.sources)]
        places = dict.fromkeys((self.folder, *self.folders))
        near = dict.fromkeys(p for each in places for p in budget.near(each, tables))
        budgets = [
            Fit(
                folder=path.name,
                sources=found.table.sources,
                unit=_unit_of(found),
                epsilon=found.epsilon,
                delta=found.delta,
                uncovered=found.uncovered,
            )
            for path in near
            for found in [budget.read(path)]
        ]
        return [*budgets, *self.fits()]

    def add(self, out: pathlib.Path, fit: Fit, accepted: float | None) -> bool:
        """Notes a fit before its first noise is drawn; a noted one stays as it is.

        Args:
          out: Folder of the fit.
          fit: What it may release.
          accepted: Epsilon of all fits together that the user accepts.

        Returns:
          Whether it could be noted.

        Raises:
          InputError: as `check_added`.
        """
        try:
            with alone(self.folder):
                # Also those of other notes: a page reads this one alone.
                noted = {e.id: e for e in (*_noted(self.note), *self.fits())}
                name = _id_of(out) or secrets.token_hex(16)
                if name not in noted:
                    check_added(self.releases(), fit, accepted)
                    write_atomically(out / ID_NAME, name.encode())
                    noted[name] = dataclasses.replace(fit, id=name)
                    fields = [dataclasses.asdict(each) for each in noted.values()]
                    data = pretty_json({**header(**_HEADER), "fits": fields})
                    write_atomically(self.note, data, mode=0o600)
        except OSError:
            if not self.is_noted(out):
                check_added(self.releases(), fit, accepted)
            return False
        return True

    def is_noted(self, out: pathlib.Path) -> bool:
        """Whether the fit in a folder is among those of the table."""
        return _id_of(out) in {each.id for each in self.fits()}


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
    """Locks the notes of a folder and of the current one, where budgets may be, too.

    Args:
      folder: Folder in which a fit is noted, or a budget made.

    Raises:
      InputError, OSError: as `locked_beside` of the first; where nobody can write the
        second, nobody makes a budget.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_beside(folder / NAME))
        if pathlib.Path().resolve() != folder.resolve():
            with contextlib.suppress(OSError):
                stack.enter_context(locked_beside(NAME))
        yield


def _noted(note: pathlib.Path) -> list[Fit]:
    """Returns all fits in a note; none if there is no such file."""
    if not note.exists():
        return []
    remedy = "Restore the file, or ask its owner what was released of the table."
    kind = f"note in {note}"
    found = read_fields(read_json(note), ["fits"], kind=kind, remedy=remedy, **_HEADER)
    try:
        return [Fit(**_with_tuples(each)) for each in found["fits"]]
    except (TypeError, AttributeError):
        raise InputError(
            f"Expected {note} to say what was released. {remedy}"
        ) from None


def _unit_of(found: Budget) -> str:
    """Returns the privacy unit of a budget; fits of users are under add-or-remove."""
    if not found.unit:
        return ROW
    relation = found.unit.get("neighboring_relation", REPLACE_SPECIAL)
    return USER if relation == ADD_OR_REMOVE_ONE else f"{USER} under {NAMES[relation]}"


def check_no_fit(folder: pathlib.Path, sources: Sequence[str]) -> None:
    """Refuses a budget of a table that was fitted.

    Args:
      folder: Where the budget will be.
      sources: Digests of the files of the table.

    Raises:
      InputError: it was.
    """
    from trainer.run.budget import places  # after --help: the accountant

    tables = [Table(folder=f, sources=tuple(sources)) for f in places(folder)]
    if found := [each for table in tables for each in table.fits()]:
        epsilon = upper_text(sum(each.epsilon for each in found))
        raise InputError(
            f"Expected no fit of the table before its budget; {found[0].folder} is "
            f"one, and fits spent epsilon {epsilon}. What is released after results "
            "were seen is not composed with them, but adds. Use `dpsgd fit "
            "--accept-epsilon`, which states the sum."
        )


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}


def _id_of(out: pathlib.Path) -> str:
    path = out / ID_NAME
    return path.read_text(encoding="utf-8") if path.exists() else ""


def check_added(
    earlier: Sequence[Fit], fit: Fit, accepted: float | None = None
) -> None:
    """Refuses a fit after other releases, unless the epsilon of all is accepted.

    Args:
      earlier: Fits and budgets of its table.
      fit: The new one.
      accepted: Epsilon of all together that the user accepts.

    Raises:
      InputError: it is not accepted, or no sum is proven.
    """
    if not earlier:
        return
    found = ", ".join(
        f"{each.folder} with epsilon {upper_text(each.epsilon)}" for each in earlier
    )
    total = sum(each.epsilon for each in (*earlier, fit))
    if {each.unit for each in earlier} != {fit.unit}:
        raise InputError(
            "Expected one privacy unit of all that is released of a table; that of "
            f"this fit is a {fit.unit}, but not that of {found}, and no epsilon of "
            "both is proven. Give --user to both, or to neither."
        )
    of_each = [each.delta for each in (*earlier, fit)]
    if max(of_each) < deltas.LARGEST_DELTA <= sum(of_each):
        raise InputError(
            f"Expected deltas that add up to less than {deltas.LARGEST_DELTA}; with "
            f"{found} they are {sum(of_each):.3g}. Give a smaller --delta."
        )
    if accepted is None or total > accepted * _ROUNDING:
        raise InputError(
            f"Expected nothing released of this table; there is {found}. With epsilon "
            f"{upper_text(fit.epsilon)} it is {upper_text(total)} for its rows, since "
            "each later one adds, as its delta does. To accept that, add "
            f"--accept-epsilon {upper_text(total)}; to go on with an earlier fit, give "
            "its --out."
        )


def together(fits: Sequence[Fit]) -> dict[str, Any]:
    """Returns the sum of several releases of one table, with its claim in words.

    Args:
      fits: Fits and budgets of one table and one unit.
    """
    epsilon, delta = (sum(getattr(e, n) for e in fits) for n in ("epsilon", "delta"))
    names = ", ".join(each.folder for each in fits)
    open_ones = [f"{w} of {e.folder}" for e in fits for w in e.uncovered]
    but = ""
    if open_ones:
        but = f", but for {', '.join(open_ones)}, which no epsilon covers"
    claim = (
        f"All that is known to be released of this table ({names}) is together "
        f"({upper_text(epsilon)}, {delta!r})-differentially private for one "
        f"{fits[0].unit}{but}, whatever was chosen from earlier ones."
    )
    folders = [each.folder for each in fits]
    return {"claim": claim, "epsilon": epsilon, "delta": delta, "fits": folders}
