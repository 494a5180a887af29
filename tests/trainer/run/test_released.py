"""A note beside a table: what its fits spent, and what another one adds."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE, REPLACE_SPECIAL
from accounting.core.validation import InputError
from pipelines.inputs.source_table import SourceTable
from tests.at_once import at_once
from trainer.html_report import attachments
from trainer.run import budget, released
from trainer.run.released import Fit, Table
from trainer.run.reservation import Budget


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "data").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / "data" / name).write_text(f"age,bought\n{ord(name[0])},1\n")
    return tmp_path


def make(folder: pathlib.Path, name: str) -> pathlib.Path:
    out = folder / name
    out.mkdir(exist_ok=True)
    return out


def fit_of(table: Table, out: pathlib.Path, epsilon: float = 3.0) -> Fit:
    return Fit(
        folder=out.name, sources=table.sources, unit="row", epsilon=epsilon, delta=1e-6
    )


def test_a_fit_is_noted_once_also_if_it_goes_on(folder: pathlib.Path) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    assert not table.is_noted(out)
    for _ in range(2):
        assert table.add(out, fit_of(table, out), accepted=None)
        assert table.is_noted(out)
        assert [each.folder for each in table.fits()] == ["out"]
    assert table.note.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in table.folder.iterdir()) == [
        "_released.json", "a.csv", "b.csv",
    ]  # fmt: skip


def test_a_second_fit_is_refused_or_its_epsilon_of_all_accepted(
    folder: pathlib.Path,
) -> None:
    """Also if the first folder is gone, and made again under its name."""
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    table.add(out, fit_of(table, out), accepted=None)
    (out / released.ID_NAME).unlink()
    for accepted in (None, 4.999, 3.0):
        with pytest.raises(
            InputError, match=r"it is 5\.0000 .*--accept-epsilon 5\.0000;"
        ):
            table.add(out, fit_of(table, out, 2.0), accepted)
    assert table.add(out, fit_of(table, out, 2.0), accepted=5.0)
    found = released.together(table.fits())
    assert (found["epsilon"], found["delta"]) == (5.0, 2e-6)
    assert (
        "together (5.0000, 2e-06)-differentially private for one row"
        in (found["claim"])
    )
    assert table.add(out, fit_of(table, out, 2.0), accepted=None)  # it goes on
    assert len(table.fits()) == 2


def test_one_file_in_common_is_the_same_table_and_another_file_is_not(
    folder: pathlib.Path,
) -> None:
    first, other, both = (
        Table.of(str(folder / "data" / name)) for name in ("a.csv", "b.csv", "*.csv")
    )
    out = make(folder, "out")
    first.add(out, fit_of(first, out), accepted=None)
    copy = folder / "data/renamed.csv"
    copy.write_bytes((folder / "data/a.csv").read_bytes())
    assert Table.of(str(copy)).fits() == first.fits() == both.fits() != []
    assert other.fits() == []
    second = make(folder, "second")
    assert other.add(second, fit_of(other, second), accepted=None)
    assert len(both.fits()) == 2


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("data/a.csv", "*/a.csv"),
        ("*/a.csv", "data/a.csv"),
        ("data/*/a.csv", "*/deep/a.csv"),
    ],
)
def test_a_fit_of_a_part_or_of_more_folders_is_known(
    folder: pathlib.Path, first: str, then: str
) -> None:
    """Seen to fail: the note of a file was looked for in one folder alone."""
    for place in ("data/deep", "more/deep", "more"):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "a.csv").write_text(f"age,bought\n7,{len(place)}\n")
    table, again = Table.of(str(folder / first)), Table.of(str(folder / then))
    out, second = make(folder, "out"), make(folder, "second")
    table.add(out, fit_of(table, out), accepted=None)
    assert table.note != again.note
    with pytest.raises(InputError, match=r"there is out with epsilon 3\.0000"):
        again.add(second, fit_of(again, second), accepted=None)
    again.add(second, fit_of(again, second), accepted=6)
    of_page = Table.of_fit(again.folder, second)
    assert [e.folder for e in of_page.fits()] == ["out", "second"]
    if again.folder in table.folder.parents:  # which a page of the first reads, too
        assert len(Table.of_fit(table.folder, out).fits()) == 2


def test_a_link_to_a_table_is_that_table(folder: pathlib.Path) -> None:
    for place, to in (("file", "a.csv"), ("folder", "")):
        (folder / "links").mkdir(exist_ok=True)
        (folder / "links" / place).symlink_to(folder / "data" / to)
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    table.add(out, fit_of(table, out), accepted=None)
    for name in ("links/file", "links/folder/a.csv"):
        assert Table.of(str(folder / name)).fits() == table.fits() != []


def test_deltas_do_not_add_up_to_a_large_one(folder: pathlib.Path) -> None:
    table = Table.of(str(folder / "data/a.csv"))
    for name, delta, accepted in (("a", 0.004, None), ("b", 0.0055, 6.0)):
        fit = dataclasses.replace(fit_of(table, make(folder, name)), delta=delta)
        table.add(folder / name, fit, accepted)
    third = dataclasses.replace(fit, delta=0.001)
    with pytest.raises(InputError, match=r"less than 0\.01; .* they are 0\.0105"):
        table.add(make(folder, "c"), third, accepted=9.0)


def test_of_two_that_begin_at_once_one_is_refused(folder: pathlib.Path) -> None:
    table = Table.of(str(folder / "data/a.csv"))
    outs = [make(folder, f"out-{place}") for place in range(4)]
    acts = (
        functools.partial(table.add, out, fit_of(table, out), accepted=None)
        for out in outs
    )
    assert at_once(*acts).count(False) == 3
    assert len(table.fits()) == 1


@pytest.fixture
def reserve(small_batches: Any) -> Callable[..., Budget]:
    """``reserve(table)``: a budget of epsilon 2 for it."""

    def make(table: Table) -> Budget:
        of_table = SourceTable(sources=table.sources, division="3" * 32, part="train")
        given = {"num_runs": 1, "epsilon": 2.0, "delta": 1e-4}
        return Budget.reserve(small_batches.manifest, of_table, **given)

    return make


@pytest.mark.parametrize("is_here", [True, False])
def test_a_fit_after_a_budget_adds_to_it(
    folder: pathlib.Path,
    reserve: Callable[..., Budget],
    monkeypatch: pytest.MonkeyPatch,
    is_here: bool,
) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    other = Table.of(str(folder / "data/b.csv"))
    place = table.folder
    if is_here:
        place = make(folder, "here")
        monkeypatch.chdir(place)
    found = reserve(table).marked(["what was seen"])
    budget.create(place / "table.budget", found)
    with pytest.raises(
        InputError, match=r"table\.budget with epsilon 2\.0000\. .* it is 5\.0000"
    ):
        table.add(out, fit_of(table, out), accepted=None)
    assert table.fits() == []
    assert table.add(out, fit_of(table, out), accepted=5.0)
    of_all = released.together(table.releases())
    assert (of_all["epsilon"], of_all["delta"]) == (5.0, 1e-4 + 1e-6)
    assert of_all["fits"] == ["table.budget", "out"]
    assert "but for what was seen of table.budget, which no" in of_all["claim"]
    assert other.releases() == []
    assert Table.of_fit(table.folder, out).releases() == table.releases()
    (make(folder, "more") / "a.csv").write_text("age,bought\n8,1\n")
    of_more = Table.of(str(folder / "*" / "a.csv"))
    assert of_more.folder == folder
    assert set(of_more.sources) > set(table.sources)
    assert of_more.releases() == table.releases()


@pytest.mark.parametrize(
    ("unit", "relation", "adds"),
    [
        ("row", ADD_OR_REMOVE_ONE, False),
        ("user", REPLACE_SPECIAL, False),
        ("user", ADD_OR_REMOVE_ONE, True),
    ],
)
def test_a_budget_of_users_adds_to_fits_of_users_under_the_same_relation(
    folder: pathlib.Path,
    reserve: Callable[..., Budget],
    unit: str,
    relation: str,
    adds: bool,
) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    of_users = {"max_examples_per_user": 2, "neighboring_relation": relation}
    users = dataclasses.replace(reserve(table), unit=of_users, noise_multiplier=50.0)
    budget.create(table.folder / "table.budget", users)
    fit = dataclasses.replace(fit_of(table, out), unit=unit)
    if adds:
        assert table.add(out, fit, accepted=100.0)
        return
    with pytest.raises(InputError, match="one privacy unit"):
        table.add(out, fit, accepted=100.0)


def test_after_a_fit_no_budget_is_made(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    released.check_no_fit(table.folder, table.sources)
    table.add(out, fit_of(table, out), accepted=None)
    for place in (table.folder, folder):
        with pytest.raises(InputError, match=r"out is one, and fits spent epsilon 3\."):
            released.check_no_fit(place, table.sources)
        monkeypatch.chdir(table.folder)
    released.check_no_fit(table.folder, Table.of(str(folder / "data/b.csv")).sources)


@pytest.mark.parametrize(
    ("place", "here"), [("data", ""), ("here", "here"), ("place", "data")]
)
def test_of_budgets_and_fits_that_begin_at_once_one_is_refused(
    place: str,
    here: str,
    folder: pathlib.Path,
    reserve: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen: two budgets of one table, in files of other names, and a fit beside one."""
    table = Table.of(str(folder / "data/a.csv"))
    monkeypatch.chdir(make(folder, here))
    paths = [make(folder, place) / name for name in ("first", "second")]
    out, write = make(folder, "out"), budget._write

    def meanwhile(path: pathlib.Path, found: Budget) -> None:
        acts = (
            functools.partial(budget.create, paths[1], found),
            functools.partial(table.add, out, fit_of(table, out), accepted=9.0),
        )
        assert [at_once(act) for act in acts] == [[False], [False]]
        write(path, found)

    monkeypatch.setattr(budget, "_write", meanwhile)
    budget.create(paths[0], reserve(table))
    assert [paths[0].exists(), paths[1].exists(), table.fits()] == [True, False, []]


