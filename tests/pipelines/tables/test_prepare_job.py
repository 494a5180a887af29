"""Preparing on an engine of Beam: the files of ``prepare``, and what a kill leaves."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import itertools
import pathlib
import stat
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.validation import InputError
from pipelines.tables import table_format
from pipelines.tables.convert import ConvertOptions, prepare
from pipelines.tables.criteo import PrepareOptions
from pipelines.tables.job import prepare_job
from pipelines.tables.job.prepare_job import prepare_on
from pipelines.tables.schema.schema import Schema
from pipelines.tables.synthetic import SynthOptions, write_synth
from pipelines.tables.table_format import TableOptions

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


def file_bytes(out: pathlib.Path) -> dict[str, bytes]:
    paths = [path for path in out.rglob("*") if path.is_file()]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def direct(options: Any, work: Any, items: Any) -> None:
    """What an engine does, here and in another order."""
    for item in reversed(list(items)):
        work(item)


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
        write_synth(table, SynthOptions(num_rows=300, num_files=3))
        options = PrepareOptions(
            row_group_rows=10, row_groups_per_file=3, split=(7, 3, 0)
        )
    else:
        options = table_options(by)
    wanted = prepare(str(table), tmp_path / "wanted", options)
    if by != "fraction":  # once on Beam is enough
        monkeypatch.setattr(prepare_job, "run_on_engine", direct)
    found = prepare_on(str(table), tmp_path / "out", options, ON)
    assert found == wanted
    assert file_bytes(tmp_path / "out") == file_bytes(tmp_path / "wanted")
    assert len(file_bytes(tmp_path / "out")) > 5
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    assert not (tmp_path / "out.unfinished").exists()


def test_a_killed_job_goes_on_and_another_one_is_refused(
    table: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_job, "run_on_engine", direct)
    options, out = table_options("fraction"), tmp_path / "out"
    written: list[str] = []
    close = prepare_job.SplitWriter.close

    def killed_at_third(self: prepare_job.SplitWriter) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append("file")
        close(self)

    monkeypatch.setattr(prepare_job.SplitWriter, "close", killed_at_third)
    with pytest.raises(KeyboardInterrupt):
        prepare_on(str(table), out, options, ON)
    monkeypatch.setattr(prepare_job.SplitWriter, "close", close)
    assert not out.exists()
    unfinished = tmp_path / "out.unfinished"
    assert stat.S_IMODE(unfinished.stat().st_mode) == 0o700
    before = file_bytes(unfinished / "data")
    assert len(before) == 2
    with pytest.raises(InputError, match="to be of the same job"):
        prepare_on(str(table), out, table_options("hash"), ON)
    # What was done is not done again.
    monkeypatch.setattr(prepare_job._Job, "blocks", _never)
    times = {name: (unfinished / "data" / name).stat().st_mtime_ns for name in before}
    prepare_on(str(table), out, options, ON)
    assert times == {name: (out / name).stat().st_mtime_ns for name in before}
    prepare(str(table), tmp_path / "wanted", options)
    assert file_bytes(out) == file_bytes(tmp_path / "wanted")


def _never(*_: Any) -> None:
    raise AssertionError("it was done before")


@pytest.fixture(params=["csv", "parquet", "criteo"])
def large(
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, ConvertOptions, ConvertOptions]:
    """One file of some parts, with malformed rows: path, and options to skip or not."""
    monkeypatch.setattr(prepare_job, "run_on_engine", direct)
    monkeypatch.setattr(prepare_job, "_PART_BYTES", 300)
    path = tmp_path / f"table.{request.param}"
    options: ConvertOptions = table_options("fraction", text=True)
    ids = [f"{row}" if row % 17 else f"x\n,{row}" for row in range(230)]
    if request.param == "criteo":
        write_synth(tmp_path / "text", SynthOptions(num_rows=100, num_files=1))
        (only,) = (tmp_path / "text").iterdir()
        lines = only.read_text().splitlines()
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
        prepare_on(path, tmp_path / "out", skipping, ON)
    assert converted[0][1] > 5  # parts
    # What was done is not done again: the ranges are not looked at, nor rows checked.
    monkeypatch.setattr(prepare_job._Job, "convert_file", convert)
    for name in ("read_lines", "range_leaves_open"):
        monkeypatch.setattr(f"pipelines.tables.file_parts.{name}", _never)
    monkeypatch.setattr(prepare_job.RowCount, "add", _never)
    assert prepare_on(path, tmp_path / "out", skipping, ON) == wanted
    assert file_bytes(tmp_path / "out") == file_bytes(tmp_path / "wanted")


def test_a_large_file_that_is_not_divided_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_job, "run_on_engine", direct)
    monkeypatch.setattr(prepare_job, "_PART_BYTES", 20)
    said: list[str] = []
    for name, opened in (("t.csv.gz", gzip.open), ("u.csv", open)):
        with opened(tmp_path / name, "wt") as file:
            file.write("id,y\n" + "1,0\n" * 50)
        options = table_options("fraction")
        out = tmp_path / f"of-{name}"
        prepare_on(str(tmp_path / name), out, options, ON, say=said.append)
    (line,) = said
    assert "one worker reads all of" in line
    assert "t.csv.gz" in line


def test_malformed_rows_of_a_large_file_are_refused_as_by_prepare(
    large: tuple[str, ConvertOptions, ConvertOptions], tmp_path: pathlib.Path
) -> None:
    path, _, failing = large
    with pytest.raises(InputError, match="are malformed") as here:
        prepare(path, tmp_path / "here", failing)
    with pytest.raises(InputError, match="are malformed") as there:
        prepare_on(path, tmp_path / "there", failing, ON)
    assert str(there.value) == str(here.value)


def test_each_input_is_read_once_by_each_phase(
    table: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_job, "run_on_engine", direct)
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
    prepare_on(str(tmp_path / "one.parquet"), out, table_options("fraction"), ON)
    assert len(list((out / "train").iterdir())) > 5
    assert sum(read) == 2 * len(rows)


def test_progress_of_workers_is_told(
    table: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for path in table.iterdir())
    work = tmp_path / "out.unfinished"
    told: list[tuple[str, int, int]] = []

    def run(options: Any, each: Any, items: Any) -> None:
        direct(options, each, items)
        if len(told) == 0:  # as if no file were done: what workers said is all there is
            for path in (work / "counts").iterdir():
                path.rename(path.with_suffix(".aside"))
            job = each.__self__
            assert prepare_job._read_so_far(job, "check", job.count_path)[0] > size / 2
            for path in (work / "counts").iterdir():
                path.rename(path.with_suffix(".json"))

    monkeypatch.setattr(prepare_job, "run_on_engine", run)
    monkeypatch.setattr(prepare_job, "_BETWEEN_TOLD", 0.0)
    prepare_on(
        str(table), tmp_path / "out", table_options("fraction"), ON,
        on_progress=lambda *now: told.append(now),
    )  # fmt: skip
    last = {phase: (done, total) for phase, done, total in told}
    assert list(last) == list(prepare_job.PHASES)
    of_bytes = dict.fromkeys(("divide", "check", "convert"), (size, size))
    assert last == {**of_bytes, "write": (216, 216)}


def test_malformed_rows_are_refused_as_by_prepare(
    table: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_job, "run_on_engine", direct)
    options = dataclasses.replace(table_options("fraction"), on_bad_row="fail")
    told = []
    for run in (
        lambda: prepare(str(table), tmp_path / "here", options),
        lambda: prepare_on(str(table), tmp_path / "there", options, ON),
    ):
        with pytest.raises(InputError, match="14 of 230 are malformed") as caught:
            run()
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert not (tmp_path / "there").exists()


def test_what_a_worker_refuses_is_one_line(
    table: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = bytearray((table / "part-4.parquet").read_bytes())
    data[4:20] = b"\xff" * 16
    (table / "part-4.parquet").write_bytes(data)
    with pytest.raises(InputError, match=r"part-4.parquet to be readable") as caught:
        prepare_on(str(table), tmp_path / "out", table_options("fraction"), ON)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("by", ["fraction", "hash"])
@pytest.mark.parametrize("more", [1, -1])
def test_rows_that_differ_from_the_count_are_refused(
    more: int,
    by: str,
    table: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepare_job, "run_on_engine", direct)
    read = prepare_job._Job.read_counts

    def differing(job: Any) -> Any:
        counts = read(job)
        counts[2].num_good += more
        counts[2].of_splits[0] += more
        return counts

    monkeypatch.setattr(prepare_job._Job, "read_counts", differing)
    with pytest.raises(InputError, match="not to change while it is read"):
        prepare_on(str(table), tmp_path / "out", table_options(by), ON)
    assert not (tmp_path / "out").exists()
