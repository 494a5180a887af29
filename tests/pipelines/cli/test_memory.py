"""Too little memory is one line, which tells nothing of rows."""

from __future__ import annotations

import os
import pathlib
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import certify
from pipelines.core import threads
from pipelines.core.resample import Resampling
from tests.pipelines.conftest import Command

SCHEMA = """\
version = 1
[columns.x]
kind = "numeric"
[columns.y]
kind = "label"
task = "binary"
"""
_BATCHES = "batches --batch-size 10 --num-steps 2"


def fails(*_: Any, **__: Any) -> None:
    """Raises NumPy's error, whose text holds the shape: the number of rows chosen."""
    np.empty((1234567, 1 << 40), np.int8)


@pytest.mark.parametrize(
    ("call", "at"),
    [
        ("schema t.parquet --out s", "pipelines.cli.data_body.schema"),
        ("prepare --schema t.toml", "pipelines.tables.reading.relation_of"),
        (_BATCHES, "pipelines.job.do_fns._Sampler._pack"),
        (f"{_BATCHES} --dry-run", "pipelines.cli.batch_body._summary"),
    ],
)
def test_too_little_memory_is_one_line(
    call: str,
    at: str,
    command: Command,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"x": np.arange(100.0), "y": np.resize([0, 1], 100).astype(np.int8)}
    pq.write_table(pa.table(columns), "t.parquet")
    pathlib.Path("t.toml").write_text(SCHEMA)
    monkeypatch.setattr(at, fails)
    more = () if call.startswith("schema") else ("--input", "t.parquet", "--out", "o")
    ran = command(*call.split(), *more)
    assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err
    assert "enough memory" in ran.err
    assert "1234567" not in ran.err


@pytest.mark.parametrize(
    ("machine", "container", "fitting", "taken"),
    [
        (64, "max", True, 1.375), (64, "max", False, 4), (6, None, False, 3),
        (2, None, True, 1), (64, str(2 << 30), True, 1),
    ],
)  # fmt: skip
def test_making_batches_again_takes_no_more_than_half_of_the_memory(
    machine: int,
    container: str | None,
    fitting: bool,
    taken: float,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": machine << 18}
    monkeypatch.setattr(os, "sysconf", told.get)
    monkeypatch.setattr(threads, "_CONTAINER_LIMIT", tmp_path / "memory.max")
    if container is not None:
        (tmp_path / "memory.max").write_text(f"{container}\n")
    resampled = mock.create_autospec(Resampling, instance=True)
    resampled.fitting_steps.return_value = int(fitting)
    assert certify.default_memory(resampled, 2) == taken * (1 << 30)


def test_making_batches_again_says_its_memory_before_it_starts(
    command: Command, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"x": np.arange(100.0), "y": np.resize([0, 1], 100).astype(np.int8)}
    pq.write_table(pa.table(columns), "t.parquet")
    assert command(*_BATCHES.split(), "--input", "t.parquet", "--out", "o").code == 0
    ran = command("verify", "--resample", "o", "--input", "t.parquet")
    assert ran.code == 0
    assert "memory: " in ran.err
    assert "passes over --input: 1" in ran.err
