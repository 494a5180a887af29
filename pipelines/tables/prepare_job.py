"""Preparing a table on an engine of Apache Beam: the files of ``convert.prepare``.

The first of two pipelines checks every file of the input and counts its rows; then it
is known which rows every file of the output holds, and the second one writes them.

    OUT.unfinished/job.json           what is done: of the input, schema and options
    OUT.unfinished/counts/00000.json  of every input file, once it is checked; sensitive
    OUT.unfinished/data/              becomes OUT
    OUT.unfinished/data/train/part-00000.parquet ...

Workers and whoever starts the job must see input and output under the same paths.

Formal guarantees:
  - The files are those of ``convert.prepare``, byte for byte.
  - A file appears complete or not at all.  The same command goes on where a killed one
    stopped; one of another input, schema or option is refused.
  - ``out`` appears when all of its files are there.

An output file is written from the input files that hold its rows, which are read from
their beginning: many input files scale, one large file does not.

Public: options, paths, sizes.  Sensitive: counts, and everything read and written.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.plan import fingerprint
from accounting.validation import InputError
from pipelines.batches.manifest import pretty_json, read_json
from pipelines.files.output_folder import check_output
from pipelines.files.storage import write_atomically
from pipelines.tables.convert import (
    SPLITS,
    ConvertOptions,
    Format,
    ParsedBlock,
    PrepareSummary,
    RowCount,
    refuse_bad_rows,
    rows_of_splits,
    split_parts,
    summarize,
)
from pipelines.tables.prepared_files import FileRecord, SplitWriter, write_record
from pipelines.tables.raw_files import InputFile, changed, list_files

_JOB, _COUNTS, _RECORDS, _DATA = "job.json", "counts", "records", "data"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """One file of the output.

    Attributes:
      split: Index of its split.
      number: Of the file in the split.
      first: Index of its first row in the split.
      last: Index after its last row.
    """

    split: int
    number: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """Its path below the output."""
        return f"{SPLITS[self.split]}/part-{self.number:05d}.parquet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """What workers have to know.  Public.

    Attributes:
      files: Of the input, in order.
      options: How rows become files.
      work: The folder of the unfinished job.
    """

    files: tuple[InputFile, ...]
    options: ConvertOptions
    work: str

    def count_path(self, index: int) -> pathlib.Path:
        """Where the count of an input file is kept."""
        return pathlib.Path(self.work, _COUNTS, f"{index:05d}.json")

    def task_path(self, task: _Task) -> pathlib.Path:
        """Where a file of the output is."""
        return pathlib.Path(self.work, _DATA, task.name)

    def record_path(self, task: _Task) -> pathlib.Path:
        """Where the record of a file of the output is kept."""
        return pathlib.Path(self.work, _RECORDS, f"{task.name.replace('/', '-')}.json")

    def blocks(self, index: int, *, check_only: bool) -> Iterator[ParsedBlock]:
        """Yields the parsed blocks of an input file."""
        file = self.files[index]
        table = self.options.open([file])
        for block, _ in table.blocks(file):
            yield table.parse(block, check_only=check_only)

    @property
    def format(self) -> Format:
        """Tells schema and shares, which are those of every file."""
        return self.options.open(self.files[:1])

    def check_file(self, index: int) -> None:
        """Counts the rows of an input file, unless it was done."""
        if self.count_path(index).exists():
            return
        count, file = RowCount(), self.files[index]
        first = self.options.open([file]).first_row
        for block in self.blocks(index, check_only=True):
            count.add(file.shown, first, block)
            first += block.num_rows
        write_atomically(
            self.count_path(index), pretty_json(count.to_json()), mode=0o600
        )

    def write_file(self, task: _Task) -> None:
        """Writes a file of the output, unless it was done."""
        path = self.task_path(task)
        if path.exists():
            return
        counts = self.read_counts()
        temporary = pathlib.Path(self.work, f"part-{secrets.token_hex(8)}")
        schema = self.format.schema
        layout = self.options.layout
        writer = SplitWriter(temporary, schema, **layout, first_file=task.number)
        try:
            for rows in self._rows_of(task, counts):
                writer.add(rows)
            writer.close()
            (record,) = writer.files.values()
            data = pretty_json(dataclasses.asdict(record))
            write_atomically(self.record_path(task), data, mode=0o600)
            os.replace(temporary / path.name, path)
        finally:
            writer.abandon()
            shutil.rmtree(temporary, ignore_errors=True)

    def read_counts(self) -> list[RowCount]:
        """Returns the counts of all input files."""
        paths = map(self.count_path, range(len(self.files)))
        return [RowCount.from_json(read_json(path)) for path in paths]

    def _rows_of(self, task: _Task, counts: Sequence[RowCount]) -> Iterator[pa.Table]:
        """Yields the rows of an output file, in order."""
        shares = self.format.shares
        sizes = rows_of_splits(sum_counts(counts), shares)
        good, place = 0, 0  # rows before an input file, of all splits and of this one
        for index, count in enumerate(counts):
            mine = (
                int(count.of_splits[task.split])
                if shares is None
                else _overlap(good, good + count.num_good, sizes, task.split)
            )
            if mine and place < task.last and place + mine > task.first:
                blocks = self.blocks(index, check_only=False)
                for split, rows in split_parts(blocks, sizes, first=good):
                    if split == task.split:
                        start = max(task.first - place, 0)
                        yield rows.slice(start, max(task.last - place - start, 0))
                        place += len(rows)
                        mine -= len(rows)
                    if place >= task.last:
                        return
                if mine:
                    raise changed()
            else:
                place += mine
            good += count.num_good


def _overlap(first: int, last: int, sizes: Sequence[int], split: int) -> int:
    """Returns how many of rows ``first`` to ``last`` - 1 a split by shares holds."""
    bounds = np.cumsum([0, *sizes])
    return max(0, min(last, int(bounds[split + 1])) - max(first, int(bounds[split])))


def sum_counts(counts: Sequence[RowCount]) -> RowCount:
    """Returns the count of all files together."""
    total = RowCount()
    for count in counts:
        total.merge(count)
    return total


def _tasks(sizes: Sequence[int], options: ConvertOptions) -> list[_Task]:
    """Returns the files of the output: one at least of every split."""
    per_file = options.row_group_rows * options.row_groups_per_file
    return [
        _Task(
            split=split,
            number=number,
            first=number * per_file,
            last=min(size, (number + 1) * per_file),
        )
        for split, size in enumerate(sizes)
        for number in range(max(1, -(-size // per_file)))
    ]


def prepare_on(
    pattern: str,
    out: str | os.PathLike[str],
    options: ConvertOptions,
    pipeline_options: PipelineOptions,
) -> PrepareSummary:
    """Does what ``convert.prepare`` does, on an engine of Beam.

    Args:
      pattern: A file, a folder or a glob, which every worker sees.
      out: A new or empty folder, on a file system that every worker mounts; if a job
        was killed, the same one.
      options: Of what kind the table is, and what to write.
      pipeline_options: Of Beam: the runner, and what it needs.

    Raises:
      InputError: as of ``convert.prepare``, or another job is unfinished there.
    """
    files = tuple(list_files(pattern, partitions=options.partitions))
    final = pathlib.Path(os.path.realpath(check_output(out)))
    table = options.open(files)
    work = final.with_name(f"{final.name}.unfinished")
    job = _Job(files=files, options=options, work=str(work))
    _open_work(job)
    _run(pipeline_options, job.check_file, range(len(files)))
    total = sum_counts(job.read_counts())
    refuse_bad_rows(total, options)
    sizes = rows_of_splits(total, table.shares)
    tasks = _tasks(sizes, options)
    _run(pipeline_options, job.write_file, tasks)
    paths = [job.task_path(task) for task in tasks]
    written = sum(path.stat().st_size for path in paths)
    records = {
        task.name: FileRecord(**read_json(job.record_path(task))) for task in tasks
    }
    write_record(work / _DATA, table.schema, options.settings, records)
    os.rename(work / _DATA, final)
    shutil.rmtree(work)
    return summarize(files, table, total, sizes, written)


def _open_work(job: _Job) -> None:
    """Makes the folder of a job, or finds that it is one of the same job.

    Raises:
      InputError: it is one of another job.
    """
    described = {
        "files": [dataclasses.asdict(file) for file in job.files],
        "options": repr(job.options),
    }
    wanted = {"job": fingerprint(described)}
    work = pathlib.Path(job.work)
    if work.exists():
        if read_json(work / _JOB) != wanted:
            raise InputError(
                f"Expected {work} to be of the same job: its input, schema or options "
                "were others. Give those again to finish it, or remove the folder."
            )
        return
    work.mkdir(0o700, parents=True)
    for name in (_COUNTS, _RECORDS):
        (work / name).mkdir()
    (work / _DATA).mkdir(0o700)
    for split in SPLITS:
        (work / _DATA / split).mkdir()
    write_atomically(work / _JOB, pretty_json(wanted), mode=0o600)


def _run(
    options: PipelineOptions, work: Callable[[Any], None], items: Sequence[Any]
) -> None:
    """Does some work for every item, on the engine.

    Raises:
      InputError: what a worker refused.
    """
    try:
        with beam.Pipeline(options=options) as pipeline:
            _ = (
                pipeline
                | beam.Create(list(items))
                | beam.Reshuffle()
                | beam.Map(work).with_output_types(type(None))
            )
    except Exception as error:
        raise _told_by(error) from None


def _told_by(error: Exception) -> Exception:
    """Returns the InputError of a worker, however Beam hands it over, or the error."""
    text = f"{type(error).__name__}: {error}"
    found = re.findall(r"InputError: (.*?)(?: \[while running .*)?$", text, re.M)
    return InputError(found[-1]) if found else error
