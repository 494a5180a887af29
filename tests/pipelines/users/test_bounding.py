"""At most k rows of each user, kept of pieces: by random tables, limits and signals."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from accounting.core.validation import InputError
from pipelines.core.keys import commitment, derive
from pipelines.core.users.bounded import KEY_LABEL, ROW_WEIGHTS, SAMPLED, USERS, Bounded
from pipelines.core.users.least_rows import draw_priorities
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY, list_row_groups
from pipelines.tables import bounding
from pipelines.tables.bounding import (
    USER,
    BoundSettings,
    Limits,
    bound_pieces,
    bounded_schema,
)

ROWS, MOST, KEY, TABLE = 1200, 3, bytes(range(32)), "a table"
USER_OF = np.random.default_rng(7).zipf(1.4, ROWS) % 150
#: Numbers of users as a hash makes them: any of 64 bits.
NUMBERS = np.random.default_rng(8).integers(0, 2**64, 150, dtype="u8")
_TOLD = {DATASET_METADATA_KEY: b'{"name": "clicks"}'}
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("pair", pa.list_(pa.field("item", pa.float32(), False), 2), False),
        pa.field("on", pa.bool_(), nullable=False),
    ],
    _TOLD,
)
SETTINGS = BoundSettings(
    user_column="user", max_examples_per_user=MOST, num_examples=ROWS
)


def table_of(users: np.ndarray) -> pa.Table:
    """Rows of which ``row`` says which they are."""
    row = np.arange(len(users))
    pairs = pa.array(np.repeat(row + 1, 2).astype("f4"))
    columns = [
        pa.array(row),
        pa.FixedSizeListArray.from_arrays(pairs, type=SCHEMA.field("pair").type),
        pa.array(row % 3 == 0),
        pa.array(users.astype("u8")),
    ]
    user = pa.field(USER, pa.uint64(), nullable=False)
    return pa.table(columns, schema=SCHEMA.append(user))


#: ``bound(settings)`` writes ``num_pieces`` pieces and bounds them into a new folder.
Bound = Callable[..., pathlib.Path]


@pytest.fixture
def bound(tmp_path: pathlib.Path) -> Bound:
    """See ``Bound``."""

    def bound(
        settings: BoundSettings = SETTINGS,
        *,
        users: np.ndarray = NUMBERS[USER_OF],
        num_pieces: int = 3,
        group_rows: int = 110,
        threads: int = 2,
        memory: int = 1 << 28,
        key: bytes = KEY,
        name: str = "out",
        **options: Any,
    ) -> pathlib.Path:
        folder, table = tmp_path / name, table_of(users)
        (folder / "data").mkdir(parents=True)
        pieces = []
        for number, rows in enumerate(
            np.array_split(np.arange(len(users)), num_pieces)
        ):
            pieces.append(folder / f"piece-{number}.parquet")
            some = table.slice(rows[0], len(rows)) if len(rows) else table[:0]
            pq.write_table(some, pieces[-1], row_group_size=group_rows)
        sizes = {"row_group_rows": 64, "row_groups_per_file": 2, **options}
        limits = Limits(work=folder / "work", memory_limit=memory, num_threads=threads)
        bound_pieces(
            pieces,
            folder / "data",
            settings,
            key,
            SCHEMA,
            table=TABLE,
            limits=limits,
            **sizes,
        )
        return folder / "data"

    return bound


def kept_rows(out: pathlib.Path) -> np.ndarray:
    return pq.read_table(out)["row"].to_numpy()


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def of_users(**changes: Any) -> BoundSettings:
    return dataclasses.replace(SETTINGS, sampled=USERS, **changes)


def test_at_most_k_in_order_without_the_id(bound: Bound) -> None:
    out = bound()
    rows = kept_rows(out)
    assert (np.diff(rows) > 0).all()
    before, after = collections.Counter(USER_OF), collections.Counter(USER_OF[rows])
    assert after == {user: min(MOST, count) for user, count in before.items()}
    found = pq.read_table(out)
    assert found.schema.equals(SCHEMA)
    expected = table_of(NUMBERS[USER_OF]).select(SCHEMA.names).take(rows)
    assert found.equals(expected)
    files = sorted(out.iterdir())
    assert [path.name for path in files[:2]] == [
        f"part-0000{i}.parquet" for i in (0, 1)
    ]
    for path in files[:-1]:
        footer = pq.read_metadata(path)
        assert [footer.row_group(i).num_rows for i in (0, 1)] == [64, 64]
        assert footer.num_row_groups == 2


def test_the_note_is_in_every_file(bound: Bound) -> None:
    groups = list_row_groups(str(bound()))
    told = json.loads(groups.schema.metadata[DATASET_METADATA_KEY])
    assert told["name"] == "clicks"
    note = Bounded.of(told)
    assert note is not None
    assert (note.user_column, note.max_examples_per_user) == ("user", MOST)
    assert note.num_examples == ROWS
    assert note.key.startswith(commitment(KEY, KEY_LABEL))
    other = bounded_schema(SCHEMA, SETTINGS, KEY, "another table")
    assert Bounded.of(json.loads(other.metadata[DATASET_METADATA_KEY])) != note


@pytest.mark.parametrize("sampled", SAMPLED)
def test_pure_function(bound: Bound, sampled: str) -> None:
    settings = dataclasses.replace(SETTINGS, sampled=sampled)
    found = contents(bound(settings, row_group_rows=20))
    assert len(found) > 2
    for number, how in enumerate(
        (
            {"threads": 1, "memory": 1 << 27},
            {"num_pieces": 1, "group_rows": 7},
            {"num_pieces": 40, "memory": 1 << 32},
        )
    ):
        again = bound(settings, name=f"{number}", row_group_rows=20, **how)
        assert contents(again) == found
    other = bound(settings, name="other", key=bytes(32))
    assert contents(other) != found


def test_the_choice_is_that_of_the_rule(bound: Bound) -> None:
    """Of a user, the rows with the least words of the stream of key and table."""
    kept = set(kept_rows(bound()))
    own = derive(KEY, "choice of rows", TABLE)
    priorities = draw_priorities(own, 0, ROWS)
    for user in set(USER_OF):
        mine = np.flatnonzero(user == USER_OF)
        least = mine[np.argsort(priorities[mine])[:MOST]]
        assert kept.issuperset(least)


def test_uniform_choice(bound: Bound) -> None:
    """Each of the 10 pairs of 5 rows of a user in 5 pieces is kept equally often.

    Chi-square with 2,000 users, at error rate 1e-6.
    """
    users = np.tile(np.random.default_rng(1).integers(0, 2**63, 2000), 5)
    settings = dataclasses.replace(
        SETTINGS, max_examples_per_user=2, num_examples=len(users)
    )
    kept = kept_rows(bound(settings, users=users, num_pieces=5, group_rows=2000))
    pairs = np.bincount(kept % 2000, 1 << (kept // 2000))
    _, counts = np.unique(pairs, return_counts=True)
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_one_record_of_each_user(
    bound: Bound, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(bounding, "_SHARES", seed << 18)  # up to 100 shares
    rng = np.random.default_rng(seed)
    users = NUMBERS[rng.zipf(1.3, rng.integers(1, ROWS)) % 150]
    most = int(rng.integers(1, 9))
    out = bound(of_users(max_examples_per_user=most), users=users)
    table = pq.read_table(out)
    assert table.schema.equals(
        bounded_schema(SCHEMA, of_users(max_examples_per_user=most), KEY, TABLE)
    )
    found = {name: np.array(table[name].to_pylist()) for name in table.column_names}
    seen = []
    for rows, weights in zip(found["row"], found[ROW_WEIGHTS], strict=True):
        mine = rows[weights == 1]
        (user,) = set(users[mine])
        assert len(mine) == min(most, (user == users).sum())
        assert (np.diff(mine) > 0).all()
        seen.append(user)
    assert sorted(seen) == sorted(set(users))
    real = found[ROW_WEIGHTS] == 1
    assert set(np.unique(found[ROW_WEIGHTS])) <= {0.0, 1.0}
    for name in SCHEMA.names:
        assert (found[name][~real] == 0).all()
    assert (found["pair"][real] == found["row"][real][:, None] + 1).all()
    assert (found["on"][real] == (found["row"][real] % 3 == 0)).all()


@pytest.mark.parametrize("sampled", SAMPLED)
def test_too_few_slots_are_refused_without_a_number(bound: Bound, sampled: str) -> None:
    kept = sum(min(MOST, count) for count in collections.Counter(USER_OF).values())
    enough = len(set(USER_OF)) if sampled == USERS else kept
    fits, few = (
        dataclasses.replace(SETTINGS, sampled=sampled, num_examples=enough - less)
        for less in (0, 1)
    )
    bound(fits)
    with pytest.raises(
        InputError, match=f"num_examples={enough - 1} to be at"
    ) as error:
        bound(few, name="few")
    assert f"{enough}" not in str(error.value)


@pytest.mark.parametrize("sampled", SAMPLED)
def test_progress_tells_no_number(bound: Bound, sampled: str) -> None:
    """Neither of rows nor of users."""
    settings = dataclasses.replace(SETTINGS, sampled=sampled)
    for name, users in (("none", 0), ("one", 1), ("few", 30), ("many", ROWS)):
        calls: list[tuple[int, int]] = []

        def tell(done: int, total: int, calls: Any = calls) -> None:
            calls.append((done, total))

        bound(settings, users=np.arange(users), name=name, on_progress=tell)
        assert calls == [(percent, 100) for percent in range(1, 101)]


@pytest.mark.parametrize("sampled", SAMPLED)
def test_a_table_without_rows_is_one_empty_file(bound: Bound, sampled: str) -> None:
    settings = dataclasses.replace(SETTINGS, sampled=sampled)
    out = bound(settings, users=np.zeros(0), num_pieces=2)
    assert [path.name for path in out.iterdir()] == ["part-00000.parquet"]
    assert len(pq.read_table(out)) == 0


def test_files_that_are_spilled_are_private_and_gone(
    bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(kept: Any, columns: Any, limits: Limits, num_rows: int) -> Iterator[Any]:
        seen.append(limits.work.stat().st_mode & 0o777)
        yield from original(kept, columns, limits, num_rows)

    original = bounding._spill_shares
    monkeypatch.setattr(bounding, "_spill_shares", look)
    monkeypatch.setattr(bounding, "_SHARES", 1 << 18)
    out = bound(of_users())
    assert seen == [0o700]
    assert [each for each in (out.parent / "work").rglob("*") if each.is_file()] == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_examples_per_user": 51}, "at_most|<= 50"),
        ({"max_examples_per_user": 0}, "max_examples_per_user"),
        ({"num_examples": 0}, "num_examples"),
        ({"sampled": "rows of users"}, "sampled"),
    ],
)
def test_settings_out_of_bounds_are_refused(changes: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        dataclasses.replace(SETTINGS, **changes)


def test_held_out_users_are_bounded_by_rows() -> None:
    assert SETTINGS.held_out == SETTINGS
    assert of_users().held_out == dataclasses.replace(
        SETTINGS, num_examples=ROWS * MOST
    )


def test_records_that_batches_cannot_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for field in (pa.field("text", pa.string()), pa.field(ROW_WEIGHTS, pa.float32())):
        with pytest.raises(InputError, match=field.name):
            bounded_schema(SCHEMA.append(field), of_users(), KEY, TABLE)
    monkeypatch.setattr(bounding, "ROW_GROUP_BYTES", 3 * (8 + 2 * 4 + 1 + 4))
    bounded_schema(SCHEMA, of_users(max_examples_per_user=3), KEY, TABLE)
    with pytest.raises(InputError, match=r"max_examples_per_user=4 <= 3\. .* fewer"):
        bounded_schema(SCHEMA, of_users(max_examples_per_user=4), KEY, TABLE)


def test_no_room_is_an_error_without_values(
    bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="more --memory-limit") as error:
        bound(memory=1 << 18, users=np.arange(400_000), group_rows=1 << 17)
    assert "\n" not in str(error.value)


_AT_SIZE = """
import pathlib, resource, sys
import pyarrow as pa
from pipelines.tables.bounding import *
work, rows = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(work / "data").mkdir(parents=True)
schema = pa.schema([pa.field("x", pa.list_(pa.field("item", pa.float32(), False), 16))])
settings = BoundSettings(user_column="user", max_examples_per_user=3,
    num_examples=rows, sampled=sys.argv[3])
