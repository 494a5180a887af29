"""At most k rows of each user, kept of numeric Parquet before batches are made of it.

Beside its numbers a row has a column ``USER``: the number of its user, by ``hash_ids``.
One DuckDB query over 24 bytes of each row (user, priority, place) chooses the rows that
are kept; then the rows are read in order, and the kept ones are written without USER.
Where `prepare` runs on an engine, workers convert the files and this choice runs once,
on the machine that started the job: there is no second implementation.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20 and
keyed BLAKE2b:
  - at most k and uniform choice: those of ``least_rows``, for all rows of a user, in
    whatever pieces they are.
  - pure function: which rows are kept depends only on the key, the table and the
    settings; written files are the same bytes for any pieces, threads and memory.
  - the id is gone: files hold every column but USER, in the same order.
  - no message, call of progress or public field depends on the number of users, or on
    how many rows any of them has.  (More kept rows than ``num_examples`` are refused,
    without their number.)
  - bounded memory: the query spills into ``work``, and one row group of a piece is held
    at a time.

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
from pipelines.core import users
from pipelines.core.keys import commitment, derive
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY, description_of
from pipelines.tables.prepared_files import Pieces
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


def bounded_schema(
    rows: pa.Schema, settings: users.UserBound, key: bytes, table: str
) -> pa.Schema:
    """Returns the schema of the files, with the note that users are bounded.

    Args:
      rows: Schema of the rows, without USER.
      settings: Which rows are kept.
      key: As for ``bound_pieces``.
      table: As for ``bound_pieces``.
    """
    chosen_by = commitment(key, users.KEY_LABEL)
    chosen_by += commitment(key, users.KEY_LABEL, table)
    note = users.Bounded(**dataclasses.asdict(settings), key=chosen_by)
    told = {**description_of(rows, "--input"), users.BOUNDED: note.to_json()}
    return rows.with_metadata({DATASET_METADATA_KEY: json.dumps(told).encode()})


def bound_pieces(
    pieces: Sequence[pathlib.Path],
    folder: pathlib.Path,
    settings: users.UserBound,
    key: bytes,
    rows: pa.Schema,
    *,
    table: str,
    row_group_rows: int,
    work: pathlib.Path,
    memory_limit: int,
    num_threads: int,
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
      table: Names the table and the split among all that this key bounds, such as by a
        digest of its files: choices for different names are independent.
      row_group_rows: Rows of a row group, at most.
      work: Private folder for what is spilled, and removed later.  Sensitive.
      memory_limit: Bytes; DuckDB has half of it, and 128 MiB of that for a thread.
      num_threads: Threads of DuckDB, at most.
      on_progress: See ``OnProgress``.

    Raises:
      InputError: there are too few slots, or memory or disk is full.
    """
    schema = bounded_schema(rows, settings, key, table)
    own_key = derive(key, "choice of rows", table)
    num_rows = sum(pq.read_metadata(piece).num_rows for piece in pieces)
    done = told = 0

    def read(more: int) -> None:
        nonlocal done, told
        done += more
        while told < 100 * done // (2 * num_rows + 1):  # they are read twice
            told += 1
            on_progress(told, 100)

    memory = memory_limit // 2
    with (
        Pieces(folder, "part-", schema, row_group_rows, or_empty=True) as out,
        _plain_errors(work),
        connect(
            num_threads=max(1, min(num_threads, memory // _THREAD_MEMORY)),
            memory_limit=memory,
            folder=str(work / "duckdb"),
        ) as database,
    ):
        _choose(pieces, settings, own_key, database, read)
        for some in _kept_rows(pieces, database, read):
            out.write(some.select(rows.names))
    read(1)


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


def _choose(
    pieces: Sequence[pathlib.Path],
    settings: users.UserBound,
    key: bytes,
    database: duckdb.DuckDBPyConnection,
    read: Callable[[int], None],
) -> None:
    """Makes the table ``kept`` of places."""

    def numbers() -> Iterator[pa.RecordBatch]:
        for first, table in _read(pieces, [USER]):
            priorities = pa.array(users.draw_priorities(key, first, len(table)))
            places = pa.array(np.arange(first, first + len(table)))
            columns = [table[USER].combine_chunks(), priorities, places]
            yield pa.record_batch(columns, schema=_CHOSEN_OF)
            read(len(table))

    query = users.least_rows("numbers", settings.max_examples_per_user)
    reader = pa.RecordBatchReader.from_batches(_CHOSEN_OF, numbers())
    database.register("numbers", reader)
    # In this order a few rows are found without a scan of the whole table.
    database.execute(f"create temp table kept as from ({query}) order by place")
    ((count,),) = database.execute("select count(*) from kept").fetchall()
    if count > settings.num_examples:
        raise InputError(
            f"Expected num_examples={settings.num_examples} to be at least the rows "
            "that are kept. Give a larger public number, such as the table's rows."
        )


@contextlib.contextmanager
def _plain_errors(work: pathlib.Path) -> Iterator[None]:
    """Replaces errors of DuckDB about memory and disk."""
    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
        raise InputError(
            f"Expected memory, and disk in {work}, to choose the rows of users: "
            f"{type(error).__name__}. Give more --memory-limit, or fewer --threads."
        ) from None


def _kept_rows(
    pieces: Sequence[pathlib.Path],
    database: duckdb.DuckDBPyConnection,
    read: Callable[[int], None],
) -> Iterator[pa.Table]:
    """Yields the kept rows of each row group, in order, with USER."""
    query = "select place from kept where place >= ? and place < ?"
    for first, table in _read(pieces):
        found = database.execute(query, [first, first + len(table)]).fetchnumpy()
        keep = np.zeros(len(table), bool)
        keep[found["place"] - first] = True
        yield table.filter(pa.array(keep))
        read(len(table))
