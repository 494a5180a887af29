"""At most k rows of each user, kept of numeric Parquet before batches are made of it.

Beside its numbers a row has a column ``USER``: the number of its user, by ``hash_ids``.
One DuckDB query over 24 bytes of each row (user, priority, place) chooses the rows that
are kept; then the rows are read in order, and the kept ones are written without USER,
or packed into one record for each user.  Where `prepare` runs on an engine, workers
convert the files and this choice runs once, on the machine that started the job: there
is no second implementation.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20 and
keyed BLAKE2b:
  - at most k and uniform choice: those of ``least_rows``, for all rows of a user in
    whatever pieces they are.
  - pure function: which rows are kept depends only on the key, the table and the
    settings; written files are the same bytes for any pieces, threads and memory.
  - the id is gone: files hold every column but USER, in the same order.
  - records: one of each user holds all of its kept rows in order, and no other user's;
    the rest is zero in every column, and has weight 0 in ``ROW_WEIGHTS``.
  - nothing is told: no message, call of progress or public field depends on the number
    of users, or on how many rows any of them has; but more kept rows (or users) than
    ``num_examples`` are refused, without their number.
  - bounded memory: the query spills into ``work``; a row group of a piece, and a share
    of the users, are held at a time.

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

from accounting.core.neighboring_relation import MOST_EXAMPLES_PER_USER
from accounting.core.validation import InputError, check_int
from pipelines.core.batches.manifest import Column, row_bytes
from pipelines.core.keys import commitment, derive
from pipelines.core.users import (
    BOUNDED,
    KEY_LABEL,
    ROW_WEIGHTS,
    ROWS,
    Bounded,
    UserBound,
    draw_priorities,
    least_rows,
)
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    description_of,
    numeric_columns,
    table_columns,
)
from pipelines.tables.prepared_files import (
    ROW_GROUP_BYTES,
    Pieces,
    arrow_field,
    arrow_table,
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
#: Shares of the users, of which one is packed at a time, per memory of their rows.
_SHARES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundSettings(UserBound):
    """A bound to apply.  All public.

    Raises:
      InputError: as for `UserBound`, or more rows per user than any proof covers.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.has_users:
            check_int(
                "max_examples_per_user",
                self.max_examples_per_user,
                at_most=MOST_EXAMPLES_PER_USER,
                remedy="No epsilon is proven for more sampled rows of a user. Keep "
                "fewer, or sample users: --sample users.",
            )

    @property
    def held_out(self) -> BoundSettings:
        """The bound on held-out rows, of which an example is always a row."""
        if not self.has_users:
            return self
        slots = self.num_examples * self.max_examples_per_user
        return dataclasses.replace(self, sampled=ROWS, num_examples=slots)


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
    rows: pa.Schema, settings: BoundSettings, key: bytes, table: str
) -> pa.Schema:
    """Returns the schema of the files, with the note that users are bounded.

    Args:
      rows: Schema of the rows, without USER.
      settings: Which rows are kept.
      key: As for ``bound_pieces``.
      table: As for ``bound_pieces``.

    Raises:
      InputError: records of users cannot hold the columns, or so many rows.
    """
    chosen_by = commitment(key, KEY_LABEL) + commitment(key, KEY_LABEL, table)
    note = Bounded(**dataclasses.asdict(settings), key=chosen_by)
    told = {**description_of(rows, "--input"), BOUNDED: note.to_json()}
    metadata = {DATASET_METADATA_KEY: json.dumps(told).encode()}
    if not settings.has_users:
        return rows.with_metadata(metadata)
    most = settings.max_examples_per_user
    columns = _record_columns(rows, most)
    fields = [arrow_field(each, most, *each.shape) for each in columns]
    return pa.schema(fields, metadata)