bound_pieces([pathlib.Path(sys.argv[4])], work / "data", settings, bytes(32), schema,
    limits=Limits(work=work / "spill", memory_limit=256 << 20, num_threads=2),
    table="", row_group_rows=1 << 16, row_groups_per_file=8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def megabytes(folder: pathlib.Path, groups: int, num_users: int, sampled: str) -> int:
    """Returns the peak memory of a process that bounds row groups of 65,536 rows."""
    rng, size, piece = np.random.default_rng(0), 1 << 16, folder / f"{groups}.parquet"
    values = pa.array(rng.random(size * 16, "f4"))
    kind = pa.list_(pa.field("item", pa.float32(), nullable=False), 16)
    lists = pa.FixedSizeListArray.from_arrays(values, type=kind)
    schema = pa.schema([pa.field("x", kind), pa.field(USER, pa.uint64())])
    with pq.ParquetWriter(piece, schema) as writer:
        for _ in range(groups):
            users = pa.array(rng.integers(0, num_users, size, dtype="u8"))
            writer.write_table(pa.table([lists, users], schema=schema))
    options = [str(folder / f"of-{groups}"), f"{groups * size}", sampled, str(piece)]
    call = [sys.executable, "-c", _AT_SIZE, *options]
    ran = subprocess.run(call, capture_output=True, text=True, check=True)
    return int(ran.stdout)


@pytest.mark.parametrize(("sampled", "num_users"), [("rows", 1), (USERS, 2**63)])
def test_memory_does_not_depend_on_the_rows(
    tmp_path: pathlib.Path, sampled: str, num_users: int
) -> None:
    """Of 2.4 million rows of 92 bytes, 220 MB; of one user, or of as many users."""
    few, many = (megabytes(tmp_path, n, num_users, sampled) for n in (4, 36))
    assert many - few < 150
