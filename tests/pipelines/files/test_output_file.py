"""Guarantees of pipelines.files.output_file."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import stat
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accounting.core.validation import InputError
from pipelines.files.output_file import output_file

_FORK = multiprocessing.get_context("fork")


def make(out: pathlib.Path, data: bytes = b"second") -> None:
    with output_file(out) as write:
        write(data)


def _hold(out: pathlib.Path, told: Any, go: Any) -> None:
    with output_file(out) as write:
        write(b"the first one, which is longer" * 10**5)
        told.send("works")
        go.recv()


@contextlib.contextmanager
def worker(
    out: pathlib.Path, hold: Callable[[pathlib.Path, Any, Any], None] = _hold
) -> Iterator[tuple[Any, Any]]:
    """Yields (process amid its work, connection that lets it finish)."""
    told, tells = _FORK.Pipe()
    waits, go = _FORK.Pipe()
    process = _FORK.Process(target=hold, args=(out, tells, waits))
    process.start()
    try:
        assert told.recv() == "works"
        yield process, go
    finally:
        process.kill()
        process.join()


def test_of_two_at_once_the_second_is_refused(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    with worker(out) as (process, go):
        with pytest.raises(InputError, match="no other job to write"):
            make(out)
        assert not out.exists()
        go.send("finish")
        process.join()
    assert out.read_bytes() == b"the first one, which is longer" * 10**5
    with pytest.raises(InputError, match="to be new"):
        make(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_process_left_is_taken_over(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    with worker(out) as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        make(out)
    assert out.read_bytes() == b"second"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_is_left_after_an_error(tmp_path: pathlib.Path) -> None:
    def fail() -> None:
        with output_file(tmp_path / "out") as write:
            write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_on_request(tmp_path: pathlib.Path) -> None:
    out, before = tmp_path / "out", os.umask(0o027)
    try:
        make(out, b"first")
        assert stat.S_IMODE(out.stat().st_mode) == 0o640
    finally:
        os.umask(before)
    with output_file(out, overwrite=True) as write:
        write(b"second")
    assert out.read_bytes() == b"second"
