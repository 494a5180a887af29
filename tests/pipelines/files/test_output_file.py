"""Guarantees of pipelines.files.outputs."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest

from accounting.core.validation import InputError
from pipelines.files.outputs import output_file


def make(out: pathlib.Path, data: bytes = b"second") -> None:
    with output_file(out) as write:
        write(data)


def test_of_two_at_once_the_second_is_refused(tmp_path: pathlib.Path) -> None:
    def slow() -> None:
        with output_file(tmp_path / "out") as write:
            write(b"first")
            make(tmp_path / "out")

    for work in (slow, lambda: make(tmp_path / "out", b"third")):
        with pytest.raises(InputError, match="to be a new file"):
            work()
        assert (tmp_path / "out").read_bytes() == b"second"
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
