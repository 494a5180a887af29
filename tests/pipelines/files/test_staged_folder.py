"""Guarantees of pipelines.files.outputs, and of the locks that it takes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import stat
from collections.abc import Iterator
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.core.files import locks
from pipelines.files.outputs import staged_folder

_FORK = multiprocessing.get_context("fork")


def make(out: pathlib.Path, text: str = "x") -> None:
    with staged_folder(out) as data:
        (data / "deep").mkdir()
        (data / "deep" / "part").write_text(text)
        (data.parent / "ids").write_text("sensitive")


def names(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_out_appears_complete_private_and_alone(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "new" / "out"
    with staged_folder(out) as data:
        assert stat.S_IMODE(data.parent.stat().st_mode) == 0o700
        assert not out.exists()
    assert names(tmp_path) == ["new", "new/out"]
    make(out)  # an empty one is taken
    assert names(out) == ["deep", "deep/part"]
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    with pytest.raises(InputError, match="a new or an empty folder"):
        make(out)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    make(tmp_path / "link")
    assert names(tmp_path / "real") == ["deep", "deep/part"]


@pytest.mark.parametrize(
    "error", [InputError("stop"), KeyboardInterrupt(), OSError(28)]
)
def test_nothing_is_left_after_an_error(
    tmp_path: pathlib.Path, error: BaseException
) -> None:
    def fail() -> None:
        with staged_folder(tmp_path / "out") as data:
            (data / "part").write_text("rows")
            raise error

    kind = InputError if isinstance(error, OSError) else type(error)
    with pytest.raises(kind):
        fail()
    assert names(tmp_path) == []


def test_a_folder_of_other_origin_is_refused_and_stays(tmp_path: pathlib.Path) -> None:
    mine = tmp_path / "out.unfinished"
    mine.write_text("a file")
    with pytest.raises(InputError, match="it is something else"):
        make(tmp_path / "out")
    assert mine.read_text() == "a file"
    mine.unlink()
    mine.mkdir()
    (mine / "thesis").write_text("mine")
    with pytest.raises(InputError, match="it is something else"):
        make(tmp_path / "out")
    assert names(tmp_path) == ["out.unfinished", "out.unfinished/thesis"]


def _hold(out: pathlib.Path, told: Any, go: Any) -> None:
    """Works for ``out``, and waits amid the work."""
    with staged_folder(out) as data:
        (data / "part").write_text("first")
        told.send("works")
        go.recv()


@contextlib.contextmanager
def worker(out: pathlib.Path) -> Iterator[tuple[Any, Any]]:
    """Yields (process amid its work, connection that lets it finish)."""
    told, tells = _FORK.Pipe()
    waits, go = _FORK.Pipe()
    process = _FORK.Process(target=_hold, args=(out, tells, waits))
    process.start()
    try:
        assert told.recv() == "works"
        yield process, go
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("is_killed", [False, True])
def test_of_two_at_once_the_second_is_refused_unless_the_first_is_killed(
    tmp_path: pathlib.Path, is_killed: bool
) -> None:
    out = tmp_path / "out"
    with worker(out) as (process, go):
        with pytest.raises(InputError, match="no other job to write") as error:
            make(out)
        assert "\n" not in str(error.value)
        if is_killed:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            assert names(tmp_path / "out.unfinished") == ["data", "data/part"]
            make(out)
        else:
            go.send("finish")
            process.join()
            assert process.exitcode == 0
    made = ["out/deep", "out/deep/part"] if is_killed else ["out/part"]
    assert names(tmp_path) == ["out", *made]


def _race(out: pathlib.Path, number: int, barrier: Any, ended: Any) -> None:
    barrier.wait()
    try:
        make(out, text=f"{number}")
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
        assert (out / "deep" / "part").read_text() == f"{winner}"
        assert names(out.parent) == ["out", "out/deep", "out/deep/part"]
        for error in filter(None, results.values()):
            assert "no other job" in error or "a new or an empty folder" in error


def test_a_lock_that_was_removed_or_that_no_system_has_locks_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    def refused(why: str) -> None:
        with pytest.raises(InputError, match=why), locks.locked(tmp_path, "out"):
            pass

    with locks.locked(tmp_path, "out"):
        refused("no other job")
        (tmp_path / locks.LOCK_NAME).unlink()
        with locks.locked(tmp_path, "out"):
            pass
    assert names(tmp_path) == []
    monkeypatch.setattr("fcntl.flock", no_locks)
    refused(r"a file system with locks.*not supported")
