"""At most k rows of each user of a PCollection of one's own."""

from __future__ import annotations

import collections
import pathlib
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.testing import test_stream

from accounting.validation import InputError
from pipelines.core.streams import Stream
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.job.make_batches import BatchSettings, open_input
from pipelines.job.poisson_batching import write_batches
from pipelines.sampling.keys import insecure_key
from pipelines.tables.prepare_rows import PrepareRows
from pipelines.tables.schema.schema import Schema
from pipelines.users import bound_rows
from pipelines.users.bound_rows import BoundUsers, _least, _packed, _Prioritize, _rows

MOST, NUM = 3, 200
USER = np.random.default_rng(2).zipf(1.5, NUM) % 40
#: Rows come in pairs of equal ones, of equal users.
ROWS: list[dict[str, Any]] = [
    {"who": f"u{USER[number // 2]}", "row": number // 2} for number in range(NUM)
]
COLUMNS = pa.schema([pa.field("row", pa.int64(), nullable=False)])


def transform(folder: pathlib.Path, **changes: Any) -> BoundUsers:
    fields = {"user_column": "who", "max_examples_per_user": MOST, **changes}
    return BoundUsers(num_examples=NUM, key_file=folder / "choices.key", **fields)


def run(rows: list[dict[str, Any]], users: BoundUsers, out: pathlib.Path) -> list[int]:
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        left = pipeline | beam.Create(rows) | users
        _ = left | beam.io.WriteToParquet(
            f"{out}/part", users.schema(COLUMNS), file_name_suffix=".parquet"
        )
    found: list[int] = pq.read_table(out)["row"].to_pylist()
    return sorted(found)


def test_at_most_k_in_any_order_and_batches_know_it(tmp_path: pathlib.Path) -> None:
    left = run(ROWS, transform(tmp_path), tmp_path / "out")
    user_of = {row["row"]: row["who"] for row in ROWS}
    before = collections.Counter(row["who"] for row in ROWS)
    after = collections.Counter(user_of[row] for row in left)
    assert after == {user: min(MOST, count) for user, count in before.items()}
    backwards = [dict(reversed(row.items())) for row in reversed(ROWS)]
    assert run(backwards, transform(tmp_path), tmp_path / "again") == left
    other = tmp_path / "other"
    other.mkdir()
    assert run(ROWS, transform(other), other / "out") != left
    dataset = list_blocks(str(tmp_path / "out"))
    assert dataset.bounded == transform(tmp_path).note
    assert dataset.num_examples == NUM
    assert b"u1" not in b"".join(p.read_bytes() for p in (tmp_path / "out").iterdir())
    settings = BatchSettings(expected_batch_size=20, num_epochs=1)
    dataset, layout = open_input(
        str(tmp_path / "out"), str(tmp_path / "batches"), settings
    )
    with pytest.raises(InputError, match="it chose the rows of users"):
        write_batches(
            dataset=dataset,
            layout=layout,
            out=tmp_path / "batches",
            key_file=tmp_path / "choices.key",
        )


def chosen(rows: list[dict[str, Any]], key: bytes, most: int) -> list[Any]:
    """The steps of the pipeline, one after the other, for the rows of one user."""
    choose = _Prioritize("who", most, "")
    choose._key = key
    found: list[bytes] = []
    for counted in collections.Counter(map(_packed, rows)).items():
        found += [entry for _, entry in choose.process(counted)]
    return [row["row"] for row in _rows((b"", sorted(found)[:most]), "who")]


def test_uniform_choice_counts_equal_rows_one_by_one() -> None:
    """Of 9 equal rows and 3 others, 4 are kept: 3 of the equal ones on average.

    Hypergeometric, of variance 6/11, in 400 trials; held within 5 deviations.
    """
    rows = [{"who": 1, "row": 0}] * 9 + [{"who": 1, "row": n} for n in (1, 2, 3)]
    trials, found = 400, collections.Counter[int]()
    for trial in range(trials):
        found.update(chosen(rows, insecure_key(trial), 4))
    spread = 5 * np.sqrt(trials * 6 / 11)
    assert sum(found.values()) == 4 * trials
    assert abs(found[0] - 3 * trials) < spread
    for row in (1, 2, 3):
        assert abs(found[row] - trials / 3) < spread


def test_many_copies_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _least(Stream(bytes(32)), 1000, 5)
    assert len(whole) == 5
    monkeypatch.setattr(bound_rows, "_COPIES", 64)
    assert list(_least(Stream(bytes(32)), 1000, 5)) == list(whole)
    assert len(_least(Stream(bytes(32)), 3, 5)) == 3


def test_equal_ids_are_one_user() -> None:
    assert bound_rows._id("who", np.int8(5)) == bound_rows._id("who", 5)
    assert bound_rows._id("who", "ä") == bound_rows._id("who", "ä".encode())
    assert bound_rows._id("who", "5") != bound_rows._id("who", 5)


@pytest.mark.parametrize("value", [None, True, 1.5])
def test_ids_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match="integers, text or bytes, not"):
        bound_rows._id("who", value)


def test_wrong_rows_are_refused_in_one_line(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match="to be dicts, not tuple"):
        _packed((1, 2))  # type: ignore[arg-type]
    choose = _Prioritize("name", MOST, str(tmp_path / "choices.key"))
    transform(tmp_path)
    choose.setup()
    with pytest.raises(InputError, match="user_column='name'; one has row, who"):
        list(choose.process((_packed(ROWS[0]), 1)))
    with pytest.raises(InputError, match="Expected no column who"):
        transform(tmp_path).schema(pa.schema([("who", pa.int8())]))
    with pytest.raises(InputError, match="max_examples_per_user=0 >= 1"):
        transform(tmp_path, max_examples_per_user=0)
    pipeline = beam.Pipeline()
    with pytest.raises(InputError, match="rows of a batch pipeline"):
        _ = pipeline | test_stream.TestStream() | transform(tmp_path)


SCHEMA = Schema.from_json(
    {
        "version": 1,
        "split": {"by": "hash", "column": "who", "shares": [60, 20, 20]},
        "columns": {
            "who": {"kind": "user"},
            "row": {"kind": "numeric"},
            "y": {"kind": "label", "task": "binary"},
        },
    }
)


def test_prepared_rows_of_users(tmp_path: pathlib.Path) -> None:
    users = transform(tmp_path)
    with pytest.raises(InputError, match="users=BoundUsers"):
        PrepareRows(SCHEMA, tmp_path / "out")
    rows = [{**row, "row": number, "y": 1} for number, row in enumerate(ROWS)]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        _ = (
            pipeline
            | beam.Create(rows)
            | PrepareRows(SCHEMA, tmp_path / "out", users=users)
        )
    found = {}
    for split in ("train", "val", "test"):
        table = pq.read_table(tmp_path / "out" / split)
        assert table.column_names == ["row", "label"]
        found[split] = collections.Counter(
            ROWS[int(row)]["who"] for row in table["row"].to_pylist()
        )
    before = collections.Counter(row["who"] for row in ROWS)
    assert {u: n for split in found.values() for u, n in split.items()} == {
        user: min(MOST, count) if user in found["train"] else count
        for user, count in before.items()
    }
    assert sum(map(len, found.values())) == len(before)
    assert list_blocks(str(tmp_path / "out/train")).bounded == users.note
    assert list_blocks(str(tmp_path / "out/test")).bounded is None
