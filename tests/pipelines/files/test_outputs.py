"""Guarantees of outputs: folders and files, and the locks that they take."""

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
from pipelines.files.outputs import check_new, output_file, staged_folder

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


def make_file(out: pathlib.Path, data: bytes = b"second") -> None:
    with output_file(out) as write:
        write(data)


def test_of_two_files_at_once_the_second_is_refused(tmp_path: pathlib.Path) -> None:
    def slow() -> None:
        with output_file(tmp_path / "out") as write:
            write(b"first")
            make_file(tmp_path / "out")

    for work in (slow, lambda: make_file(tmp_path / "out", b"third")):
        with pytest.raises(InputError, match="to be a new file"):
            work()
        assert (tmp_path / "out").read_bytes() == b"second"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_is_replaced_only_on_request(tmp_path: pathlib.Path) -> None:
    out, before = tmp_path / "out", os.umask(0o027)
    try:
        make_file(out, b"first")
        assert stat.S_IMODE(out.stat().st_mode) == 0o640
    finally:
        os.umask(before)
    with output_file(out, overwrite=True) as write:
        write(b"second")
    assert out.read_bytes() == b"second"


@pytest.mark.parametrize("write", [check_new, output_file, staged_folder])
def test_a_path_of_a_store_is_refused_and_nothing_written_here(
    write: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(InputError, match="--out s3://bucket/name"),
        contextlib.ExitStack() as used,
    ):
        used.enter_context(write("s3://bucket/name"))
    assert not list(tmp_path.iterdir())
