"""Preparing a table on an engine of Apache Beam: the files of ``convert.prepare``.

Large files of the input are divided into parts, each of which is one task.  There are
four pipelines: the first finds where quotations of a large text end, so that its parts
begin with rows.  The second checks every part and counts its rows, which decides which
rows each output file holds.  The third converts every part to one piece for each of
these files, and the fourth joins the pieces.

    OUT.unfinished/divided/           whether each range of text ends in a quotation
    OUT.unfinished/counts/            counts of every checked part; sensitive
    OUT.unfinished/pieces/            converted rows; sensitive
    OUT.unfinished/progress/          bytes read so far
    OUT.unfinished/records/           records of the finished output files
    OUT.unfinished/data/              becomes OUT; the rest as in ``unfinished``

Workers and this process must reach input and output under the same paths.

Formal guarantees:
  - The files are those of ``convert.prepare``, byte for byte.
  - A file appears complete or not at all, also after a loss of power.
  - Those of ``unfinished``.
  - Every row is read once to be checked, and once to be converted; text of more than
    one part is scanned once before.

One worker reads all of a file that ``file_parts`` does not divide, such as compressed
text.

Public: options, paths, sizes.  Sensitive: counts, and everything read and written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions

from accounting.validation import InputError
from pipelines.batches.manifest import pretty_json, read_json
from pipelines.files.sink import Sink
from pipelines.files.storage import flush_to_disk, new_file, write_atomically
from pipelines.files.threads import num_cores
from pipelines.files.unfinished import Unfinished, unfinished_folder
from pipelines.job.engine_tasks import run_on_engine
from pipelines.tables.convert import (
    SPLITS,
    ConvertOptions,
    Format,
    ParsedBlock,
    PrepareSummary,
    Progress,
    Reader,
    RowCount,
    refuse_bad_rows,
    rows_of_splits,
    split_parts,
    summarize,
)
from pipelines.tables.job.division import DIVIDED, Division
from pipelines.tables.prepared_files import FileRecord, SplitWriter, write_record
from pipelines.tables.raw_files import InputFile, changed, list_files

_COUNTS, _RECORDS, _DATA = "counts", "records", "data"
_PIECES, _PROGRESS = "pieces", "progress"

#: Phases, in order.
DIVIDE, CHECK, CONVERT, WRITE = PHASES = ("divide", "check", "convert", "write")

#: Approximate bytes of a part of a large file.
_PART_BYTES = 128 << 20

#: Seconds between two reports of a worker, and of this process.
_BETWEEN_TOLD = _BETWEEN_COUNTS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """One output file.

    Attributes:
      split: Index of its split.
      number: Number of the file in the split.
      first: Index of its first row in the split.
      last: Index after its last row.
    """

    split: int
    number: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """Path of the file below the output."""
        return f"{SPLITS[self.split]}/part-{self.number:05d}.parquet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """The description of a job that workers get.  Public.

    Attributes:
      files: Files of the input or parts of them, in order.
      options: How rows become files.
      work: Folder of the unfinished job.
    """

    files: tuple[InputFile, ...]
    options: ConvertOptions
    work: str

    def count_path(self, index: int) -> pathlib.Path:
        """Path of the count of an input file."""
        return pathlib.Path(self.work, _COUNTS, f"{index:07d}.json")

    def task_path(self, task: _Task) -> pathlib.Path:
        """Path of an output file."""
        return pathlib.Path(self.work, _DATA, task.name)

    def record_path(self, task: _Task) -> pathlib.Path:
        """Path of the record of an output file."""
        return pathlib.Path(self.work, _RECORDS, f"{task.name.replace('/', '-')}.json")

    def piece_path(self, task: _Task, index: int) -> pathlib.Path:
        """Path of the rows of an input file for an output file.

        Args:
          task: The output file.
          index: Index of the input file.
        """
        return pathlib.Path(self._pieces(task), f"{index:07d}.arrow")

    def _pieces(self, task: _Task) -> pathlib.Path:
        return pathlib.Path(self.work, _PIECES, task.name.replace("/", "-"))

    def converted_path(self, index: int) -> pathlib.Path:
        """Path of the completion marker of a converted input file."""
        return pathlib.Path(self.work, _PIECES, f"{index:07d}.done")

    def progress_path(self, phase: str, index: int) -> pathlib.Path:
        """Path of a worker's number of bytes read; arguments as for ``_Job.blocks``."""
        return pathlib.Path(self.work, _PROGRESS, f"{phase}-{index:07d}")

    def blocks(self, phase: str, index: int) -> Iterator[ParsedBlock]:
        """Yields the parsed blocks of an input file, each once.

        Args:
          phase: As in `Reader.parse`.
          index: Index of the input file.
        """
        tell = _Teller(self.progress_path(phase, index))
        reader = Reader(
            files=self.files[index : index + 1],
            format=self.options.open([self.files[index]]),
            num_threads=max(1, num_cores() // len(self.files)),
            on_progress=tell,
        )
        return (block for _, block in reader.parse(phase, check_only=phase == CHECK))

    @property
    def format(self) -> Format:
        """Format of the first file, with the schema and shares of all."""
        return self.options.open(self.files[:1])

    def check_file(self, index: int) -> None:
        """Counts the rows of an input file, unless it was done."""
        if self.count_path(index).exists():
            return
        count, file = RowCount(), self.files[index]
        first = self.options.open([file]).first_row
        for block in self.blocks(CHECK, index):
            count.add(file.shown, first, block)
            first += block.num_rows
        write_atomically(
            self.count_path(index), pretty_json(count.to_json()), mode=0o600
        )

    def read_counts(self) -> list[RowCount]:
        """Returns the counts of all input files."""
        counts, before = [], 0
        for index, file in enumerate(self.files):
            count = RowCount.from_json(read_json(self.count_path(index)))
            before = 0 if file.begins else before
            counts.append(count.after(before))
            before += count.num_rows
        return counts

    def convert_file(self, index: int) -> None:
        """Converts an input file to a piece of each output file, unless it was done."""
        if self.converted_path(index).exists():
            return
        counts, table = self.read_counts(), self.format
        sizes = rows_of_splits(sum_counts(counts), table.shares)
        before = sum_counts(counts[:index])
        places = list(_rows_of(before, sizes, table.shares))
        ends = _rows_of(sum_counts(counts[: index + 1]), sizes, table.shares)
        with _Pieces(self, index, table.schema, sizes) as pieces:
            blocks = self.blocks(CONVERT, index)
            for split, rows in split_parts(blocks, sizes, first=before.num_good):
                if places[split] + len(rows) > ends[split]:
                    raise changed()
                pieces.add(split, places[split], rows)
                places[split] += len(rows)
        write_atomically(self.converted_path(index), b"")

    def write_file(self, task: _Task) -> None:
        """Writes an output file from its pieces, unless it was done."""
        path = self.task_path(task)
        if path.exists():
            return
        temporary = pathlib.Path(self.work, f"part-{secrets.token_hex(8)}")
        schema, layout = self.format.schema, self.options.layout
        writer = SplitWriter(temporary, schema, **layout, first_file=task.number)
        try:
            for rows in self._rows_of(task):
                writer.add(rows)
            writer.close()
            (record,) = writer.files.values()
            data = pretty_json(dataclasses.asdict(record))
            write_atomically(self.record_path(task), data, mode=0o600)
            flush_to_disk(temporary / path.name)
            os.replace(temporary / path.name, path)
        finally:
            writer.abandon()
            shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(self._pieces(task), ignore_errors=True)

    def _rows_of(self, task: _Task) -> Iterator[pa.Table]:
        """Yields the rows of an output file, in order."""
        for path in sorted(self._pieces(task).glob("*.arrow")):
            with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as batches:
                for batch in batches:
                    yield pa.Table.from_batches([batch])


class _Pieces:
    """Writes the rows of an input file to one piece for each output file.

    A piece appears when it is complete and the context ends without an error.
    """

    def __init__(
        self, job: _Job, index: int, schema: pa.Schema, sizes: Sequence[int]
    ) -> None:
        self._job, self._index, self._schema = job, index, schema
        self._tasks = {
            (task.split, task.number): task for task in _tasks(sizes, job.options)
        }
        self._open: dict[int, _Piece] = {}  # unfinished pieces, by split

    def __enter__(self) -> _Pieces:
        return self

    def __exit__(self, *error: Any) -> None:
        with contextlib.ExitStack() as all_of_them:
            for piece in self._open.values():
                all_of_them.push(piece.files)
            if error[0] is not None:
                raise error[1]

    def add(self, split: int, place: int, rows: pa.Table) -> None:
        """Appends rows to the pieces of a split.

        Args:
          split: Index of the split.
          place: Index of the first row in its split.
          rows: The rows.
        """
        while len(rows):
            piece = self._piece(split, place)
            some = rows.slice(0, piece.task.last - place)
            piece.writer.write_table(some)
            rows, place = rows.slice(len(some)), place + len(some)

    def _piece(self, split: int, place: int) -> _Piece:
        task = self._tasks[split, place // _rows_per_file(self._job.options)]
        before = self._open.get(split)
        if before is None or before.task != task:
            if before is not None:
                before.files.close()
            self._open[split] = self._start(task)
        return self._open[split]

    def _start(self, task: _Task) -> _Piece:
        path = self._job.piece_path(task, self._index)
        path.parent.mkdir(exist_ok=True)
        files = contextlib.ExitStack()
        write = files.enter_context(new_file(path, mode=0o600))
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        writer = pa.ipc.new_stream(Sink(write), self._schema, options=options)
        return _Piece(task, files.enter_context(writer), files)


class _Piece(NamedTuple):
    """An unfinished piece; closing ``files`` finishes it."""

    task: _Task
    writer: Any
    files: contextlib.ExitStack


class _Teller:
    """Writes the number of bytes read to a file, now and then."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._last = path, time.monotonic()

    def __call__(self, phase: str, done: int, total: int) -> None:
        del phase, total
        if time.monotonic() - self._last >= _BETWEEN_TOLD:
            self._path.write_text(str(done))
            self._last = time.monotonic()


def _rows_of(
    count: RowCount, sizes: Sequence[int], shares: Sequence[int] | None
) -> tuple[int, ...]:
    """Returns the number of counted rows, the first of the input, in each split."""
    if shares is None:
        return tuple(int(number) for number in count.of_splits)
    bounds = np.cumsum([0, *sizes])
    return tuple(
        int(np.clip(count.num_good - first, 0, last - first))
        for first, last in itertools.pairwise(bounds)
    )


def _rows_per_file(options: ConvertOptions) -> int:
    return options.row_group_rows * options.row_groups_per_file


def sum_counts(counts: Sequence[RowCount]) -> RowCount:
    """Returns the sum of counts."""
    total = RowCount()
    for count in counts:
        total.merge(count)
    return total


def _tasks(sizes: Sequence[int], options: ConvertOptions) -> list[_Task]:
    """Returns the output files, at least one per split."""
    per_file = _rows_per_file(options)
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
    *,
    on_progress: Progress = lambda *_: None,
    say: Callable[[str], None] = lambda line: None,
) -> PrepareSummary:
    """Prepares a table, as ``convert.prepare`` does, on an engine of Beam.

    Args:
      pattern: A file, a folder or a glob, which every worker reaches.
      out: New or empty folder, on a file system that every worker mounts; the same one
        resumes a killed job.
      options: Format of the table, and what to write.
      pipeline_options: Beam's options: the runner and its settings.
      on_progress: Called with a phase of ``PHASES``, the amount done, and in all: bytes
        of the input, or rows when writing.
      say: Called with a line about a large file that is not divided.

    Raises:
      InputError: as in ``convert.prepare``, or another job is unfinished there.
    """
    files = tuple(list_files(pattern, partitions=options.partitions))
    table = options.open(files)
    with unfinished_folder(out) as folder:
        done = _begin_or_continue(folder, files, options)
        if done is None:
            engine = functools.partial(run_on_engine, pipeline_options)
            job = _divided(folder, files, options, engine, on_progress, say)
            total = _checked(folder, job, engine, on_progress)
            records = _write(job, total, engine, on_progress)
            write_record(folder.data, table.schema, options.settings, records)
            sizes = rows_of_splits(total, table.shares)
            written = sum(record.size for record in records.values())
            done = dataclasses.asdict(summarize(files, table, total, sizes, written))
        folder.finish(done)
        return PrepareSummary.from_json(done)


def _begin_or_continue(
    folder: Unfinished, files: Sequence[InputFile], options: ConvertOptions
) -> dict[str, Any] | None:
    """Makes the folders of a job; returns its summary if only the clean-up is left."""
    job = {
        "files": [dataclasses.asdict(file) for file in files],
        "options": repr(options),
        "part_bytes": _PART_BYTES,
    }
    done = folder.begin_or_continue(job, "input, schema or options")
    if done is None:
        for name in (DIVIDED, _COUNTS, _PIECES, _PROGRESS, _RECORDS):
            (folder.work / name).mkdir(exist_ok=True)
        for split in SPLITS:
            (folder.data / split).mkdir(exist_ok=True)
    return done


#: Calls a task with every item, on an engine.
_Engine = Callable[[Callable[[Any], None], Sequence[Any]], None]


def _divided(
    folder: Unfinished,
    files: Sequence[InputFile],
    options: ConvertOptions,
    engine: _Engine,
    on_progress: Progress,
    say: Callable[[str], None],
) -> _Job:
    """Divides large files, and returns the job on their parts."""
    table = options.open(files)
    ranges = [table.ranges(file, _PART_BYTES) for file in files]
    for file, (first, *_) in zip(files, ranges, strict=True):
        if first == file and file.size > 2 * _PART_BYTES:
            say(
                f"one worker reads all of {file.shown}: it is packed, or not to be "
                "divided for another reason; plain CSV, and Parquet in row groups, are"
            )
    work = str(folder.work)
    division = Division(
        ranges=tuple(itertools.chain(*ranges)), options=options, work=work
    )
    with _watching(on_progress, DIVIDE, division.looked_at):
        if unknown := division.unknown:
            engine(division.look, unknown)
    return _Job(files=division.parts(), options=options, work=work)


def _checked(
    folder: Unfinished, job: _Job, engine: _Engine, on_progress: Progress
) -> RowCount:
    """Checks and counts all rows; leaves nothing of a job whose rows are refused."""
    with _watching(
        on_progress, CHECK, lambda: _read_so_far(job, CHECK, job.count_path)
    ):
        engine(job.check_file, range(len(job.files)))
    total = sum_counts(job.read_counts())
    try:
        refuse_bad_rows(total, job.options)
        rows_of_splits(total, job.format.shares)
    except InputError:
        folder.give_up()
        raise
    return total


def _write(
    job: _Job, total: RowCount, engine: _Engine, on_progress: Progress
) -> dict[str, FileRecord]:
    """Writes all output files, and returns their records."""
    with _watching(
        on_progress, CONVERT, lambda: _read_so_far(job, CONVERT, job.converted_path)
    ):
        engine(job.convert_file, range(len(job.files)))
    tasks = _tasks(rows_of_splits(total, job.format.shares), job.options)
    with _watching(on_progress, WRITE, lambda: _written_so_far(job, tasks)):
        engine(job.write_file, tasks)
    records = {
        task.name: FileRecord(**read_json(job.record_path(task))) for task in tasks
    }
    if any(records[task.name].num_rows != task.last - task.first for task in tasks):
        raise changed()
    return records


def _read_so_far(
    job: _Job, phase: str, path_when_done: Callable[[int], pathlib.Path]
) -> tuple[int, int]:
    """Returns the bytes of the input that a phase has read, and in all."""
    done = 0
    for index, file in enumerate(job.files):
        if path_when_done(index).exists():
            done += file.num_bytes
            continue
        with contextlib.suppress(OSError, ValueError):  # not written, or only half
            done += int(job.progress_path(phase, index).read_text())
    return done, sum(file.num_bytes for file in job.files)


def _written_so_far(job: _Job, tasks: Sequence[_Task]) -> tuple[int, int]:
    """Returns the rows of finished output files, and in all."""
    done = sum(t.last - t.first for t in tasks if job.task_path(t).exists())
    return done, sum(task.last - task.first for task in tasks)


@contextlib.contextmanager
def _watching(
    on_progress: Progress, phase: str, count: Callable[[], tuple[int, int]]
) -> Iterator[None]:
    """Reports the progress of workers, by the files in the folder of the job."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_BETWEEN_COUNTS):
            on_progress(phase, *count())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    on_progress(phase, *count())
