"""Raw tables to numeric Parquet files, by steps of tasks and in bounded memory.

    OUT/train/part-00000.parquet ...
    OUT/val/part-00000.parquet ...
    OUT/test/part-00000.parquet ...
    OUT/_prepared.json                 see ``prepared_files``

Large files of the input are divided into ranges, each of which is one task.  There are
two steps.  The first converts every range to a piece of good rows, and counts
them, which decides the rows of each output file: so a split by shares is exact without
holding the data.  The second writes each file from the pieces that have its rows; these
are not compressed but mapped to memory, which costs less than reading text twice.

    OUT.unfinished/counts/     counts of every converted range; sensitive
    OUT.unfinished/pieces/     converted rows; sensitive
    OUT.unfinished/data/       becomes OUT; the rest as in ``unfinished``

Formal guarantees:
  - Rows keep their order within a split.  Splits by shares are contiguous, and the end
    of each is ``round_half_up(rows * cumulative share)``.
  - Equal input and options give the same bytes, on threads or on an engine, however
    many; and equal columns, however the rows are cut into files and blocks.
  - A file appears complete or not at all, also after a loss of power.
  - Those of ``unfinished`` and ``tasks``.  A table that is refused leaves nothing.
  - A file of the input that changes after it was listed, until it was converted, is
    refused.
  - Every row is read once.
  - No message depends on what a row holds, unless it is malformed, but for sizes of the
    input; of a table with users, none says how many rows there are.

One task reads all of a file that ``file_parts`` does not divide, such as compressed
text.

Public: options, schema, paths, sizes.  Sensitive: counts, and everything read and
written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError
from pipelines.core.threads import in_order, num_cores
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.sink import Sink
from pipelines.files.storage import new_file, write_atomically
from pipelines.files.unfinished import Unfinished, unfinished_folder
from pipelines.inputs.source_table import read_from
from pipelines.job.runtime.plain_errors import StorageError
from pipelines.job.runtime.tasks import Runtime, SoFar, Step
from pipelines.tables.convert import (
    SPLITS,
    ConvertOptions,
    Format,
    ParsedBlock,
    PrepareSummary,
    RowCount,
    refuse_bad_rows,
    rows_of_splits,
)
from pipelines.tables.prepared_files import (
    new_table,
    row_groups,
    write_record,
)
from pipelines.tables.raw_files import InputFile, changed, check_unchanged, list_files

_COUNTS, _PIECES, _DATA = "counts", "pieces", "data"

#: Names of the steps, in order.
CONVERT, WRITE = STEPS = ("convert", "write")

#: Approximate bytes of a part of a large file.
_PART_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OutputFile:
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

    @property
    def num_rows(self) -> int:
        """Number of its rows."""
        return self.last - self.first


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """The description of a job that workers get.  Public.

    Attributes:
      files: Files of the input or parts of them, in order.
      options: How rows become files.
      work: Folder of the unfinished job.
      num_threads: Number of threads for all files; None for the cores of a worker.
    """

    files: tuple[InputFile, ...]
    options: ConvertOptions
    work: str
    num_threads: int | None

    def count_path(self, index: int) -> pathlib.Path:
        """Path of the count of an input file."""
        return pathlib.Path(self.work, _COUNTS, f"{index:07d}.json")

    def piece_path(self, stream: int, index: int) -> pathlib.Path:
        """Path of the good rows of an input file.

        Args:
          stream: Index of their split; 0 for all rows if shares decide.
          index: Index of the input file.
        """
        return pathlib.Path(self.work, _PIECES, f"{stream}-{index:07d}.arrow")

    def file_path(self, file: _OutputFile) -> pathlib.Path:
        """Path of an output file."""
        return pathlib.Path(self.work, _DATA, file.name)

    def step(
        self,
        name: str,
        task: Callable[[int], None],
        output: Callable[[int], pathlib.Path],
    ) -> Step:
        """Returns a step whose items are the input files.

        Args:
          name: Name of the step.
          task: Method of this job.
          output: Method of this job.
        """
        return Step(
            name=name,
            task=task,
            items=range(len(self.files)),
            output=output,
            size=lambda index: self.files[index].num_bytes,
        )

    def _blocks(self, index: int, output: pathlib.Path) -> Iterator[ParsedBlock]:
        """Yields the parsed blocks of an input file, in order."""
        file, so_far = self.files[index], SoFar(output)
        table = self.options.open([file])
        threads = -(-(self.num_threads or num_cores()) // len(self.files))

        def parse(block: tuple[Any, int]) -> tuple[ParsedBlock, int]:
            return table.parse(block[0]), block[1]

        with ThreadPoolExecutor(threads) as pool:
            for parsed, done in in_order(pool, parse, table.blocks(file), 2 * threads):
                so_far(done)
                yield parsed

    @property
    def format(self) -> Format:
        """Format of the first file, with the schema and shares of all."""
        return self.options.open(self.files[:1])

    def convert_file(self, index: int) -> None:
        """Writes the good rows of an input file to its pieces, and then their count."""
        count, file, path = RowCount(), self.files[index], self.count_path(index)
        first = self.options.open([file]).first_row
        with self._new_pieces(index) as pieces:
            for block in self._blocks(index, path):
                count.add(file.shown, first, block)
                first += block.num_rows
                for piece, rows in zip(pieces, block.by_split(), strict=True):
                    piece.write_table(rows)
            check_unchanged(file, os.stat(file.path))
        write_atomically(path, pretty_json(count.to_json()), mode=0o600)

    @contextlib.contextmanager
    def _new_pieces(self, index: int) -> Iterator[list[Any]]:
        """Yields the writers of the pieces of an input file."""
        table = self.format
        with contextlib.ExitStack() as files:
            pieces = []
            for stream in range(len(SPLITS) if table.shares is None else 1):
                new = new_file(self.piece_path(stream, index), mode=0o600)
                sink = Sink(files.enter_context(new))
                piece = pa.ipc.new_stream(sink, table.schema)
                pieces.append(files.enter_context(piece))
            yield pieces

    def read_counts(self) -> list[RowCount]:
        """Returns the counts of all input files."""
        counts, before = [], 0
        for index, file in enumerate(self.files):
            count = RowCount.from_json(read_json(self.count_path(index)))
            before = 0 if file.begins else before
            counts.append(count.after(before))
            before += count.num_rows
        return counts

    def write_file(self, file: _OutputFile) -> None:
        """Writes an output file from the pieces."""
        with new_table(self.file_path(file), self.format.schema) as writer:
            for rows in row_groups(self._rows(file), self.options.row_group_rows):
                writer.write_table(rows, row_group_size=len(rows))

    def _rows(self, file: _OutputFile) -> Iterator[pa.Table]:
        """Yields the rows of an output file, in order."""
        counts, shares = self.read_counts(), self.format.shares
        if shares is None:
            stream, before = file.split, 0
            lengths = [int(count.of_splits[stream]) for count in counts]
        else:
            sizes = rows_of_splits(sum_counts(counts), shares)
            stream, before = 0, sum(sizes[: file.split])
            lengths = [count.num_good for count in counts]
        first, last = before + file.first, before + file.last
        for index, length in enumerate(lengths):
            if first < length and last > 0:
                yield from _rows_of(self.piece_path(stream, index), first, last)
            first, last = first - length, last - length


def _rows_of(path: pathlib.Path, first: int, last: int) -> Iterator[pa.Table]:
    """Yields the rows of a piece from ``first`` until ``last``; both may be outside."""
    with pa.memory_map(str(path)) as piece, pa.ipc.open_stream(piece) as batches:
        for batch in batches:
            start, end = max(first, 0), min(last, len(batch))
            if start < end:
                yield pa.Table.from_batches([batch.slice(start, end - start)])
            first, last = first - len(batch), last - len(batch)


def sum_counts(counts: Sequence[RowCount]) -> RowCount:
    """Returns the sum of counts."""
    total = RowCount()
    for count in counts:
        total.merge(count)
    return total


def _output_files(sizes: Sequence[int], options: ConvertOptions) -> list[_OutputFile]:
    """Returns the output files, at least one per split."""
    per_file = options.row_group_rows * options.row_groups_per_file
    return [
        _OutputFile(
            split=split,
            number=number,
            first=number * per_file,
            last=min(size, (number + 1) * per_file),
        )
        for split, size in enumerate(sizes)
        for number in range(max(1, -(-size // per_file)))
    ]


def prepare(
    pattern: str,
    out: str | os.PathLike[str],
    options: ConvertOptions,
    *,
    runtime: Runtime | None = None,
) -> PrepareSummary:
    """Turns a raw table into Parquet, with the guarantees of this module.

    Args:
      pattern: A file, a folder or a glob.
      out: New or empty folder; the same one resumes a killed job.
      options: Format of the table, and what to write.
      runtime: Where the tasks of ``STEPS`` run; workers of an engine must reach input
        and output under the same paths.  By default threads of this process.  Progress
        is in bytes of the input, or in rows when writing.

    Raises:
      InputError: as ``list_files``, ``unfinished_folder`` and ``options.open``;
        malformed rows; no rows for training; another job is unfinished there.
    """
    # How long all rows are together tells how long one is.
    runtime = (runtime or Runtime()).in_percent()
    files = tuple(list_files(pattern, partitions=options.partitions))
    table = options.open(files)
    with unfinished_folder(out) as folder:
        done = _begin_or_continue(folder, files, options)
        if done is None:
            with _nothing_of_refused_rows(folder, runtime):
                job = _divided(folder, files, options, runtime)
                total = _converted(folder, job, runtime)
            _write(job, total, runtime)
            read = read_from(file.path for file in files)
            settings = {**options.settings, **read}
            write_record(folder.data, table.schema, settings)
            sizes = rows_of_splits(total, table.shares)
            summary = PrepareSummary(
                num_files=len(files),
                num_rows=dict(zip(SPLITS, sizes, strict=True)),
                num_bad_lines=total.num_bad,
                bad_lines=tuple(total.bad_lines),
                left_out=tuple(table.left_out),
                has_users=table.has_users,
            )
            done = dataclasses.asdict(summary)
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
        for name in (_COUNTS, _PIECES):
            (folder.work / name).mkdir(exist_ok=True)
        for split in SPLITS:
            (folder.data / split).mkdir(exist_ok=True)
    return done


@contextlib.contextmanager
def _nothing_of_refused_rows(folder: Unfinished, runtime: Runtime) -> Iterator[None]:
    """Leaves nothing of a table that is refused."""
    try:
        yield
    except StorageError:
        raise  # the job can go on
    except InputError:
        if runtime.run_tasks is None:  # else it may be of an engine that failed
            folder.give_up()
        raise


def _divided(
    folder: Unfinished,
    files: Sequence[InputFile],
    options: ConvertOptions,
    runtime: Runtime,
) -> _Job:
    """Divides large files, and returns the job on their ranges."""
    table = options.open(files)
    files = [file for file in files if file.size]  # alone an empty one has no columns
    ranges = [table.ranges(file, _PART_BYTES) for file in files]
    return _Job(
        files=tuple(itertools.chain(*ranges)),
        options=options,
        work=str(folder.work),
        num_threads=runtime.num_threads,
    )


def _converted(folder: Unfinished, job: _Job, runtime: Runtime) -> RowCount:
    """Converts and counts all rows; leaves nothing of a job whose rows are refused."""
    runtime.run(job.step(CONVERT, job.convert_file, job.count_path))
    total = sum_counts(job.read_counts())
    try:
        table = job.format
        refuse_bad_rows(total, job.options, has_users=table.has_users)
        rows_of_splits(total, table.shares)
    except InputError:
        folder.give_up()
        raise
    return total


def _write(job: _Job, total: RowCount, runtime: Runtime) -> None:
    """Writes all output files."""
    files = _output_files(rows_of_splits(total, job.format.shares), job.options)
    runtime.run(
        Step(
            name=WRITE,
            task=job.write_file,
            items=files,
            output=job.file_path,
            size=lambda file: file.num_rows,
        )
    )
    for file in files:
        if pq.read_metadata(job.file_path(file)).num_rows != file.num_rows:
            raise changed()
