"""Too little memory is one line, which tells nothing of rows."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
        ("prepare --schema t.toml", "pipelines.tables.table_files.relation_of"),
        (_BATCHES, "pipelines.job.transforms.sample_and_pack"),
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
