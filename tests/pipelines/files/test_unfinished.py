"""Guarantees of pipelines.files.unfinished, beside those of staged_folder."""

from __future__ import annotations

import multiprocessing
import pathlib
import stat
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.files import unfinished
from pipelines.files.unfinished import (
    is_resumable,
    unfinished_folder,
)

JOB, OTHER = {"input": "00ff", "rows": 3}, {"input": "00ff", "rows": 4}
_FORK = multiprocessing.get_context("fork")


class DiedError(BaseException):
    """The process was killed, as far as its files tell."""


def make(out: pathlib.Path, job: Any = JOB, text: str = "x") -> dict[str, Any]:
    with unfinished_folder(out) as folder:
        done = folder.begin_or_continue(job, "input or rows")
        if done is None:
            (folder.work / "ids").write_text("sensitive")
            (folder.data / "part").write_text(text)
        folder.finish({"rows": 3})
        return done or {}


def names(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def stop(out: pathlib.Path, job: Any, error: BaseException, **how: bool) -> None:
    """Begins a job, which ends with an error amid its work."""
    with unfinished_folder(out) as folder:
        folder.begin_or_continue(job, "input or rows")
        (folder.work / "ids").write_text("sensitive")
        if how.get("give_up"):
            folder.give_up()
        raise error


def kill(out: pathlib.Path) -> None:
    with pytest.raises(DiedError):
        stop(out, JOB, DiedError())


def test_the_same_job_goes_on_and_another_one_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    kill(out)
    assert is_resumable(out)
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    assert stat.S_IMODE((work / "job.json").stat().st_mode) == 0o600
    assert b"00ff" not in (work / "job.json").read_bytes()
    before = names(work)
    for _ in range(2):  # nor does the refusal make it give way
        with pytest.raises(InputError, match="its input or rows were others"):
            make(out, OTHER)
    assert names(work) == before
    make(out)
    assert names(tmp_path) == ["out", "out/part"]


@pytest.mark.parametrize("content", [b"[]", b"{}", b"{", b"\xff"])
def test_a_damaged_record_is_that_of_another_job(
    content: bytes, tmp_path: pathlib.Path
) -> None:
    kill(tmp_path / "out")
    (tmp_path / "out.unfinished" / "job.json").write_bytes(content)
    with pytest.raises(InputError, match="its input or rows were others"):
        make(tmp_path / "out")


def test_a_job_that_ended_with_an_error_gives_way_and_one_given_up_leaves_nothing(
    tmp_path: pathlib.Path,
) -> None:
    out, work = tmp_path / "out", tmp_path / "out.unfinished"

    def fail(job: Any, **how: bool) -> None:
        with pytest.raises(InputError, match="mend"):
            stop(out, job, InputError("mend the schema"), **how)

    fail(JOB, give_up=True)
    assert names(tmp_path) == []
    fail(JOB)
    with unfinished_folder(out) as folder:  # the same one goes on
        folder.begin_or_continue(JOB, "input or rows")
        assert (folder.work / "ids").exists()
    fail(JOB)
    fail(OTHER)
    make(out, JOB)
    assert names(tmp_path) == ["out", "out/part"]
    assert not work.exists()


def test_a_result_that_somebody_removed_is_made_again(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"

    clear = unfinished.clear

    def die(work: pathlib.Path, but: Any = ()) -> None:
        if but:  # in the clean-up
            raise DiedError
        clear(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfinished, "clear", die)
        with pytest.raises(DiedError):
            make(out)
    assert names(out) == ["part"]
    (out / "part").unlink()
    out.rmdir()
    assert make(out, OTHER) == {}
    assert names(tmp_path) == ["out", "out/part"]
