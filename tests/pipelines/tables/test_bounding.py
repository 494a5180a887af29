"""At most k rows of each user, kept of pieces."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from pipelines.core.keys import commitment, derive
from pipelines.core.users import KEY_LABEL, Bounded, UserBound, draw_priorities
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY, list_blocks
from pipelines.tables.bounding import USER, bound_pieces, bounded_schema
from pipelines.tables.prepared_files import ROW_GROUPS_PER_FILE
from tests.pipelines.conftest import contents

ROWS, MOST, KEY, TABLE = 1200, 3, bytes(range(32)), "a table"
USER_OF = np.random.default_rng(7).zipf(1.4, ROWS) % 150
#: Numbers of users as a hash makes them: any of 64 bits.
NUMBERS = np.random.default_rng(8).integers(0, 2**64, 150, dtype="u8")
PAIR = pa.list_(pa.field("item", pa.float32(), nullable=False), 2)
SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in {"row": pa.int64(), "pair": PAIR, "on": pa.bool_()}.items()
    ],
    {DATASET_METADATA_KEY: b'{"name": "clicks"}'},
)
SETTINGS = UserBound(user_column="user", max_examples_per_user=MOST, num_examples=ROWS)


def table_of(users: np.ndarray) -> pa.Table:
    """Rows of which ``row`` says which they are."""
    row = np.arange(len(users))
    pairs = pa.array(np.repeat(row + 1, 2).astype("f4"))
    columns = [row, pa.FixedSizeListArray.from_arrays(pairs, type=PAIR), row % 3 == 0]
    schema = SCHEMA.append(pa.field(USER, pa.uint64(), nullable=False))
    return pa.table([*columns, users.astype("u8")], schema=schema)


def write_pieces(
    folder: pathlib.Path, users: np.ndarray, num_pieces: int, group_rows: int
) -> None:
    (folder / "data").mkdir(parents=True)
    table = table_of(users)
    for number, rows in enumerate(np.array_split(np.arange(len(users)), num_pieces)):
        some = table.slice(rows[0] if len(rows) else 0, len(rows))
        path = folder / f"piece-{number:02d}.parquet"
        pq.write_table(some, path, row_group_size=group_rows)


def bound_written(
    folder: pathlib.Path,
    settings: UserBound = SETTINGS,
    *,
    threads: int = 2,
    memory: int = 1 << 28,
    key: bytes = KEY,
    **options: Any,
) -> pathlib.Path:
    """Bounds the pieces of a folder, and returns the folder of the rows."""
    pieces, work = sorted(folder.glob("*.parquet")), folder / "work"
    work.mkdir()
    how = {"table": TABLE, "row_group_rows": 4, "work": work, **options}
    how |= {"memory_limit": memory, "num_threads": threads}
    bound_pieces(pieces, folder / "data", settings, key, SCHEMA, **how)
    return folder / "data"


#: ``bound(settings, name="out")`` writes pieces into a new folder and bounds them.
Bound = Callable[..., pathlib.Path]


@pytest.fixture
def bound(tmp_path: pathlib.Path) -> Bound:
    """See ``Bound``."""

    def bound(
        *settings: UserBound,
        name: str = "out",
        users: np.ndarray = NUMBERS[USER_OF],
        num_pieces: int = 3,
        group_rows: int = 110,
        **how: Any,
    ) -> pathlib.Path:
        write_pieces(tmp_path / name, users, num_pieces, group_rows)
        return bound_written(tmp_path / name, *settings, **how)

    return bound


def test_at_most_k_in_order_without_the_id(bound: Bound) -> None:
    """And they are those with the least words of the stream of key and table."""
    out = bound()
    found = pq.read_table(out)
    rows = found["row"].to_numpy()
    assert (np.diff(rows) > 0).all()
    priorities = draw_priorities(derive(KEY, "choice of rows", TABLE), 0, ROWS)
    for user in set(USER_OF):
        mine = np.flatnonzero(user == USER_OF)
        least = mine[np.argsort(priorities[mine])[:MOST]]
        assert set(rows[USER_OF[rows] == user]) == set(least)
    assert found.schema.equals(SCHEMA)
    assert found.equals(table_of(USER_OF).select(SCHEMA.names).take(rows))
    for number, path in enumerate(sorted(out.iterdir())[:2]):
        footer = pq.read_metadata(path)
        assert path.name == f"part-0000{number}.parquet"
        sizes = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        assert sizes == [4] * ROW_GROUPS_PER_FILE
    told = list_blocks(str(out), of_numbers=False).description
    assert told["name"] == "clicks"
    note = Bounded.of(told)
    assert note is not None
    assert (note.max_examples_per_user, note.num_examples) == (MOST, ROWS)
    assert note.key.startswith(commitment(KEY, KEY_LABEL))
    other = bounded_schema(SCHEMA, SETTINGS, KEY, "another table")
    assert Bounded.of(json.loads(other.metadata[DATASET_METADATA_KEY])) != note


def test_pure_function(bound: Bound) -> None:
    found = contents(bound(row_group_rows=3))
    assert len(found) > 2
    ways: list[dict[str, Any]] = [
        {"threads": 1, "memory": 1 << 27},
        {"num_pieces": 1, "group_rows": 7},
        {"num_pieces": 40, "memory": 1 << 32},
        {"key": bytes(32)},
    ]
    for number, how in enumerate(ways):
        again = bound(name=f"{number}", row_group_rows=3, **how)
        assert (contents(again) == found) == ("key" not in how)


def test_progress_tells_no_number(bound: Bound) -> None:
    """Neither of rows nor of users.  A table without rows is one file."""
    for name, users in (("none", 0), ("one", 1), ("few", 30), ("many", ROWS)):
        told: list[int] = []
        tell = functools.partial(lambda to, *done: to.append(done), told)
        out = bound(users=np.arange(users), name=name, on_progress=tell)
        assert told == [(percent, 100) for percent in range(1, 101)]
        assert len(pq.read_table(out)) == users
        assert pathlib.Path(out, "part-00000.parquet").exists()


def test_what_cannot_be_is_refused(bound: Bound) -> None:
    with pytest.raises(InputError, match="max_examples_per_user=51 <= 50"):
        dataclasses.replace(SETTINGS, max_examples_per_user=51)
    with pytest.raises(InputError, match="more --memory-limit") as error:
        bound(memory=1 << 18, users=np.arange(400_000), group_rows=1 << 17)
    assert "\n" not in str(error.value)


def test_memory_does_not_depend_on_the_rows(tmp_path: pathlib.Path) -> None:
    """Arrow holds a row group, not 25 MB; what does not fit into DuckDB is on disk."""
    spilled = [0]

    def look(*_: int) -> None:
        files = (path for path in (tmp_path / "work").rglob("*") if path.is_file())
        spilled.append(sum(path.stat().st_size for path in files))

    users = np.random.default_rng(0).integers(0, 2**63, 1_000_000, dtype="u8")
    write_pieces(tmp_path, users, 1, 1 << 14)
    settings = dataclasses.replace(SETTINGS, num_examples=1 << 30)
    sizes = {"row_group_rows": 1 << 14, "memory": 1 << 25}
    before, pool = (
        pa.default_memory_pool(),
        pa.proxy_memory_pool(pa.system_memory_pool()),
    )
    pa.set_memory_pool(pool)
    try:
        bound_written(tmp_path, settings, on_progress=look, **sizes)
    finally:
        pa.set_memory_pool(before)
    assert max(spilled) > 5 << 20
    assert pool.max_memory() < 4 << 20
