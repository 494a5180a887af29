"""What surrounds a command may fail: it then says one true line, and no more."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.files.outputs import output_file
from pipelines.files.storage import new_file
from trainer.prediction.predict import WrittenTable

_SYNTH = ("synth", "--rows", "10", "--out")
#: A module whose import is interrupted, also where a shell made the tests ignore it.
_KILLED = (
    "import os, signal\nsignal.signal(2, signal.default_int_handler)\n"
    "os.kill(os.getpid(), 2)\n"
)


def run(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own, whose paths begin in this folder."""
    environment = os.environ | more.pop("environment", {})
    call = [sys.executable, "-m", "dpsgd", *words]
    return subprocess.run(
        call, env=environment, stderr=subprocess.PIPE, text=True, check=False, **more
    )


def last_line(ran: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr
    return ran.stderr.splitlines()[-1]


def test_a_signal_before_the_command_is_loaded_ends_in_one_line(
    tmp_path: pathlib.Path, root: pathlib.Path
) -> None:
    (tmp_path / "cyclopts.py").write_text(_KILLED)
    paths = os.pathsep.join(map(str, (tmp_path, root)))
    ran = run("plan", environment={"PYTHONPATH": paths})
    assert (ran.returncode, ran.stderr.count("\n")) == (130, 1)
    assert last_line(ran).startswith("error: Stopped.")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "unbuffered"), [(_SYNTH, ""), (("plan", "--help"), "1")]
)
def test_full_standard_output_is_no_reason_to_work_again(
    words: tuple[str, ...], unbuffered: str, tmp_path: pathlib.Path
) -> None:
    out = [str(tmp_path / "out")] if words == _SYNTH else []
    with open("/dev/full", "w") as full:
        environment = {"PYTHONUNBUFFERED": unbuffered}
        ran = run(*words, *out, stdout=full, environment=environment)
    assert ran.returncode == 2
    assert "standard output" in last_line(ran)
    assert "give the same command again" not in ran.stderr
    assert (tmp_path / "out").exists() == bool(out)


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "2603"), ("utf-8", "☃")])
def test_every_path_can_be_printed(
    encoding: str, shown: str, tmp_path: pathlib.Path
) -> None:
    ran = run(
        *_SYNTH, "☃[red]",
        environment={"PYTHONIOENCODING": encoding, "PYTHONPATH": os.getcwd()},
        cwd=tmp_path, stdout=subprocess.PIPE,
    )  # fmt: skip
    last_line(ran)
    assert ran.returncode == 0
    assert f"{shown}[red]" in ran.stdout


@contextlib.contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file of this process may become larger, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("writer", [new_file, output_file])
def test_a_full_disk_is_said_with_its_path(
    writer: Callable[[pathlib.Path], Any], tmp_path: pathlib.Path
) -> None:
    with (
        room_for(1 << 16),
        pytest.raises(OSError, match="name") as error,
        writer(tmp_path / "name") as write,
    ):
        write(bytes(1 << 17))
    assert str(error.value.filename) == str(tmp_path / "name")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["p.csv", "p.parquet"])
@pytest.mark.parametrize("rows", [2, 1 << 16])  # few are written when the file ends
def test_half_a_table_is_not_left_on_a_full_disk(
    tmp_path: pathlib.Path, name: str, rows: int
) -> None:
    table = pa.table({"a column of numbers": np.random.random(rows)})
    with (
        room_for(20),
        pytest.raises(OSError, match=name),
        WrittenTable(tmp_path / name) as file,
    ):
        file.write(table)
    assert not list(tmp_path.iterdir())
