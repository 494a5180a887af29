"""Raw tables to numeric Parquet files, in one pass and in bounded memory.

    OUT/train/part-00000.parquet ...
    OUT/val/part-00000.parquet ...
    OUT/test/part-00000.parquet ...
    OUT/_prepared.json                 see ``prepared_files``

Consecutive files of the input are one task, on threads or on an engine, which writes
their rows to pieces of each part.  The pieces become the files of OUT.  In a split by
shares of all rows, a part may end within a piece, whose rows are then written again.

Rows keep their order within a part.  A split by fraction ends each part at
``round_half_up(rows * cumulative share)``.  OUT appears complete or not at all; nothing
is left of a table that is refused.  A file of the input that changes between its
listing and its reading is refused.

With users, OUT/train holds at most k rows of each user, the note about it, and no id
(`pipelines.tables.bounding`).  Messages may tell sizes of the input, but depend on what
a row holds only if it is malformed; for a table with users, no message says how many
rows there are.

Public: options, schema, paths.  Sensitive: counts, and everything read and written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import shutil
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError, check_choice, check_int
from pipelines.core.batches.manifest import Column
from pipelines.core.hashing import hash_ids
from pipelines.core.threads import num_cores
from pipelines.core.users import Bounded, UserBound
from pipelines.files.key_sources import read_key_file, read_or_create_key_file
from pipelines.files.outputs import staged_folder
from pipelines.files.storage import StrPath, write_atomically
from pipelines.inputs.parquet_blocks import (
    description_of,
    numeric_columns,
    table_columns,
)
from pipelines.inputs.source_table import read_from
from pipelines.job.runtime import TASKS, Runtime, advance, listen
from pipelines.tables.bounding import USER, bound_pieces, bounded_schema
from pipelines.tables.kinds import Output
from pipelines.tables.prepared_files import (
    DEFAULT_ROW_GROUP_ROWS,
    ROW_GROUP_BYTES,
    ROW_GROUPS_PER_FILE,
    Pieces,
    arrow_table,
    prepared_schema,
    write_record,
)
from pipelines.tables.reading import Malformed, Reader, check_columns
from pipelines.tables.schema import FRACTION, SPLITS, Schema
from pipelines.tables.table_files import PARQUET, TableFile, list_table

ON_BAD_ROW = ("fail", "skip")
#: Bytes of the files of one task.
_TASK_BYTES = 256 << 20
#: Memory of DuckDB for each thread: half a gigabyte holds a block of a wide table.
_THREAD_BYTES = 512 << 20

_COUNTS = TypeAdapter(Malformed)
#: Folder of an unfinished job, in that of its output.
WORK = ".work"

#: Names of the steps, in order; users are chosen only where there are some.
CONVERT, CHOOSE = STEPS = ("convert", "choose rows of users")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How a table becomes Parquet.  All fields are public.

    Attributes:
      schema: Schema of the table.
      on_bad_row: "fail" refuses an input with a malformed row, "skip" omits the row.
      row_group_rows: Rows per row group, except for the last of a part.
      numbers: Columns that stay as they are, of a table without a schema; see
        ``of_numbers``.

    Raises:
      InputError: a value out of range.
    """

    schema: Schema
    on_bad_row: str = "fail"
    row_group_rows: int = DEFAULT_ROW_GROUP_ROWS
    numbers: tuple[Column, ...] = ()

    def __post_init__(self) -> None:
        check_choice("--on-bad-row", self.on_bad_row, ON_BAD_ROW)
        check_int("--row-group-rows", self.row_group_rows, at_least=1)

    @property
    def rows_of_group(self) -> int:
        """Rows of a row group that a worker can hold."""
        columns: list[Output | Column] = [*self.schema.outputs, *self.numbers]
        row_bytes = sum(
            np.dtype(each.dtype).itemsize * math.prod(each.shape) for each in columns
        )
        return max(1, min(self.row_group_rows, ROW_GROUP_BYTES // row_bytes))

    @property
    def rows_schema(self) -> pa.Schema:
        """Schema of the rows, without numbers of users."""
        return prepared_schema(self.schema, self.numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserOptions:
    """How users are bounded.  All fields are public, but for what the file holds.

    Attributes:
      settings: Which rows are kept for training.
      bound_held_out: Whether held-out rows are bounded, too.
      key_file: File of the key that chooses rows; made if missing.  None for a
        temporary key.
      memory_limit: Memory of the choice, in bytes.
    """

    settings: UserBound
    bound_held_out: bool = False
    key_file: str | os.PathLike[str] | None = None
    memory_limit: int = 2 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareSummary:
    """What ``prepare`` read, wrote and left out; with users, numbers are sensitive."""

    num_files: int
    num_rows: dict[str, int]
    num_bad_lines: int
    bad_lines: tuple[str, ...]
    left_out: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """The description of a job that workers get.  Public.

    Attributes:
      tasks: For each task, its files with their places in the table.
      options: How rows become files.
      work: Folder of the pieces.
      num_threads: Number of threads of a task.
      key_file: File of the key that makes numbers of ids; None to keep no numbers.
    """

    tasks: Sequence[Sequence[tuple[int, TableFile]]]
    options: TableOptions
    work: str
    num_threads: int
    key_file: str | None = None

    def path(self, *parts: str) -> pathlib.Path:
        """Returns a path in the folder of the job."""
        return pathlib.Path(self.work, *parts)

    def pieces(self, part: str) -> list[pathlib.Path]:
        """Returns the pieces of a part, in order."""
        return sorted(self.path("pieces", part).glob("*.parquet"))

    @property
    def schema(self) -> pa.Schema:
        """Schema of the pieces."""
        rows, user = self.options.rows_schema, pa.field(USER, pa.uint64(), False)
        return rows if self.key_file is None else rows.append(user)

    @property
    def is_by_row(self) -> bool:
        """Whether each row has a part of its own; else shares of all rows decide."""
        return self.options.schema.split.by != FRACTION

    def pieces_in(
        self, folder: pathlib.Path, prefix: str, schema: pa.Schema, **how: Any
    ) -> Pieces:
        """Returns a writer of pieces; arguments as for `Pieces`."""
        num_groups = ROW_GROUPS_PER_FILE
        if not self.is_by_row:  # where a part ends within a piece it is written again
            size = sum(file.size for task in self.tasks for _, file in task)
            num_groups = min(num_groups, 1 + (size >> 30))
        num_rows = self.options.rows_of_group
        return Pieces(folder, prefix, schema, num_rows, num_groups, **how)

    def convert(self, task: int) -> None:
        """Writes the rows of the files of a task to pieces, and then their count."""
        total = Malformed()
        schema, key = self.schema, self.key_file and read_key_file(self.key_file)
        with contextlib.ExitStack() as opened:
            pieces = [
                opened.enter_context(
                    self.pieces_in(self.path("pieces", part), f"{task:05d}-", schema)
                )
                for part in (SPLITS if self.is_by_row else SPLITS[:1])
            ]
            for ordinal, file in self.tasks[task]:
                reader = Reader(
                    file,
                    self.options.schema,
                    ordinal=ordinal,
                    carried=[each.name for each in self.options.numbers],
                    num_threads=self.num_threads,
                    memory_limit=self.num_threads * _THREAD_BYTES,
                )
                done = 0
                for rows in reader:
                    found: dict[str, Any] = dict(rows.arrays)
                    if numbers := self.options.numbers:  # lists lost their sizes
                        types = file.arrow_schema()
                        types = pa.schema([types.field(each.name) for each in numbers])
                        found |= table_columns(rows.carried.cast(types), numbers)
                    if key:
                        found[USER] = hash_ids(rows.users, key)
                    table = arrow_table([found[name] for name in schema.names], schema)
                    for number, writer in enumerate(pieces):
                        if rows.splits is None:
                            writer.write(table)
                        else:
                            writer.write(table.filter(pa.array(rows.splits == number)))
                    advance(TASKS, rows.bytes_read - done)
                    done = rows.bytes_read
                advance(TASKS, file.size - done)
                total.merge(reader.malformed)
        path = self.path("counts", f"{task:05d}.json")
        write_atomically(path, _COUNTS.dump_json(total), mode=0o600)


def open_table(
    data: StrPath, options: TableOptions
) -> tuple[list[TableFile], list[str]]:
    """Returns the files of a table, and the columns that are left out.

    Args:
      data: A file, a folder or a glob.
      options: How it becomes Parquet.

    Raises:
      InputError: there is no table, or its columns do not fit the schema.
    """
    schema = options.schema
    files = list_table(data)
    known = {*schema.columns, *schema.needed, *(c.name for c in options.numbers)}
    left_out: dict[str, None] = {}
    for file in files:
        if file.format == PARQUET and Bounded.of(
            description_of(file.arrow_schema(), file.shown)
        ):
            raise InputError(
                f"Expected rows of --input as they came; those of {file.shown} were "
                "prepared, and their users are bounded already."
            )
        found = check_columns(file, schema)
        if options.numbers and _numbers(file, schema.user) != options.numbers:
            raise InputError(
                f"Expected the columns of {file.shown} to equal those of the first "
                "file."
            )
        left_out.update(dict.fromkeys(name for name in found if name not in known))
    return files, list(left_out)


def of_numbers(data: StrPath, user: str, **options: Any) -> TableOptions:
    """Returns how a table without a schema becomes Parquet: all rows, without ids.

    Args:
      data: Parquet: a file, a folder or a glob.
      user: Column of the ids of users; all others are numbers, and stay.
      **options: Other fields of `TableOptions`.

    Raises:
      InputError: the input is no table of numbers.
    """
    file = list_table(data)[0]
    if file.format != PARQUET:
        raise InputError(
            f"Expected --schema to read {file.shown}, which is text: only Parquet of "
            "numbers needs none."
        )
    schema = Schema.of_user(user)
    check_columns(file, schema)
    return TableOptions(schema=schema, numbers=_numbers(file, user), **options)


def _numbers(file: TableFile, user: str) -> tuple[Column, ...]:
    fields = file.arrow_schema()
    return numeric_columns(fields.remove(fields.get_field_index(user)))


def prepare(
    data: StrPath,
    out: str | os.PathLike[str],
    options: TableOptions,
    *,
    users: UserOptions | None = None,
    runtime: Runtime | None = None,
) -> PrepareSummary:
    """Turns a raw table into Parquet, with the guarantees of this module.

    Args:
      data: A file, a folder or a glob.
      out: New or empty folder.
      options: Schema of the table, and what to write.
      users: How users are bounded, if the schema has a column of kind user.
      runtime: Where the tasks of ``STEPS`` run; workers of an engine must reach input
        and output under the same paths.  By default threads of this process.

    Raises:
      InputError: as for ``open_table``, or rows are malformed, or none are for
        training.
    """
    schema, runtime = options.schema, runtime or Runtime()
    if users is not None:
        # Refuses names, and records that are too large, before any work.
        bounded_schema(options.rows_schema, users.settings, bytes(32), "")
    elif schema.user:
        raise InputError(
            f"Expected column {schema.user} of kind user to be bounded: `dpsgd prepare "
            "--max-examples-per-user K --num-examples N`."
        )
    files, left_out = open_table(data, options)
    with staged_folder(out) as folder:
        key_file = None
        if users is not None:
            key_file = os.path.abspath(users.key_file or folder / WORK / "private.key")
            pathlib.Path(key_file).parent.mkdir(mode=0o700, exist_ok=True)
            read_or_create_key_file(key_file)
        job = _converted(folder, files, options, runtime, key_file)
        total = Malformed()
        for path in sorted(job.path("counts").iterdir()):
            total.merge(_COUNTS.validate_json(path.read_bytes()))
        total.refuse(schema, skip=options.on_bad_row == "skip")
        read = read_from(file.path for file in files)
        sizes = _write(job, folder, total.num_good, users, str(read), runtime)
        shutil.rmtree(job.work)
        told = {} if users is None else dataclasses.asdict(users.settings)
        if users is not None and users.bound_held_out:
            told["bound_held_out"] = True
        how = {n: getattr(options, n) for n in ("row_group_rows", "on_bad_row")}
        write_record(folder, options.rows_schema, {**how, **told, **read})
    return PrepareSummary(
        num_files=len(files),
        num_rows=dict(zip(SPLITS, sizes, strict=True)),
        num_bad_lines=total.num_bad,
        bad_lines=tuple(total.told()),
        left_out=tuple(left_out),
    )


def _converted(
    folder: pathlib.Path,
    files: Sequence[TableFile],
    options: TableOptions,
    runtime: Runtime,
    key_file: str | None,
) -> _Job:
    """Converts and counts all rows."""
    tasks = list(_tasks(files))
    work = folder / WORK
    for name in ("counts", "choice", *(f"pieces/{part}" for part in SPLITS)):
        (work / name).mkdir(parents=True, mode=0o700, exist_ok=True)
    threads = runtime.num_threads or num_cores()
    job = _Job(
        tasks=tasks,
        options=options,
        work=str(work),
        num_threads=max(1, threads // len(tasks)),
        key_file=key_file,
    )
    # In percent: sizes of tables are not public.
    size, done, lock = sum(file.size for file in files), 0, threading.Lock()

    def tell(_: str, amount: int) -> None:
        nonlocal done
        with lock:
            done += amount
            runtime.on_progress(CONVERT, 100 * done // size, 100)

    with listen(tell):
        runtime.run(job.convert, range(len(tasks)))
    runtime.on_progress(CONVERT, 100, 100)
    return job


def _tasks(files: Sequence[TableFile]) -> Iterator[list[tuple[int, TableFile]]]:
    """Yields consecutive files, with their places, that one task reads."""
    waiting: list[tuple[int, TableFile]] = []
    for place, file in enumerate(files):
        waiting.append((place, file))
        if sum(each.size for _, each in waiting) >= _TASK_BYTES:
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def split_counts(num_rows: int, split: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of rows per part: differences of half-up rounded boundaries.

    Args:
      num_rows: Number of rows, at least 0.
      split: Shares in any unit.

    Example:
      >>> split_counts(1999, (80, 10, 10))
      (1599, 200, 200)
    """
    total, shares, bounds = sum(split), 0, [0]
    for share in split:
        shares += share
        bounds.append((2 * num_rows * shares + total) // (2 * total))
    return tuple(after - before for before, after in itertools.pairwise(bounds))


#: A piece, and the first and the last row of it.
_Range = tuple[pathlib.Path, int, int]


def _ranges(job: _Job, num_rows: int) -> list[list[_Range]]:
    """Returns what each part is made of."""
    found = [
        [(each, 0, pq.read_metadata(each).num_rows) for each in job.pieces(part)]
        for part in SPLITS
    ]
    if job.is_by_row:
        return found
    counts = split_counts(num_rows, job.options.schema.split.shares)
    starts, before = [0, *itertools.accumulate(counts)], 0
    parts: list[list[_Range]] = [[] for _ in SPLITS]
    for piece, _, size in found[0]:
        for part, (start, end) in zip(parts, itertools.pairwise(starts), strict=True):
            first, last = max(start - before, 0), min(end - before, size)
            if first < last:
                part.append((piece, first, last))
        before += size
    return parts


def _write(
    job: _Job,
    folder: pathlib.Path,
    num_rows: int,
    users: UserOptions | None,
    table: str,
    runtime: Runtime,
) -> list[int]:
    """Makes the files of each part of the pieces; returns the numbers of rows.

    Raises:
      InputError: there are no rows for training, or too few slots.
    """
    ranges = _ranges(job, num_rows)
    sizes = [sum(last - first for _, first, last in part) for part in ranges]
    if not sizes[0]:
        some = "" if job.options.schema.user else f" of the {sum(sizes)}"
        raise InputError(
            f"Expected rows for training; none{some} rows is in that part. Fix [split] "
            "of the schema."
        )
    for part, pieces in zip(SPLITS, ranges, strict=True):
        (folder / part).mkdir(mode=0o700)
        if users and (part == SPLITS[0] or users.bound_held_out):
            assert job.key_file is not None
            bound_pieces(
                job.pieces(part),
                folder / part,
                users.settings,
                read_key_file(job.key_file),
                job.options.rows_schema,
                table=fingerprint([table, part]),
                row_group_rows=job.options.rows_of_group,
                work=job.path("choice"),
                memory_limit=users.memory_limit,
                num_threads=runtime.num_threads or num_cores(),
                on_progress=functools.partial(runtime.on_progress, CHOOSE),
            )
        elif not pieces or job.key_file:  # numbers of users are left out
            _copy(job, pieces, folder / part, "part-")
        else:
            for number, (piece, first, last) in enumerate(pieces):
                if last - first < pq.read_metadata(piece).num_rows:
                    _copy(job, [(piece, first, last)], job.path(), f"{part}-{number}-")
                    piece = job.path(f"{part}-{number}-00000.parquet")
                os.rename(piece, folder / part / f"part-{number:05d}.parquet")
    return sizes


def _copy(
    job: _Job, pieces: Sequence[_Range], folder: pathlib.Path, prefix: str
) -> None:
    """Writes rows of pieces to files, at least to one."""
    schema, size = job.options.rows_schema, job.options.rows_of_group
    with job.pieces_in(folder, prefix, schema, or_empty=True) as out:
        for piece, first, last in pieces:
            before = 0
            for batch in pq.ParquetFile(piece).iter_batches(size):
                table = pa.Table.from_batches([batch]).select(schema.names)
                out.write(table[max(first - before, 0) : max(last - before, 0)])
                before += len(batch)
