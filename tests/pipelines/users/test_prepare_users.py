"""A table with a column of users: prepared, split by user, bounded."""

from __future__ import annotations

import collections
import csv
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from pipelines.batches.folder import read_manifest
from pipelines.core.users.bounded import BOUNDED, Bounded
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    list_blocks,
    list_row_groups,
)
from pipelines.inputs.source_table import KEPT_NAME, source_digests, table_of
from pipelines.tables.convert import SPLITS
from pipelines.tables.job.prepare_job import prepare
from pipelines.tables.prepared_files import verify_prepared
from pipelines.tables.schema.first_schema import first_schema
from pipelines.tables.schema.schema import Schema
from pipelines.tables.table_format import TableOptions
from pipelines.users import bound_folder, prepare_users
from tests.pipelines.conftest import Command, Ran, contents

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


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A table as CSV and as Parquet; ``row`` over their number says which row it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bound_folder, "RUN_ROWS", 150)
    names = [f"person {user}" for user in USER]
    row, label = np.arange(ROWS) / ROWS, np.arange(ROWS) % 2
    with open("table.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["person", "row", "y"])
        writer.writerows(zip(names, row, label, strict=True))
    table = pa.table({"person": names, "row": row, "y": label})
    pq.write_table(table, "table.parquet")
    pathlib.Path("schema.toml").write_text(SCHEMA)
    return tmp_path


#: ``run(line)`` prepares as a line says, by default into ``out`` with ``FLAGS``.
Run = Callable[..., Ran]


@pytest.fixture
def run(folder: pathlib.Path, command: Command) -> Run:
    """See ``Run``."""

    def run(line: str, out: str = "out", flags: str = FLAGS) -> Ran:
        call = f"prepare --schema schema.toml --out {out} --row-group-rows 40"
        return command(*call.split(), *line.split(), *flags.split())

    return run


def rows_of(out: str, split: str) -> np.ndarray:
    found = pq.read_table(pathlib.Path(out, split))["row"].to_numpy()
    return np.rint(found * ROWS).astype(int)


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_users_are_whole_and_bounded_and_their_ids_gone(
    run: Run, command: Command, source: str
) -> None:
    ran = run(f"--input table.{source} --json")
    assert ran.code == 0
    users = {split: USER[rows_of("out", split)] for split in SPLITS}
    parts = [set(found) for found in users.values()]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(set(USER))
    count = collections.Counter(USER)
    assert collections.Counter(users["train"]) == {
        user: min(MOST, count[user]) for user in parts[0]
    }
    assert max(count[user] for user in parts[0]) > MOST
    for split in ("val", "test"):  # all of their rows
        assert collections.Counter(users[split]) == {
            u: count[u] for u in set(users[split])
        }
    kept, shown = len(users["train"]), json.loads(ran.out)
    assert shown["unit_of_privacy"] == "user"
    assert kept not in shown.values()
    assert not pathlib.Path("out.unfinished").exists()
    assert table_of(list_row_groups("out/train")).part == "train"
    for path in pathlib.Path("out").rglob("*.*"):
        assert path.name != KEPT_NAME  # the record of all parts says it
        assert b"person 1" not in path.read_bytes()
    for split in SPLITS:
        table = pq.read_table(pathlib.Path("out", split))
        assert table.column_names == ["row", "label"]
        told = json.loads(table.schema.metadata[DATASET_METADATA_KEY])
        assert (BOUNDED in told) == (split == "train")
        assert told["schema"]["columns"]["person"] == {"kind": "user"}
    found = verify_prepared("out")
    assert (found.findings, found.num_rows) == ((), None)
    call = "batches --input out/train --out b --batch-size 20 --epochs 1"
    assert command(*call.split()).code == 0
    manifest = read_manifest("b")
    note = Bounded.of(manifest.dataset)
    assert note is not None
    assert (note.user_column, note.max_examples_per_user) == ("person", MOST)
    assert manifest.plan.num_examples == ROWS


@pytest.mark.parametrize("sample", ["", "--sample users "])
def test_held_out_rows_are_bounded_where_that_is_asked_for(
    run: Run, sample: str
) -> None:
    assert run(f"--input table.csv {sample}--bound-held-out").code == 0
    count, parts = collections.Counter(USER), []
    for split in ("val", "test"):
        users = USER[rows_of("out", split)]
        parts.append(set(users))
        # Every user has rows, and as many as it may have.
        assert collections.Counter(users) == {
            user: min(MOST, count[user]) for user in parts[-1]
        }
        note = list_blocks(f"out/{split}").bounded
        assert note is not None
        assert (note.sampled, note.max_examples_per_user) == ("rows", MOST)
        assert note.num_examples == ROWS * (MOST if sample else 1)
    assert parts[0].isdisjoint(parts[1])
    assert max(count[user] for user in set.union(*parts)) > MOST
    assert verify_prepared("out").findings == ()
    train, test = (table_of(list_row_groups(f"out/{x}")) for x in ("train", "test"))
    assert train.is_held_out(test)
    for path in pathlib.Path("out").rglob("*.*"):
        assert b"person 1" not in path.read_bytes()


def test_too_few_slots_for_held_out_rows_are_mended_as_the_error_says(run: Run) -> None:
    split = '[split]\nby = "hash"\nshares = [5, 90, 5]\n'
    pathlib.Path("schema.toml").write_text(SCHEMA + split)
    few = "--max-examples-per-user 1 --num-examples 60 --bound-held-out"
    # Some 81 of 90 users are in `val`, and four or five in `train`.
    ran = run("--input table.csv", flags=few)
    assert ran.code == 2
    assert "num_examples=60 to be at least the rows that are kept" in ran.err
    more = f"--max-examples-per-user 2 --num-examples {ROWS} --bound-held-out"
    assert run("--input table.csv", flags=more).code == 0
    for part in SPLITS:
        note = list_blocks(f"out/{part}").bounded
        assert note is not None
        assert (note.max_examples_per_user, note.num_examples) == (2, ROWS)


def test_a_killed_job_goes_on_and_another_one_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DiedError(BaseException):
        pass

    def dies(*_: Any) -> None:
        raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(prepare_users, "write_record", dies)
        with pytest.raises(DiedError):
            run("--input table.csv")
    assert not pathlib.Path("out").exists()
    assert "out.unfinished to be of the same job" in (
        run("--input table.csv --bound-held-out").err
    )
    other = f"--max-examples-per-user 1 --num-examples {ROWS}"
    for ran in (run("--input table.csv", flags=other), run("--input table.parquet")):
        assert ran.code == 2
        assert "out.unfinished to be of the same job" in ran.err
    monkeypatch.setattr("pipelines.users.bound.bound", dies)  # both are done
    monkeypatch.setattr("pipelines.tables.job.prepare_job.prepare", dies)
    assert run("--input table.csv").code == 0
    assert verify_prepared("out").findings == ()


def test_too_few_slots_are_mended_as_the_error_says(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = f"--threads 1 --max-examples-per-user {MOST} --num-examples 9"
    ran = run("--input table.csv", flags=few)
    assert ran.code == 2
    assert "num_examples=9 to be at least the rows that are kept" in ran.err

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("it was done before")

    monkeypatch.setattr("pipelines.tables.job.prepare_job.prepare", again)
    assert run("--input table.csv").code == 0


def test_refused_rows_leave_nothing_that_refuses_the_corrected_schema(
    run: Run,
) -> None:
    wrong = SCHEMA.replace('task = "binary"', 'task = "binary"\nclasses = ["7", "8"]')
    for more in ("", " --runner FnApiRunner"):
        pathlib.Path("schema.toml").write_text(wrong)
        ran = run(f"--input table.csv{more}")
        assert ran.code == 2
        assert "malformed" in ran.err
        assert not list(pathlib.Path().glob("*unfinished*"))
        pathlib.Path("schema.toml").write_text(SCHEMA)
        assert run(f"--input table.csv{more}", f"out{len(more)}").code == 0


def test_records_of_users(run: Run) -> None:
    run("--input table.csv --sample users")
    table = pq.read_table("out/train")
    assert table.schema.field("row").type == pa.list_(
        pa.field("item", pa.float32(), nullable=False), MOST
    )
    assert pq.read_table("out/val")["row"].type == pa.float32()
    assert verify_prepared("out").findings == ()


def test_kept_users_are_whole_and_batches_want_them_bounded(
    run: Run, command: Command
) -> None:
    ran = run("--input table.csv --json", flags="--keep-users")
    assert ran.code == 0
    shown = json.loads(ran.out)
    assert "columns_left_out" not in shown
    assert "rows" not in shown
    tables = [pq.read_table(f"out/{split}") for split in SPLITS]
    parts = [set(table["person"].to_pylist()) for table in tables]
    assert sum(map(len, tables)) == ROWS
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(set(USER))
    assert verify_prepared("out").findings == ()
    with pytest.raises(InputError, match="no column person in --input") as error:
        list_blocks("out/train")
    remedy = str(error.value).split("`dpsgd ")[1].split("`")[0]
    remedy = remedy.replace(" K ", f" {MOST} ").replace(" N ", f" {ROWS} ")
    whole = command(*remedy.replace("out/train", "out").split())
    assert (whole.code, "one split of out" in whole.err) == (2, True)
    assert command(*remedy.split()).code == 0
    assert list_blocks("bounded").bounded is not None
    kept = collections.Counter(USER[rows_of("bounded", "")])
    assert max(kept.values()) == MOST
    assert len(kept) == len(parts[0])
    # It names the same table as the parts that were not bounded.
    table, test = (table_of(list_row_groups(path)) for path in ("bounded", "out/test"))
    assert table.sources == tuple(source_digests(["table.csv"]))
    assert table.part == "train"
    assert table.is_held_out(test)
    assert not table.is_held_out(table)
    assert pathlib.Path("bounded", KEPT_NAME).stat().st_mode & 0o777 == 0o600


def test_an_engine_writes_the_same_bytes(run: Run) -> None:
    for out, more in (("here", ""), ("engine", " --runner FnApiRunner")):
        assert run(f"--input table.csv --key-file key{more}", out).code == 0
    found = contents("here")
    assert len(found) > 6
    assert contents("engine") == found


@pytest.mark.parametrize("missing", ["", "NA"])
def test_a_row_without_a_user_is_malformed(run: Run, missing: str) -> None:
    pathlib.Path("few.csv").write_text(f"person,row,y\na,0,1\n{missing},0,1\n")
    text = SCHEMA.replace(
        "version = 1", 'version = 1\n[input]\nmissing_values = ["NA"]'
    )
    pathlib.Path("schema.toml").write_text(text)
    ran = run("--input few.csv")
    assert ran.code == 2
    assert "few.csv:3: person is missing, or no whole" in ran.err


def test_a_user_that_is_no_whole_number_is_malformed(run: Run) -> None:
    wrong = [np.nan, np.inf, 1e300, 0.5, None]
    users = pa.array([1.0, *wrong, 2.0], pa.float64(), from_pandas=False)
    table = pa.table({"person": users, "row": [0.0] * 7, "y": [0, 1] * 3 + [0]})
    pq.write_table(table, "few.parquet")
    ran = run("--input few.parquet")
    assert ran.code == 2
    assert "person is missing, or no whole number" in ran.err
    for row in range(2, 7):
        assert f"few.parquet:{row}" in ran.err


@pytest.mark.parametrize(
    "rounded", ["1.2345678901234568e+17", "123456789012345680.0", "-9.1E18"]
)
def test_a_user_that_floating_point_rounded_is_malformed(
    run: Run, rounded: str
) -> None:
    """It stands in another file with all of its digits, as another user."""
    head, exact = "person,row,y\n", "123456789012345678,0.5,1\n1e99,0.5,1\n"
    pathlib.Path("table.csv").write_text(f"{head}{exact}{rounded},0.5,0\n7.0,0,0\n")
    found = run("--input table.csv")
    assert found.code == 2
    assert "table.csv:4: person is a number that floating point rounds" in found.err
    assert found.err.count("table.csv:") == 1
    assert rounded not in found.err


def test_a_schema_of_users_is_not_prepared_without_a_bound(run: Run) -> None:
    with pytest.raises(InputError, match="column person of kind user to be bounded"):
        prepare("table.csv", "out", TableOptions(schema=Schema.read("schema.toml")))
    text = SCHEMA.replace('"user"', '"drop"')
    pathlib.Path("schema.toml").write_text(text)
    assert run("--input table.csv", flags="").code == 0


@pytest.mark.parametrize(
    ("split", "says"),
    [
        ('by = "fraction"', "not to be by fraction beside column person"),
        ('by = "hash"\ncolumn = "row"', "by hash of row not to cut users"),
        (
            'by = "time"\ncolumn = "day"\nval_from = 2020-01-01\n'
            "test_from = 2020-01-01",
            "by time of day not to cut users of column person",
        ),
    ],
)
def test_splits_that_cut_users_are_refused_unless_said(
    folder: pathlib.Path, split: str, says: str
) -> None:
    def read(more: str) -> Schema:
        (folder / "s.toml").write_text(SCHEMA + "[split]\n" + split + more)
        return Schema.read(folder / "s.toml")

    with pytest.raises(InputError, match=says):
        read("")
    if "fraction" not in split:
        schema = read("\ncut_users = true\n")
        assert schema.split.cut_users
        assert Schema.from_json(schema.to_json()) == schema


def test_a_first_schema_splits_by_user_and_models_do_not_see_it(
    folder: pathlib.Path,
) -> None:
    kinds = {"person": "user", "row": "numeric"}
    text = first_schema("table.csv", label="y", kinds=kinds)
    (folder / "first.toml").write_text(text)
    schema = Schema.read(folder / "first.toml")
    assert (schema.split.by, schema.split.column) == ("hash", "person")
    assert (schema.user, schema.inputs) == ("person", ("row",))


def test_two_columns_of_users_are_refused(folder: pathlib.Path) -> None:
    (folder / "s.toml").write_text(SCHEMA + '[columns.other]\nkind = "user"\n')
    with pytest.raises(InputError, match=r"one column of kind user .* person, other"):
        Schema.read(folder / "s.toml")