def test_the_table_of_a_fit_is_found_by_its_note_alone(folder: pathlib.Path) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    with pytest.raises(InputError, match="to name the fit in"):
        Table.of_fit(table.folder, out)
    table.add(out, fit_of(table, out), accepted=None)
    assert Table.of_fit(table.folder, out).sources == table.sources
    with pytest.raises(InputError, match="to name the fit in"):
        Table.of_fit(table.folder, make(folder, "other"))


def test_a_page_finds_the_fit_of_a_run_and_of_a_search(folder: pathlib.Path) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    table.add(out, fit_of(table, out), accepted=None)
    assert attachments.read_fits(table.folder, out / "run") is None  # alone
    other = make(folder, "other")
    table.add(other, fit_of(table, other, 2.0), accepted=5.0)
    for run in (out / "run", out / "search" / "run"):
        found = attachments.read_fits(table.folder, run)
        assert found == released.together(table.fits())
    with pytest.raises(InputError, match="to name the fit in"):
        attachments.read_fits(table.folder, folder / "unknown" / "run")


def test_fits_of_rows_and_of_users_have_no_sum(folder: pathlib.Path) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    table.add(out, fit_of(table, out), accepted=None)
    of_users = dataclasses.replace(fit_of(table, out), unit="user")
    with pytest.raises(InputError, match="one privacy unit"):
        released.check_added(table.fits(), of_users, 100.0)


def test_what_no_epsilon_covers_stays_in_the_sum(folder: pathlib.Path) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")
    looked = dataclasses.replace(fit_of(table, out), uncovered=("9 rows",))
    table.add(out, looked, accepted=None)
    claim = released.together(table.fits())["claim"]
    assert "but for 9 rows of out, which no epsilon covers" in claim


def test_a_folder_without_access_is_read_but_not_noted_and_a_damaged_note_refused(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr("pipelines.files.locks.os.open", refuse)
        assert not table.add(out, fit_of(table, out), accepted=None)
    table.add(out, fit_of(table, out), accepted=None)
    with monkeypatch.context() as patch:
        patch.setattr("pipelines.files.locks.os.open", refuse)
        assert not table.add(out, fit_of(table, out), accepted=None)  # it goes on
        with pytest.raises(InputError, match="Expected nothing released"):
            table.add(make(folder, "b"), fit_of(table, folder / "b"), accepted=None)
    header = {"format": "dpsgd-released", "version": 1}
    for fields in ({"fits": []}, {**header, "fits": [{}]}, {**header, "fits": [1]}):
        text = json.dumps(fields)
        table.note.write_text(text)
        with pytest.raises(InputError, match=released.NAME):
            table.fits()
