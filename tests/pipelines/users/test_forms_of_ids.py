"""A person's id in several forms is one person, for every command that counts users."""

from __future__ import annotations

import decimal
import pathlib
import unicodedata
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.tables.convert import SPLITS
from tests.pipelines.conftest import Command

#: All rows are for training.
SCHEMA = """\
version = 1
[split]
by = "hash"
column = "person"
shares = [1, 0, 0]
[columns.person]
kind = "user"
[columns.y]
kind = "label"
task = "binary"
"""
LARGE = 2**53


def rows_kept(ids: Any, run: Command, most: int = 1) -> dict[str, int | str]:
    """Returns the rows that each command keeps of a table, or what it refuses."""
    labels = np.resize([0, 1], len(ids)).astype(np.int8)
    pq.write_table(pa.table({"person": ids, "y": labels}), "table.parquet")
    pathlib.Path("schema.toml").write_text(SCHEMA)
    users = f"--input table.parquet --max-examples-per-user {most} --num-examples 1000"
    calls = {
        "bound": f"bound --user-column person --out bound {users}",
        "prepare": f"prepare --schema schema.toml --out prepare {users}",
    }
    found: dict[str, int | str] = {}
    for name, call in calls.items():
        ran = run(*call.split())
        out = pathlib.Path(name, "train" if name == "prepare" else "")
        found[name] = pq.read_table(out).num_rows if not ran.code else ran.printed
    return found


def decimals(*texts: str) -> pa.Array:
    return pa.array(map(decimal.Decimal, texts), pa.decimal128(12, 3))


@pytest.mark.parametrize(
    ("ids", "persons"),
    [
        (["7", "7.0", " 7 ", "7.00", "7.0E0", "\u00a07", "\uff17.0", "8"], 2),
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
    ],
    ids=str,
)
def test_persons_are_counted_alike(
    ids: Any,
    persons: int,
    command: Command,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rows_kept(ids, command) == {"bound": persons, "prepare": persons}


@pytest.mark.parametrize(
    "ids",
    [
        ["ann", None],
        ["ann", " \u00a0"],
        ["7", "nan"],
        [1.5, 2.0],
        [1.0, np.nan],
        [1.0, float(LARGE)],
        ["1", f"{LARGE}.0"],
        decimals("7.5"),
        pa.array([b"\xff\xfe"]),
        [True, False],
    ],
    ids=str,
)
def test_what_is_no_id_is_refused_alike(
    ids: Any,
    command: Command,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = rows_kept(ids, command)
    for told in found.values():
        assert "person" in str(told)
        assert "ann" not in str(told)
        assert "Traceback" not in str(told)


def test_two_tables_of_pandas_are_those_of_200_persons(
    command: Command, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two parts had a missing id, and so its ids were floats."""
    monkeypatch.chdir(tmp_path)
    users = np.arange(200)
    ids = [*users.astype(str), *users.astype(float).astype(str)]
    assert rows_kept(ids, command) == {"bound": 200, "prepare": 200}


def test_rows_of_one_person_are_in_one_split_whatever_form_their_ids_have(
    command: Command, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    person = np.repeat(np.arange(40), 2)
    ids = [f"Jos\u00e9 {number}" for number in person]
    ids[1::2] = [unicodedata.normalize("NFD", name) for name in ids[1::2]]
    table = {"person": ids, "number": person.astype(float), "y": person % 2}
    pq.write_table(pa.table(table), "table.parquet")
    halves = SCHEMA.replace("[1, 0, 0]", "[1, 1, 0]")
    pathlib.Path("schema.toml").write_text(
        f'{halves}[columns.number]\nkind = "numeric"\n'
    )
    call = "prepare --schema schema.toml --input table.parquet --out out"
    flags = "--max-examples-per-user 2 --num-examples 1000"
    assert command(*call.split(), *flags.split()).code == 0
    found = [set(pq.read_table(f"out/{s}")["number"].to_pylist()) for s in SPLITS]
    assert not found[0] & found[1]
    assert min(map(len, found[:2])) > 0