def bound_pieces(
    pieces: Sequence[pathlib.Path],
    folder: pathlib.Path,
    settings: BoundSettings,
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
      row_group_rows: Rows (or users) of a row group, at most.
      row_groups_per_file: Row groups of a file, at most.
      on_progress: See ``OnProgress``.

    Raises:
      InputError: as for ``bounded_schema``; too few slots; or no room in memory or on
        the disk.
    """
    schema = bounded_schema(rows, settings, key, table)
    own_key = derive(key, "choice of rows", table)
    num_rows = sum(pq.read_metadata(piece).num_rows for piece in pieces)
    told = _Percent(on_progress, 2 * num_rows)  # they are read twice
    columns: tuple[Column, ...] = ()
    size = row_group_rows
    if settings.has_users:  # of rows, values may be kept as texts
        columns = numeric_columns(rows)
        record_bytes = row_bytes(columns) + np.float32().nbytes
        fitting = ROW_GROUP_BYTES // (settings.max_examples_per_user * record_bytes)
        size = max(1, min(size, fitting))
    per_file = row_groups_per_file
    with Pieces(folder, "part-", schema, size, per_file, or_empty=True) as out:
        with _choice(pieces, settings, own_key, limits, told) as choice:
            kept = _kept_rows(pieces, choice, told)
            if settings.has_users:
                shares = _spill(kept, columns, limits, num_rows)
            else:
                for some in kept:
                    out.write(some.select(rows.names))
        if settings.has_users:  # DuckDB has returned its memory
            for some in _records(shares, columns, schema, settings, size):
                out.write(some)
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
    settings: BoundSettings,
    key: bytes,
    limits: Limits,
    told: _Percent,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yields a connection with the table ``kept`` of (place, is_first)."""

    def numbers() -> Iterator[pa.RecordBatch]:
        for first, table in _read(pieces, [USER]):
            users = table[USER].combine_chunks()
            priorities = pa.array(draw_priorities(key, first, len(table)))
            places = pa.array(np.arange(first, first + len(table)))
            yield pa.record_batch([users, priorities, places], schema=_CHOSEN_OF)
            told.add(len(table))

    query = least_rows("numbers", settings.max_examples_per_user)
    counted = "is_first" if settings.has_users else "true"
    with _plain_errors(limits.work), _connect(limits) as database:
        reader = pa.RecordBatchReader.from_batches(_CHOSEN_OF, numbers())
        database.register("numbers", reader)
        # In this order a few rows are found without a scan of the whole table.
        database.execute(f"create temp table kept as from ({query}) order by place")
        database.execute(f"select count(*) filter ({counted}) from kept")
        ((count,),) = database.fetchall()
        if count > settings.num_examples:
            what = "users" if settings.has_users else "rows that are kept"
            raise InputError(
                f"Expected num_examples={settings.num_examples} to be at least the "
                f"{what}. Give a larger public number, such as the rows of the whole "
                "table."
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


# --- Records of users ---------------------------------------------------------------


def _record_columns(rows: pa.Schema, most: int) -> tuple[Column, ...]:
    """Returns the columns of a row of a record, or refuses them."""
    if ROW_WEIGHTS in rows.names:
        raise InputError(
            f"Expected no column {ROW_WEIGHTS}: it is to tell rows from padding. "
            "Rename it."
        )
    columns = (*numeric_columns(rows), Column(name=ROW_WEIGHTS, dtype="float32"))
    check_int(
        "max_examples_per_user",
        most,
        at_most=max(1, ROW_GROUP_BYTES // row_bytes(columns)),
        remedy="One record holds so many rows of a user. Keep fewer, or sample rows.",
    )
    return columns


def _row_type(columns: Sequence[Column]) -> np.dtype:
    types = [(f"{i}", each.numpy_dtype) for i, each in enumerate(columns)]
    return np.dtype([("user", "<u8"), *types])


def _spill(
    kept: Iterable[pa.Table],
    columns: tuple[Column, ...],
    limits: Limits,
    num_rows: int,
) -> list[pathlib.Path]:
    """Writes the kept rows to a file for each share of the users, in order.

    Shares are ranges of the users' numbers, which are uniform: a hash made them.
    """
    kind = _row_type(columns)
    num_shares = 1 + num_rows * kind.itemsize * _SHARES // limits.memory_limit
    paths = [limits.work / f"share-{number}" for number in range(num_shares)]
    for path in paths:
        path.touch()
    for table in kept:
        rows = np.zeros(len(table), kind)
        rows["user"] = table[USER].to_numpy()
        for i, values in enumerate(table_columns(table, columns).values()):
            rows[f"{i}"] = values
        shares = (rows["user"] >> np.uint64(32)) * np.uint64(num_shares)
        shares >>= np.uint64(32)
        order = np.argsort(shares, kind="stable")
        edges = np.searchsorted(shares[order], np.arange(1, num_shares))
        for path, some in zip(paths, np.split(rows[order], edges), strict=True):
            with open(path, "ab") as file:
                some.tofile(file)
    return paths


def _records(
    shares: Iterable[pathlib.Path],
    columns: tuple[Column, ...],
    schema: pa.Schema,
    settings: BoundSettings,
    size: int,
) -> Iterator[pa.Table]:
    """Yields one record for each user, at most ``size`` at a time."""
    for path in shares:
        rows = np.fromfile(path, _row_type(columns))
        path.unlink()
        rows = rows[np.argsort(rows["user"], kind="stable")]
        starts = np.flatnonzero(np.diff(rows["user"], prepend=~rows["user"][:1]))
        for some in range(0, len(starts), size):
            end = starts[some + size] if some + size < len(starts) else len(rows)
            most = settings.max_examples_per_user
            yield _packed(rows[starts[some] : end], columns, most, schema)


def _packed(
    rows: np.ndarray, columns: tuple[Column, ...], most: int, schema: pa.Schema
) -> pa.Table:
    """Returns the records of rows that are sorted by user."""
    is_first = np.diff(rows["user"], prepend=~rows["user"][:1]) != 0
    starts = np.flatnonzero(is_first)
    user = np.cumsum(is_first) - 1
    place = np.arange(len(rows)) - starts[user]
    weights = np.zeros((len(starts), most), np.float32)
    weights[user, place] = 1.0
    arrays = []
    for i, column in enumerate(columns):
        values = np.zeros((len(starts), most), column.numpy_dtype)
        values[user, place] = rows[f"{i}"]
        arrays.append(values)
    return arrow_table((*arrays, weights), schema)
