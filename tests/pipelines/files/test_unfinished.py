"""Guarantees of pipelines.files.unfinished and pipelines.files.locks."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import stat
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.core.files import locks
from pipelines.files import unfinished
from pipelines.files.unfinished import (
    is_resumable,
    staged_folder,
    unfinished_folder,
)
from tests.pipelines.files.test_output_file import worker

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


def test_out_appears_complete_and_nothing_else_stays(tmp_path: pathlib.Path) -> None:
    make(tmp_path / "new" / "out")
    assert names(tmp_path) == ["new", "new/out", "new/out/part"]
    assert stat.S_IMODE((tmp_path / "new" / "out").stat().st_mode) == 0o700
    with pytest.raises(InputError, match="a new or an empty folder"):
        make(tmp_path / "new" / "out")
    assert names(tmp_path) == ["new", "new/out", "new/out/part"]


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
        with (
            pytest.raises(InputError, match="its command or options were others"),
            staged_folder(out),
        ):
            pass
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


def test_an_empty_folder_or_a_link_to_one_is_taken_and_another_refused(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    make(tmp_path / "link")
    assert names(tmp_path) == ["link", "real", "real/part"]
    with pytest.raises(InputError, match="new or an empty folder"):
        make(tmp_path / "real", OTHER)


def test_nothing_is_left_without_a_record(tmp_path: pathlib.Path) -> None:
    def fail(error: BaseException) -> None:
        with staged_folder(tmp_path / "new" / "out") as staged:
            (staged / "part").write_text("rows")
            raise error

    for error in (InputError("stop"), DiedError()):
        with pytest.raises(type(error)):
            fail(error)
        assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed_by_the_next(
    tmp_path: pathlib.Path,
) -> None:
    def die(out: pathlib.Path) -> None:
        with staged_folder(out) as staged:
            (staged / "part").write_text("rows")
            os.kill(os.getpid(), signal.SIGKILL)

    out = tmp_path / "out"
    process = _FORK.Process(target=die, args=(out,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert names(tmp_path / "out.unfinished") == ["data", "data/part", "lock"]
    with staged_folder(out) as staged:
        (staged / "other").write_text("x")
    assert names(tmp_path) == ["out", "out/other"]


def test_a_folder_of_other_origin_is_refused_and_stays(tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "out.unfinished"
    mine.mkdir()
    (mine / "thesis").write_text("mine")
    with pytest.raises(InputError, match="it is something else"):
        make(tmp_path / "out")
    assert names(tmp_path) == ["out.unfinished", "out.unfinished/thesis"]
    (mine / "thesis").unlink()
    mine.rmdir()
    mine.write_text("a file")
    with pytest.raises(InputError, match="it is something else"):
        make(tmp_path / "out")
    assert mine.read_text() == "a file"


def test_a_result_that_somebody_removed_is_made_again(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"

    clear = unfinished.Unfinished.clear

    def die(self: Any, but: Any = ()) -> None:
        if but:  # in the clean-up
            raise DiedError
        clear(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfinished.Unfinished, "clear", die)
        with pytest.raises(DiedError):
            make(out)
    assert names(out) == ["part"]
    (out / "part").unlink()
    out.rmdir()
    assert make(out, OTHER) == {}
    assert names(tmp_path) == ["out", "out/part"]


# Two at once, in processes.


def _hold(out: pathlib.Path, told: Any, go: Any) -> None:
    """Works for ``out``, and waits amid the work."""
    with unfinished_folder(out) as folder:
        folder.begin_or_continue(JOB, "input or rows")
        (folder.data / "part").write_text("first")
        told.send("works")
        go.recv()
        folder.finish()


def test_of_two_at_once_the_second_is_refused(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    with worker(out, _hold) as (process, go):
        for job in (JOB, OTHER):
            with pytest.raises(InputError, match="no other job to write") as error:
                make(out, job)
            assert "\n" not in str(error.value)
        go.send("finish")
        process.join()
        assert process.exitcode == 0
    assert (out / "part").read_text() == "first"
    assert names(tmp_path) == ["out", "out/part"]


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    with worker(out, _hold) as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        make(out)
    assert names(tmp_path) == ["out", "out/part"]


def _race(out: pathlib.Path, number: int, barrier: Any, ended: Any) -> None:
    barrier.wait()
    try:
        make(out, {"number": number}, text=f"{number}")
        ended.put((number, ""))
    except InputError as error:
        ended.put((number, str(error)))


def test_of_many_at_once_one_does_the_work(tmp_path: pathlib.Path) -> None:
    rounds, rivals = 6, 5
    for number in range(rounds):
        out, ended = tmp_path / str(number) / "out", _FORK.SimpleQueue()
        barrier = _FORK.Barrier(rivals)
        processes = [
            _FORK.Process(target=_race, args=(out, rival, barrier, ended))
            for rival in range(rivals)
        ]
        for process in processes:
            process.start()
        results = dict(ended.get() for _ in processes)
        for process in processes:
            process.join()
        (winner,) = (rival for rival, error in results.items() if not error)
        assert (out / "part").read_text() == f"{winner}"
        assert names(out.parent) == ["out", "out/part"]
        for error in filter(None, results.values()):
            assert "no other job" in error or "a new or an empty folder" in error


def test_a_lock_file_that_was_removed_locks_nothing(tmp_path: pathlib.Path) -> None:
    with locks.locked(tmp_path, "out"):
        with (
            pytest.raises(InputError, match="no other job"),
            locks.locked(tmp_path, "out"),
        ):
            pass
        (tmp_path / locks.LOCK_NAME).unlink()
        with locks.locked(tmp_path, "out"):
            pass
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with (
        pytest.raises(InputError, match=r"a file system with locks.*not supported"),
        locks.locked(tmp_path, "out"),
    ):
        pass
