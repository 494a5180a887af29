"""A folder of batches is of the first private run that asks for it."""

from __future__ import annotations

import errno
import json
import os
import pathlib
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.batches import first_use
from pipelines.files import storage
from tests.at_once import at_once

A_RUN, ANOTHER = "a" * 32, "b" * 32
REFUSED = "run begun in /runs/one has used them.*batches.*--batches-used-before"


@pytest.fixture
def place(here_or_s3: str) -> str:
    """A folder of batches, here or in a store."""
    storage.make_folder(f"{here_or_s3}/private")
    return here_or_s3


def test_the_first_run_takes_a_folder_and_others_are_refused(place: str) -> None:
    first_use.check(place, "")
    assert first_use.take(place, A_RUN, "/runs/one") == ""
    path = f"{place}/private/used_by.json"
    mark = storage.read_bytes(path)
    assert A_RUN not in mark.decode()
    # The run goes on, in any process and as often as it likes.
    first_use.check(place, A_RUN)
    assert first_use.take(place, A_RUN, "/runs/one") == ""
    for refused in (
        lambda: first_use.check(place, ""),
        lambda: first_use.check(place, ANOTHER),
        lambda: first_use.take(place, ANOTHER, "/runs/two"),
    ):
        with pytest.raises(InputError, match=REFUSED) as error:
            refused()
        assert "\n" not in str(error.value)
    assert first_use.take(place, ANOTHER, "/runs/two", shared=True) == ""
    assert storage.read_bytes(path) == mark


def test_of_several_at_once_one_takes_a_folder(tmp_path: pathlib.Path) -> None:
    (tmp_path / "private").mkdir()

    def take(number: int) -> Any:
        return lambda: first_use.take(tmp_path, f"{number:032}", f"/runs/{number}")

    taken = at_once(*map(take, range(8)))
    assert taken.count(True) == 1
    first_use.check(tmp_path, f"{taken.index(True):032}")


def test_where_nothing_can_be_written_it_is_said_and_marks_still_count(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: str, *_: Any, **__: Any) -> bool:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    (tmp_path / "private").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "create", read_only)
        said = first_use.take(tmp_path, A_RUN, "/runs/one")
    assert f"{tmp_path}/private/used_by.json cannot be written (Read-only" in said
    first_use.take(tmp_path, A_RUN, "/runs/one")
    monkeypatch.setattr(storage, "create", read_only)
    assert first_use.take(tmp_path, A_RUN, "/runs/one") == ""
    with pytest.raises(InputError, match=REFUSED):
        first_use.take(tmp_path, ANOTHER, "/runs/two")


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"version": 2})])
def test_a_damaged_mark_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / first_use.NAME).write_text(text)
    with pytest.raises(InputError, match=r"used_by\.json"):
        first_use.check(tmp_path, A_RUN)
