"""At most k rows of each user, kept of numeric Parquet before batches are made of it.

Beside its numbers a row has a column ``USER``: the number of its user, by ``hash_ids``.
One DuckDB query over 24 bytes of each row (user, priority, place) chooses the rows that
are kept; then the rows are read in order, and the kept ones are written without USER.
Where `prepare` runs on an engine, workers convert the files and this choice runs once,
on the machine that started the job: there is no second implementation.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20 and
keyed BLAKE2b:
  - at most k and uniform choice: those of ``least_rows``, for all rows of a user in
    whatever pieces they are.
  - pure function: which rows are kept depends only on the key, the table and the
    settings; written files are the same bytes for any pieces, threads and memory.
  - the id is gone: files hold every column but USER, in the same order.
  - nothing is told: no message, call of progress or public field depends on the number
    of users, or on how many rows any of them has; but more kept rows than
    ``num_examples`` are refused, without their number.
  - bounded memory: the query spills into ``work``; a row group of a piece is held at a
    time.

Public: settings, names and types of columns.  Sensitive: rows, numbers of users, the
key, and everything in ``work``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError
from pipelines.core.keys import commitment, derive
from pipelines.core.users import (
    BOUNDED,
    KEY_LABEL,
    Bounded,
    UserBound,
    draw_priorities,
    least_rows,
)
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    description_of,
)
from pipelines.tables.prepared_files import (
    Pieces,
)
from pipelines.tables.table_files import connect

#: Last column of a piece: uint64 numbers of users.  Sensitive.
USER = "__user"

#: ``on_progress(done, 100)`` for each per cent, whatever the table.
OnProgress = Callable[[int, int], None]

_CHOSEN_OF = pa.schema(
    [("user_number", pa.uint64()), ("priority", pa.uint64()), ("place", pa.int64())]
)
#: Bytes that DuckDB needs for each of its threads, to sort any number of rows.
_THREAD_MEMORY = 128 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a job may use.  No file depends on it.

    Attributes:
      work: Private folder for what is spilled, and removed later.  Sensitive.
      memory_limit: Bytes; DuckDB has half of it, and 128 MiB of that for a thread.
      num_threads: Threads of DuckDB, at most.
    """

    work: pathlib.Path
    memory_limit: int
    num_threads: int


def bounded_schema(
    rows: pa.Schema, settings: UserBound, key: bytes, table: str
) -> pa.Schema:
    """Returns the schema of the files, with the note that users are bounded.

    Args:
      rows: Schema of the rows, without USER.
      settings: Which rows are kept.
      key: As for ``bound_pieces``.
      table: As for ``bound_pieces``.
    """
    chosen_by = commitment(key, KEY_LABEL) + commitment(key, KEY_LABEL, table)
    note = Bounded(**dataclasses.asdict(settings), key=chosen_by)
    told = {**description_of(rows, "--input"), BOUNDED: note.to_json()}
    return rows.with_metadata({DATASET_METADATA_KEY: json.dumps(told).encode()})


def bound_pieces(
    pieces: Sequence[pathlib.Path],
    folder: pathlib.Path,
    settings: UserBound,
    key: bytes,
    rows: pa.Schema,
    *,
    table: str,
    limits: Limits,
    row_group_rows: int,
    row_groups_per_file: int,
    on_progress: OnProgress = lambda *_: None,
) -> None:
    """Writes ``folder/part-00000.parquet``...: at most k rows of each user.

    Args:
      pieces: Parquet files in the order of the table, with the columns of ``rows`` and
        then USER.
      folder: Existing empty folder.
      settings: Which rows are kept.
      key: Secret, 32 bytes.
      rows: Schema of the rows, without USER.
      table: What tells the table and the split from others that this key bounds, such
        as a digest of its files: choices are independent of theirs.
      limits: What the job may use.
      row_group_rows: Rows of a row group, at most.
      row_groups_per_file: Row groups of a file, at most.
      on_progress: See ``OnProgress``.

    Raises:
      InputError: too few slots; or no room in memory or on the disk.
    """
    schema = bounded_schema(rows, settings, key, table)
    own_key = derive(key, "choice of rows", table)
    num_rows = sum(pq.read_metadata(piece).num_rows for piece in pieces)
    told = _Percent(on_progress, 2 * num_rows)  # they are read twice
    size, per_file = row_group_rows, row_groups_per_file
    with (
        Pieces(folder, "part-", schema, size, per_file, or_empty=True) as out,
        _choice(pieces, settings, own_key, limits, told) as choice,
    ):
        for some in _kept_rows(pieces, choice, told):
            out.write(some.select(rows.names))
    told.up_to(100)


