"""Preparing on an engine of Beam: the files of ``prepare``, and what a kill leaves."""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import pathlib
import re
import stat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.core.validation import InputError
from pipelines.job.engine_tasks import run_on_engine
from pipelines.job.runtime import tasks
from pipelines.job.runtime.tasks import Runtime
from pipelines.tables import table_format
from pipelines.tables.convert import ConvertOptions
from pipelines.tables.criteo import PrepareOptions
from pipelines.tables.job import prepare_job
from pipelines.tables.job.prepare_job import prepare
from pipelines.tables.prepared_files import new_table
from pipelines.tables.schema.schema import Schema
from pipelines.tables.synthetic import SynthOptions, write_synth
from pipelines.tables.table_format import TableOptions
from tests.pipelines.conftest import prepared_bytes, write_text

ON = PipelineOptions(["--runner=FnApiRunner"])
LABEL = {"kind": "label", "task": "binary"}


def table_options(by: str, *, text: bool = False, **others: Any) -> TableOptions:
    columns = {"id": {"kind": "text" if text else "numeric"}, "y": LABEL}
    split: dict[str, Any] = {"by": by}
    if by == "hash":
        split["column"] = "id"
    fields = {"version": 1, "columns": columns, "split": split}
    return TableOptions(
        schema=Schema.from_json(fields),
        row_group_rows=10,
        row_groups_per_file=2,
        on_bad_row="skip",
        **others,
    )


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


@pytest.mark.parametrize("by", ["fraction", "hash", "criteo"])
def test_the_files_are_those_of_prepare(
    table: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    options: ConvertOptions
    if by == "criteo":
        table = tmp_path / "text"
        write_text(table, 300, 3)
        options = PrepareOptions(
            row_group_rows=10, row_groups_per_file=3, split=(7, 3, 0)
        )
    else:
        options = table_options(by)
    wanted = prepare(str(table), tmp_path / "wanted", options)
    engine = functools.partial(run_on_engine, ON)  # once on Beam is enough
    runtime = Runtime(run_tasks=engine) if by == "fraction" else THERE
    found = prepare(str(table), tmp_path / "out", options, runtime=runtime)
    assert found == wanted
    assert prepared_bytes(tmp_path / "out") == prepared_bytes(tmp_path / "wanted")
    assert len(prepared_bytes(tmp_path / "out")) > 5
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert not (tmp_path / "out.unfinished").exists()


def test_a_killed_job_goes_on_and_another_one_is_refused(
    table: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, out = table_options("fraction"), tmp_path / "out"
    written: list[str] = []

    def killed_at_third(*arguments: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append("file")
        return new_table(*arguments)

    monkeypatch.setattr(prepare_job, "new_table", killed_at_third)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(table), out, options, runtime=THERE)
    monkeypatch.setattr(prepare_job, "new_table", new_table)
    assert not out.exists()
    unfinished = tmp_path / "out.unfinished"
    assert stat.S_IMODE(unfinished.stat().st_mode) == 0o700
    before = prepared_bytes(unfinished / "data")
    assert len(before) == 2
    prepare(str(table), tmp_path / "wanted", options)
    with pytest.raises(InputError, match="to be of the same job"):
        prepare(str(table), out, table_options("hash"), runtime=THERE)
    # What was done is not done again.
    monkeypatch.setattr(prepare_job._Job, "_blocks", _never)
    times = {name: (unfinished / "data" / name).stat().st_mtime_ns for name in before}
    prepare(str(table), out, options, runtime=THERE)
    assert times == {name: (out / name).stat().st_mtime_ns for name in before}
    assert prepared_bytes(out) == prepared_bytes(tmp_path / "wanted")


def _never(*_: Any) -> None:
    raise AssertionError("it was done before")


@pytest.fixture(params=["csv", "parquet", "criteo"])
def large(
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, ConvertOptions, ConvertOptions]:
    """One file of some parts, with malformed rows: path, and options to skip or not."""
    monkeypatch.setattr(prepare_job, "_PART_BYTES", 300)
    path = tmp_path / f"table.{request.param}"
    options: ConvertOptions = table_options("fraction", text=True)
    ids = [f"{row}" if row % 17 else f'x"y,{row}' for row in range(230)]
    if request.param == "criteo":
        text = write_synth(tmp_path / "text", SynthOptions(num_rows=100))
        lines = text.read_text().splitlines()
        lines[40] = lines[70] = "no row"
        path.write_text("\n".join(lines))
        options = PrepareOptions(row_group_rows=10, row_groups_per_file=3)
    elif request.param == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("id", "y"), *((each, 1) for each in ids)])
            file.write("7\n,,,\n")
    else:
        labels = [row % 2 if row % 19 else None for row in range(230)]
        rows = pa.table({"id": ids, "y": pa.array(labels, pa.int8())})
        pq.write_table(rows, path, row_group_size=16)
    skipping = dataclasses.replace(options, on_bad_row="skip")
    return str(path), skipping, dataclasses.replace(options, on_bad_row="fail")


