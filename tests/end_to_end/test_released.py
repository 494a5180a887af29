"""A note beside a table: what its fits spent, and what another one adds."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import threading

import pytest

from accounting.core.validation import InputError
from dpsgd import released
from dpsgd.released import Fit, Table


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


def test_of_two_that_begin_at_once_one_is_refused(folder: pathlib.Path) -> None:
    table = Table.of(str(folder / "data/a.csv"))
    barrier, errors = threading.Barrier(4), []

    def begin(place: int) -> None:
        out = make(folder, f"out-{place}")
        barrier.wait()
        try:
            table.add(out, fit_of(table, out), accepted=None)
        except InputError as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert len(table.fits()) == 1


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


def test_a_folder_without_access_is_not_noted_and_a_damaged_note_is_refused(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out = Table.of(str(folder / "data/a.csv")), make(folder, "out")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr("pipelines.files.locks.os.open", refuse)
        assert not table.add(out, fit_of(table, out), accepted=None)
    header = {"format": "dpsgd-released", "version": 1}
    for fields in ({"fits": []}, {**header, "fits": [{}]}, {**header, "fits": [1]}):
        text = json.dumps(fields)
        table.note.write_text(text)
        with pytest.raises(InputError, match=released.NAME):
            table.fits()
