"""`dpsgd prepare` of a table with a column of users."""

from __future__ import annotations

import collections
import csv
import decimal
import json
import os
import pathlib
import shutil
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from pipelines.batches.folder import read_manifest
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.inputs.source_table import table_of
from pipelines.tables.schema import SPLITS, Schema
from tests.pipelines.conftest import Command, Ran, contents
from tests.pipelines.tables.rows_of_tables import Read, read

ROWS, MOST = 600, 2
USER = np.random.default_rng(8).zipf(1.4, ROWS) % 90
SCHEMA = """\
version = 1
[columns.person]
kind = "user"
[columns.row]
kind = "numeric"
range = [-1, 1]
[columns.y]
kind = "label"
task = "binary"
"""
FLAGS = f"--max-examples-per-user {MOST} --num-examples {ROWS}"


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A table as CSV and as Parquet; ``row`` over their number says which row it is."""
    monkeypatch.chdir(tmp_path)
    names = [f"person {user}" for user in USER]
    row, label = np.arange(ROWS) / ROWS, np.arange(ROWS) % 2
    with open("table.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["person", "row", "y"])
        writer.writerows(zip(names, row, label, strict=True))
    table = pa.table({"person": names, "row": row.astype("f4"), "y": label})
    pq.write_table(table, "table.parquet")
    pathlib.Path("schema.toml").write_text(SCHEMA)
    return tmp_path


#: ``run(line)`` prepares as a line says, by default into ``out`` with ``FLAGS``.
Run = Callable[..., Ran]


@pytest.fixture
def run(command: Command) -> Run:
    """See ``Run``."""

    def run(
        line: str,
        out: str = "out",
        flags: str = FLAGS,
        how: str = "--schema schema.toml",
    ) -> Ran:
        call = f"prepare {how} --out {out} --row-group-rows 40 {line} {flags}"
        return command(*call.split())

    return run


def rows_of(*place: str) -> np.ndarray:
    return np.rint(pq.read_table(pathlib.Path(*place))["row"].to_numpy() * ROWS).astype(
        int
    )


@pytest.mark.parametrize(
    ("flags", "source"), [("", "csv"), ("--bound-held-out", "parquet")]
)
def test_users_are_whole_and_bounded_and_their_ids_gone(
    run: Run, flags: str, source: str
) -> None:
    ran = run(f"--input table.{source} --json {flags}")
    assert ran.code == 0, ran.err
    assert sorted(os.listdir()) == ["out", "schema.toml", "table.csv", "table.parquet"]
    assert sorted(os.listdir("out")) == ["_prepared.json", "test", "train", "val"]
    for path in pathlib.Path("out").rglob("*.*"):
        assert b"person 1" not in path.read_bytes()
    count, parts = collections.Counter(USER), []
    for split in SPLITS:
        users = USER[rows_of("out", split)]
        parts.append(set(users))
        is_bounded = split == "train" or "held" in flags
        most = MOST if is_bounded else ROWS
        assert max(count[user] for user in parts[-1]) > MOST
        assert collections.Counter(users) == {u: min(most, count[u]) for u in parts[-1]}
        note = list_blocks(f"out/{split}").bounded
        assert (note is not None) == is_bounded
        if note is not None:
            assert (note.user_column, note.max_examples_per_user) == ("person", MOST)
            assert note.num_examples == ROWS
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(set(USER))
    train, test = (
        table_of(list_blocks(f"out/{x}", of_numbers=False)) for x in ("train", "test")
    )
    assert train.is_held_out(test)
    assert json.loads(ran.out)["unit_of_privacy"] == "user"


def test_nothing_is_told_and_nothing_is_left_of_too_few_slots(run: Run) -> None:
    told, before = run("--input table.csv").printed, sorted(os.listdir())
    kept, users = len(rows_of("out", "train")), len(set(USER))
    for slots, code in ((kept, 0), (kept - 1, 2)):
        flags = f"--max-examples-per-user {MOST} --num-examples {slots}"
        ran = run("--input table.csv", f"out{code}", flags)
        assert ran.code == code
    assert f"num_examples={kept - 1} to be at least the rows that are kept" in ran.err
    assert sorted(os.listdir()) == sorted([*before, "out0"])
    told += ran.err
    for number in (kept, users, np.bincount(USER).max(), ROWS - kept):
        assert f" {number}" not in told


def test_the_key_chooses_the_same_rows_in_whatever_process(run: Run) -> None:
    for out, more in (
        ("here", "--threads 1 --memory-limit 1GiB"),
        ("engine", "--runner FnApiRunner"),
    ):
        assert run(f"--input table.csv --key-file key {more}", out).code == 0
    assert run("--input table.csv", "other").code == 0
    found = contents("here")
    assert len(found) == 4
    assert contents("engine") == found
    assert contents("other") != found


def read_ids(ids: Any) -> Read:
    """Returns what the ids of rows become."""
    columns = {"person": {"kind": "user"}, "y": {"kind": "label", "task": "binary"}}
    schema = Schema.from_json({"version": 1, "columns": columns})
    return read(schema, {"person": ids, "y": np.resize([0, 1], len(ids))})


LARGE = 2**53


def decimals(*texts: str) -> pa.Array:
    return pa.array(map(decimal.Decimal, texts), pa.decimal128(12, 3))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["7", "7.0", " 7 ", "7.00", "\u00a07", "\uff17.0", "8"], 2),
        (["ann", " ann", "ann\t", "ann\u2003", "Ann"], 2),
        (["Jos\u00e9", "Jose\u0301"], 1),
        (pa.array([b"7", b"7.0", b" 7 ", "José".encode()]), 2),
        (pa.array(["7", "7.0", "8"]).dictionary_encode(), 2),
        (pa.array([7, 7, 8], pa.int8()), 2),
        (pa.array([7.0, 7.0, 8.0]), 2),
        (decimals("7", "7.000", "-7"), 2),
        (pa.array([LARGE, LARGE + 1, LARGE + 1]), 2),
        (pa.array([2**64 - 1, 2**64 - 2], pa.uint64()), 2),
        ([str(LARGE), str(LARGE + 1), f" {LARGE}"], 2),
        (["007", "7"], 2),  # no program writes the number 7 with zeros before it
        ([*map(str, range(99)), *(f"{x}.0" for x in range(99))], 99),  # two of pandas
    ],
    ids=str,
)
def test_forms_of_an_id_are_one_person(ids: Any, expected: int) -> None:
    found = read_ids(ids)
    assert len(found.users) == len(ids)
    assert len(set(found.users)) == expected


@pytest.mark.parametrize(
    "ids",
    [
        ["ann", None], ["ann", " \u00a0"], ["7", "nan"], [1.5, 2.0], [1.0, np.nan],
        [1.0, float(LARGE)], ["1", f"{LARGE}.0"], ["1", "7.0E0"], decimals("7.5"),
        pa.array([b"\xff\xfe"]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_id_is_refused(ids: Any) -> None:
    (found,) = {each for each in read_ids(ids).reasons if each is not None}
    assert found.startswith("person is ")
    assert "ann" not in found


def test_rows_of_one_person_are_in_one_part_whatever_form_the_ids_have(
    run: Run,
) -> None:
    person = np.repeat(np.arange(40), 2)
    ids = [f"Jos\u00e9 {number}" for number in person]
    ids[1::2] = [unicodedata.normalize("NFD", name) for name in ids[1::2]]
    table = {"person": ids, "row": person / ROWS, "y": person % 2}
    pq.write_table(pa.table(table), "table.parquet")
    assert run("--input table.parquet").code == 0
    found = [set(rows_of("out", split)) for split in SPLITS]
    assert sum(map(len, found)) == len(set.union(*found)) == 40
    assert max(map(len, found[1:])) > 0


def test_the_option_names_the_column(run: Run) -> None:
    text = SCHEMA.replace('[columns.person]\nkind = "user"\n', "")
    pathlib.Path("schema.toml").write_text(text)
    refused = run("--input table.csv")
    assert refused.code == 2
    assert "--user" in refused.err
    assert run("--input table.csv --user person").code == 0
    assert max(collections.Counter(USER[rows_of("out", "train")]).values()) == MOST


def test_numbers_without_a_schema_stay_as_they_are(run: Run) -> None:
    """All rows are for training; of each user so many are kept, and no id."""
    rows, pair = np.arange(ROWS), pa.list_(pa.float32(), 2)
    columns = {
        "row": pa.array(rows, pa.int64()),
        "half": pa.array((rows % 7).astype("f2")),
        "on": pa.array(rows % 3 == 0),
        "id": pa.array(USER, pa.int32()),
        "pair": pa.FixedSizeListArray.from_arrays(
            pa.array(np.repeat(rows, 2).astype("f4")), type=pair
        ),
    }
    pq.write_table(pa.table(columns), "numbers.parquet")
    ran = run("--input numbers.parquet --user id", how="")
    assert ran.code == 0, ran.err
    found = list_blocks("out/train")
    assert found.bounded is not None
    types = [each.dtype for each in found.columns]
    assert types == ["int64", "float16", "uint8", "float32"]
    rows_left = pq.read_table("out/train")
    table = {n: np.array(rows_left[n].to_pylist()) for n in rows_left.column_names}
    mine = table["row"]
    count = collections.Counter(USER)
    assert collections.Counter(USER[mine]) == {u: min(MOST, count[u]) for u in count}
    assert (table["half"] == mine % 7).all()
    assert (table["on"] == (mine % 3 == 0)).all()
    assert (table["pair"] == mine[:, None]).all()
    assert pq.read_schema("out/train/part-00000.parquet").metadata.keys() == {
        b"dpsgd.dataset"
    }


@pytest.mark.parametrize(
    ("table", "line", "says"),
    [
        ({"id": [1], "x": ["a"]}, "--user id", "column x of type string"),
        ({"id": [1, None], "x": [0.0, 1.0]}, "--user id", "id is missing"),
        ({"id": [1], "x": [0.0]}, "--user ids", "Did you mean id?"),
        ({"id": [1], "x": [0.0]}, "", "--schema"),
        (None, "--input table.csv --user person", "Expected --schema to read"),
    ],
)
def test_what_is_no_table_of_numbers_is_refused(
    run: Run, table: Any, line: str, says: str
) -> None:
    if table is not None:
        pq.write_table(pa.table(table), "numbers.parquet")
        line = f"--input numbers.parquet {line}"
    ran = run(line, how="")
    assert ran.code == 2
    assert says in ran.err
    assert not pathlib.Path("out").exists()


def test_what_another_tool_made_of_bounded_rows_is_refused(run: Run) -> None:
    """It keeps the note; of a user it may hold more rows."""
    assert run("--input table.csv").code == 0
    found = pq.read_table("out/train")
    for name, made in {
        "fewer": found.slice(1),
        "more": pa.concat_tables([found, found.slice(0, 1)]),
    }.items():
        shutil.copytree("out", name)
        pathlib.Path(f"{name}-alone").mkdir()
        for place in (f"{name}-alone", f"{name}/train"):  # with a record, and without
            pq.write_table(made, f"{place}/part-00000.parquet")
            with pytest.raises(InputError, match="may have more rows than"):
                list_blocks(place)
    shutil.copytree("out", "whole")
    assert list_blocks("whole/train").bounded is not None
    shutil.copy("out/train/part-00000.parquet", "out/train/part-00009.parquet")
    with pytest.raises(InputError, match="may have more rows than"):
        list_blocks("out/train")


def test_parts_bounded_one_by_one_are_refused_together(run: Run) -> None:
    """Of a user of both there may be twice as many rows as their notes say."""
    for name in ("may", "june"):
        assert run("--input table.csv --key-file key", f"both/{name}").code == 0
    with pytest.raises(InputError, match="to be one folder of rows"):
        list_blocks("both/*/train/*.parquet")


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("truncated-poisson", ""),
        ("dynamic-shuffle", "--sampler dynamic-shuffle not to be used"),
        ("balls-and-bins", "balls-and-bins not to be used on up to 2 rows"),
    ],
)
def test_samplers_that_place_every_slot_or_have_no_proof_are_refused(
    run: Run, command: Command, sampler: str, message: str
) -> None:
    assert run("--input table.csv --key-file key").code == 0
    call = "batches --input out/train --out b --batch-size 20 --epochs 1 --sampler "
    call += sampler
    shared = command(*call.split(), "--key-file", "key")
    ran = command(*call.split())
    assert message in ran.err
    if message:
        assert ran.code == shared.code == 2
    else:
        assert ran.code == 0
        assert read_manifest("b").plan.num_examples == ROWS
        assert "it chose the rows of users" in shared.err