def test_a_large_file_is_divided_among_workers_with_the_bytes_of_prepare(
    large: tuple[str, ConvertOptions, ConvertOptions],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, skipping, _ = large
    wanted = prepare(path, tmp_path / "wanted", skipping)
    converted: list[tuple[int, int]] = []
    convert = prepare_job._Job.convert_file

    def killed_at_third(job: Any, index: int) -> None:
        if len(converted) == 2:
            raise KeyboardInterrupt
        convert(job, index)
        converted.append((index, len(job.files)))

    monkeypatch.setattr(prepare_job._Job, "convert_file", killed_at_third)
    with pytest.raises(KeyboardInterrupt):
        prepare(path, tmp_path / "out", skipping, runtime=THERE)
    assert converted[0][1] > 5  # parts

    # What was done is not done again.
    def others(job: Any, index: int) -> None:
        assert index not in dict(converted)
        convert(job, index)

    monkeypatch.setattr(prepare_job._Job, "convert_file", others)
    assert prepare(path, tmp_path / "out", skipping, runtime=THERE) == wanted
    assert prepared_bytes(tmp_path / "out") == prepared_bytes(tmp_path / "wanted")


def test_malformed_rows_of_a_large_file_are_refused_as_by_prepare(
    large: tuple[str, ConvertOptions, ConvertOptions], tmp_path: pathlib.Path
) -> None:
    path, _, failing = large
    with pytest.raises(InputError, match="are malformed") as here:
        prepare(path, tmp_path / "here", failing)
    with pytest.raises(InputError, match="are malformed") as there:
        prepare(path, tmp_path / "there", failing, runtime=THERE)
    assert str(there.value) == str(here.value)
    numbers = {
        ".csv": [232, 233],
        ".parquet": [1, 20, 39, 58, 77],
        ".criteo": [41, 71],
    }[pathlib.Path(path).suffix]
    assert re.findall(rf"{path}:(\d+)[:,]", str(here.value)) == [*map(str, numbers)]
    assert not (tmp_path / "there").exists()


def test_every_row_is_read_once(
    table: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pq.read_table(table)  # in one file, for many of the output
    pq.write_table(rows, tmp_path / "one.parquet", row_group_size=16)
    read: list[int] = []
    blocks = table_format.read_blocks

    def counting(*arguments: Any) -> Any:
        for block, done in blocks(*arguments):
            read.append(block.num_rows)
            yield block, done

    monkeypatch.setattr(table_format, "read_blocks", counting)
    out = tmp_path / "out"
    prepare(
        str(tmp_path / "one.parquet"), out, table_options("fraction"), runtime=THERE
    )
    assert len(list((out / "train").iterdir())) > 5
    assert sum(read) == len(rows)


def test_progress_of_workers_is_told(
    table: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in table.iterdir())
    counts = tmp_path / "out.unfinished" / "counts"
    told: list[tuple[str, int, int]] = []

    def run(each: Any, items: Any) -> None:
        direct(each, items)
        if not told:  # as if no file were done: what workers said is all there is
            job = each.args[0].__self__
            step = job.step("convert", job.convert_file, job.count_path)
            assert step.progress() == (size, size)
            for path in counts.glob("*.json"):
                path.rename(path.with_suffix(".aside"))
            assert size / 2 < step.progress()[0] <= size
            for path in counts.glob("*.aside"):
                path.rename(path.with_suffix(".json"))

    monkeypatch.setattr(tasks, "_SECONDS", 0.0)
    runtime = Runtime(run_tasks=run, on_progress=lambda *now: told.append(now))
    options = table_options("fraction")
    prepare(str(table), tmp_path / "out", options, runtime=runtime)
    last = {step: (done, total) for step, done, total in told}
    assert list(last) == ["convert", "write"]  # nothing is to be divided
    assert last == dict.fromkeys(last, (100, 100))  # sizes of the rows are not told


def test_what_a_worker_refuses_is_one_line(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = bytearray((table / "part-4.parquet").read_bytes())
    data[4:20] = b"\xff" * 16
    (table / "part-4.parquet").write_bytes(data)
    engine = Runtime(run_tasks=functools.partial(run_on_engine, ON))
    with pytest.raises(InputError, match=r"part-4.parquet to be readable") as caught:
        prepare(str(table), tmp_path / "out", table_options("fraction"), runtime=engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("more", "by"), [(1, "fraction"), (-1, "hash")])
def test_rows_that_differ_from_the_count_are_refused(
    more: int,
    by: str,
    table: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = prepare_job._Job.read_counts

    def differing(job: Any) -> Any:
        counts = read(job)
        counts[2].num_good += more
        counts[2].of_splits[0] += more
        return counts

    monkeypatch.setattr(prepare_job._Job, "read_counts", differing)
    with pytest.raises(InputError, match="not to change while it is read"):
        prepare(str(table), tmp_path / "out", table_options(by), runtime=THERE)
    assert not (tmp_path / "out").exists()
