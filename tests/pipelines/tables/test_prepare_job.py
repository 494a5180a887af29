"""Preparing on an engine of Beam, and what an error leaves."""

from __future__ import annotations

import functools
import itertools
import pathlib
import stat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.core.validation import InputError
from pipelines.job.engine_tasks import run_on_engine
from pipelines.job.runtime import Runtime
from pipelines.tables import prepare as preparation
from pipelines.tables.prepare import TableOptions, prepare, split_counts
from pipelines.tables.schema import SPLITS, Schema
from tests.pipelines.conftest import contents

ON = PipelineOptions(["--runner=FnApiRunner"])


def table_options(by: str) -> TableOptions:
    split = {"by": by, **({"column": "id"} if by == "hash" else {})}
    columns = {"id": {"kind": "numeric"}, "y": {"kind": "label", "task": "binary"}}
    schema = Schema.from_json({"version": 1, "columns": columns, "split": split})
    return TableOptions(schema=schema, row_group_rows=2, on_bad_row="skip")


@pytest.fixture
def table(tmp_path: pathlib.Path) -> pathlib.Path:
    """Five files of 230 rows together, one of them empty, with malformed rows."""
    folder = tmp_path / "table"
    folder.mkdir()
    bounds = [0, 7, 7, 120, 121, 230]
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        ids = list(range(first, last))
        labels = [None if row % 17 == 3 else row % 2 for row in ids]
        rows = pa.table(
            {"id": pa.array(ids, pa.int64()), "y": pa.array(labels, pa.int8())}
        )
        pq.write_table(rows, folder / f"part-{number}.parquet", row_group_size=16)
    return folder


def direct(work: Any, items: Any) -> None:
    """What an engine does, here and in another order."""
    for item in reversed(list(items)):
        work(item)


THERE = Runtime(run_tasks=direct)


@pytest.mark.parametrize("by", ["fraction", "hash", "random"])
def test_the_files_are_those_of_prepare(
    table: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    monkeypatch.setattr(preparation, "_TASK_BYTES", 1)  # a task for each file
    options = table_options(by)
    seen: list[tuple[str, int, int]] = []
    here = Runtime(on_progress=lambda *told: seen.append(told))
    wanted = prepare(str(table), tmp_path / "wanted", options, runtime=here)
    assert {total for _, _, total in seen} == {100}
    assert seen[-1] == ("convert", 100, 100)
    engine = functools.partial(run_on_engine, ON)  # once on Beam is enough
    runtime = Runtime(run_tasks=engine) if by == "fraction" else THERE
    found = prepare(str(table), tmp_path / "out", options, runtime=runtime)
    assert found == wanted
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert not (tmp_path / "out.unfinished").exists()
    assert sum(wanted.num_rows.values()) == 216
    if by == "fraction":
        rows = [pq.read_table(tmp_path / "out" / part)["id"] for part in SPLITS]
        assert tuple(map(len, rows)) == split_counts(216, (80, 10, 10))
        found_ids = [row for part in rows for row in part.to_pylist()]
        assert found_ids == [row for row in range(230) if row % 17 != 3]


@pytest.mark.parametrize("fails_in", ["convert", "write"])
def test_nothing_is_left_of_a_job_that_fails(
    table: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    fails_in: str,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    where = preparation._Job if fails_in == "convert" else preparation
    monkeypatch.setattr(where, "convert" if fails_in == "convert" else "_write", fail)
    with pytest.raises(InputError, match="No space left"):
        prepare(str(table), tmp_path / "out", table_options("fraction"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table"]