class _Percent:
    """Calls ``on_progress`` once for each per cent, however many rows there are."""

    def __init__(self, on_progress: OnProgress, num_rows: int) -> None:
        self._num_rows, self._done, self._told = max(1, num_rows), 0, 0
        self._tell = on_progress

    def add(self, rows: int) -> None:
        self._done += rows
        self.up_to(100 * self._done // self._num_rows)

    def up_to(self, percent: int) -> None:
        while self._told < percent:
            self._told += 1
            self._tell(self._told, 100)


def _read(
    pieces: Iterable[pathlib.Path], names: Sequence[str] | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Yields each row group, and the place of its first row in the table."""
    first = 0
    for piece in pieces:
        with pq.ParquetFile(piece, page_checksum_verification=True) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=names)
                yield first, table
                first += len(table)


# --- The choice ---------------------------------------------------------------------


@contextlib.contextmanager
def _choice(
    pieces: Sequence[pathlib.Path],
    settings: UserBound,
    key: bytes,
    limits: Limits,
    told: _Percent,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yields a connection with the table ``kept`` of places."""

    def numbers() -> Iterator[pa.RecordBatch]:
        for first, table in _read(pieces, [USER]):
            users = table[USER].combine_chunks()
            priorities = pa.array(draw_priorities(key, first, len(table)))
            places = pa.array(np.arange(first, first + len(table)))
            yield pa.record_batch([users, priorities, places], schema=_CHOSEN_OF)
            told.add(len(table))

    query = least_rows("numbers", settings.max_examples_per_user)
    with _plain_errors(limits.work), _connect(limits) as database:
        reader = pa.RecordBatchReader.from_batches(_CHOSEN_OF, numbers())
        database.register("numbers", reader)
        # In this order a few rows are found without a scan of the whole table.
        database.execute(f"create temp table kept as from ({query}) order by place")
        ((count,),) = database.execute("select count(*) from kept").fetchall()
        if count > settings.num_examples:
            raise InputError(
                f"Expected num_examples={settings.num_examples} to be at least the "
                "rows that are kept. Give a larger public number, such as the rows of "
                "the whole table."
            )
        yield database


def _connect(limits: Limits) -> duckdb.DuckDBPyConnection:
    """Returns a database in memory that spills into a folder of its own."""
    limits.work.mkdir(mode=0o700, exist_ok=True)
    memory = limits.memory_limit // 2
    return connect(
        num_threads=max(1, min(limits.num_threads, memory // _THREAD_MEMORY)),
        memory_limit=memory,
        folder=str(limits.work / "duckdb"),
    )


@contextlib.contextmanager
def _plain_errors(work: pathlib.Path) -> Iterator[None]:
    """Replaces errors of DuckDB about memory and disk."""
    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
        raise InputError(
            f"Expected memory and disk to choose the rows of users in {work}; DuckDB "
            f"found {type(error).__name__}. Give more --memory-limit, fewer --threads, "
            "or --out on a disk with room for 50 bytes of each row."
        ) from None


def _kept_rows(
    pieces: Sequence[pathlib.Path], choice: duckdb.DuckDBPyConnection, told: _Percent
) -> Iterator[pa.Table]:
    """Yields the kept rows of each row group, in order, with USER."""
    query = "select place from kept where place >= ? and place < ?"
    for first, table in _read(pieces):
        found = choice.execute(query, [first, first + len(table)]).fetchnumpy()
        keep = np.zeros(len(table), bool)
        keep[found["place"] - first] = True
        yield table.filter(pa.array(keep))
        told.add(len(table))
