"""Fifty mistakes that people make with a table of their own: each gets one right line.

Wrong values of flags are in tests/contracts/test_wrong_calls.py; here is what is wrong
with tables, schemas, and the order of commands.
"""

from __future__ import annotations

import gzip
import logging
import os
import pathlib
import shlex
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import dpsgd

HEAD = "id,age,plan,joined,churned\n"
ROWS = "".join(
    f"{row},{20 + row},{'free' if row % 3 else 'pro'},2023-0{1 + row % 9}-11,"
    f"{'yes' if row % 2 else 'no'}\n"
    for row in range(60)
)
LABEL = '[columns.churned]\nkind = "label"\ntask = "binary"\nclasses = ["no", "yes"]\n'
AGE = '[columns.age]\nkind = "numeric"\n'
GOOD = f"""version = 1
{LABEL}{AGE}[columns.plan]
kind = "category"
[columns.joined]
kind = "date"
parts = ["month"]
"""
PREPARE = "prepare --input churn.csv --out new"
WITH_GOOD = "prepare --schema good.toml --out new --input"
BATCHES = "batches --out new --batch-size 8 --epochs 1 --input"
TRAIN = "train --out new --epsilon 3 --delta 1e-5 --batches"

#: What was done wrong, the command, and what its answer must say.
MISTAKES = [
    # The first schema.
    ("no such table", "schema chrun.csv", "chrun.csv; there are none"),
    ("a spreadsheet", "schema churn.xlsx", "(a spreadsheet as CSV)"),
    ("an empty table", "schema empty.csv", "it is empty"),
    ("no header", "schema headless.csv", "`dpsgd schema --header`"),
    ("a name twice", "schema twice.csv", "some of columns 1, 2 have one name"),
    ("semicolons", "schema semicolon.csv --label churned", "--delimiter ';'"),
    ("label misspelt", "schema churn.csv --label chruned", "Did you mean churned?"),
    ("column misspelt", "schema churn.csv --numeric agee", "Did you mean age?"),
    ("two kinds", "schema churn.csv --numeric age --category id,age",
     "column age; it is in --numeric and --category"),
    ("label as an input", "schema churn.csv --label churned --text churned",
     "churned to be the label alone"),
    ("one class", "schema churn.csv --label churned --classes yes", "two classes or m"),
    ("schema is there", "schema churn.csv --out good.toml", "to be a new file"),
    # The schema.
    ("no schema", PREPARE, "`dpsgd schema churn.csv` writes a first one"),
    ("schema misspelt", f"{PREPARE} --schema god.toml", "`dpsgd schema TABLE` writes"),
    ("the table as schema", f"{PREPARE} --schema churn.csv", "churn.csv to be TOML"),
    ("no quotes", f"{PREPARE} --schema unquoted.toml", "to be TOML: Invalid value (at"),
    ("no version", f"{PREPARE} --schema no-version.toml", "Write version = 1"),
    ("no label", f"{PREPARE} --schema no-label.toml", "one column of kind label"),
    ("left to be chosen", f"{PREPARE} --schema unchosen.toml", "to be chosen: age"),
    ("kind misspelt", f"{PREPARE} --schema kind.toml", 'Write kind = "numeric"'),
    ("field misspelt", f"{PREPARE} --schema field.toml", "Did you mean range?"),
    ("column renamed", f"{PREPARE} --schema renamed.toml", "agee .* Did you mean age?"),
    ("no such user", f"{PREPARE} --schema no-user.toml", "columns user of the schema"),
    ("a class alone", f"{PREPARE} --schema one-class.toml", 'classes = ["no", "yes"]'),
    ("no range", f"{PREPARE} --schema no-range.toml", "Write range = [0, 100]"),
    ("two shares", f"{PREPARE} --schema shares.toml", "such as 80,10,10"),
    ("times without ends", f"{PREPARE} --schema time.toml", "Write val_from = 2024-"),
    ("split twice", f"{PREPARE} --schema good.toml --split 8,1,1", "into good.toml"),
    # The table.
    ("semicolons in a table", f"{WITH_GOOD} semicolon.csv", 'delimiter = ";" below'),
    ("text as numbers", f"{PREPARE} --schema text.toml", "All are: fix the schema"),
    ("a word for a number", f"{WITH_GOOD} word.csv", "word.csv:62: age is not"),
    ("another class", f"{WITH_GOOD} maybe.csv", "62: churned is none of the classes"),
    ("no label in a row", f"{WITH_GOOD} unlabelled.csv", "62: churned is missing"),
    ("other dates", f"{WITH_GOOD} dates.csv", "62: joined is not a date of the format"),
    ("latin-1", f"{WITH_GOOD} latin.csv", 'write encoding = "latin-1"'),
    ("a short row", f"{WITH_GOOD} short.csv", "short.csv:62: another number of cells"),
    ("half a file", f"{WITH_GOOD} cut.csv.gz", "Write or copy it again"),
    ("CSV called Parquet", f"{WITH_GOOD} fake.parquet", "what its name says?"),
    ("two kinds of files", f"{WITH_GOOD} mixed", "a glob that matches one kind"),
    ("lists", "prepare --input t.parquet --out new --schema list.toml", "length = 8"),
    ("a null", "prepare --input t.parquet --out new --schema strict.toml",
     "t.parquet:1: age is missing"),
    ("a full folder", "prepare --input churn.csv --schema good.toml --out mixed",
     "--out mixed to be a new or an empty folder"),
    # What is done with it.
    ("batches of text", f"{BATCHES} churn.csv", "`dpsgd prepare` makes it from text"),
    ("batches of a raw table", f"{BATCHES} t.parquet", "`dpsgd schema TABLE` writes"),
    ("batches of all splits", f"{BATCHES} data", "Give --input data/train"),
    ("batches of a few rows", "batches --out new --epochs 1 --input data/train "
     "--batch-size 64", "from 1 to 48"),
    ("no batches yet", f"{TRAIN} data/train --eval data/test", "run `dpsgd batches`"),
    ("tested on a raw table", f"{TRAIN} batches --eval churn.csv", "give a split of"),
    ("tested on training rows", f"{TRAIN} batches --eval data/train", "no training ex"),
    ("no such split", f"{TRAIN} batches --eval data/tset", "data/tset; there are none"),
    ("a file as model", f"{TRAIN} batches --eval data/test --model my_model.py",
     "Give --model as module:function"),
    ("epsilon alone", "train --out new --batches batches --eval data/test --epsilon 3",
     "epsilon=3.0 is not complete without --delta"),
    ("epsilon misspelt", "train --out new --batches batches --epislon 3", "--epsilon"),
    ("no run yet", "predict data --input churn.csv --out scores.parquet",
     "Name a folder that `dpsgd train` wrote"),
    ("a report of batches", "report batches", "Name a folder that `dpsgd train` wrote"),
    ("a part verified", "verify data/train", "Give `dpsgd verify data`"),
]  # fmt: skip


def _write_tables(root: pathlib.Path) -> None:
    texts = {
        "churn": HEAD + ROWS,
        "semicolon": (HEAD + ROWS).replace(",", ";"),
        "headless": ROWS,
        "twice": "age,age,churned\n1,2,no\n",
        "empty": "",
        "word": f"{HEAD}{ROWS}60,old,pro,2023-01-01,no\n",
        "maybe": f"{HEAD}{ROWS}60,3,pro,2023-01-01,maybe\n",
        "unlabelled": f"{HEAD}{ROWS}60,3,pro,2023-01-01,\n",
        "dates": f"{HEAD}{ROWS}60,3,pro,31.12.2023,no\n",
        "short": f"{HEAD}{ROWS}60,3\n",
    }
    for name, text in texts.items():
        (root / f"{name}.csv").write_text(text)
    last = "60,3,caf\xe9,2023-01-01,no\n"
    (root / "latin.csv").write_bytes(f"{HEAD}{ROWS}{last}".encode("latin-1"))
    (root / "cut.csv.gz").write_bytes(gzip.compress((HEAD + ROWS * 50).encode())[:200])
    (root / "mixed").mkdir()
    for name in ("fake.parquet", "churn.xlsx", "mixed/a.csv"):
        shutil.copy(root / "churn.csv", root / name)
    columns = {
        "age": [None, *[30.0] * 59], "plan": ["free"] * 60, "tags": [["a"]] * 60,
        "churned": ["no", "yes"] * 30,
    }  # fmt: skip
    for name in ("t.parquet", "mixed/b.parquet"):
        pq.write_table(pa.table(columns), root / name)


def _write_schemas(root: pathlib.Path) -> None:
    base = f"version = 1\n{LABEL}"
    schemas = {
        "good": GOOD,
        "unquoted": GOOD.replace('"numeric"', "numeric"),
        "no-version": GOOD.replace("version = 1\n", ""),
        "no-label": f"version = 1\n{AGE}",
        "unchosen": base + AGE.replace("numeric", "choose"),
        "kind": base + AGE.replace("numeric", "number"),
        "field": f"{base}{AGE}rnage = [0, 100]\n",
        "renamed": base + AGE.replace("age", "agee"),
        "no-user": f'{GOOD}[split]\nby = "hash"\ncolumn = "user"\n',
        "one-class": GOOD.replace('["no", "yes"]', '["no"]'),
        "no-range": f'version = 1\n{AGE}[columns.id]\nkind = "label"\n'
        'task = "regression"\n',
        "shares": f"{GOOD}[split]\nshares = [80, 20]\n",
        "time": f'{GOOD}[split]\nby = "time"\ncolumn = "joined"\n',
        "text": f'{base}[columns.plan]\nkind = "numeric"\n',
        "list": f'{base}[columns.tags]\nkind = "category"\n',
        "strict": f'{base}{AGE}missing = "refuse"\n',
    }
    for name, text in schemas.items():
        (root / f"{name}.toml").write_text(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Tables, schemas, prepared data and batches."""
    root = tmp_path_factory.mktemp("mistakes")
    _write_tables(root)
    _write_schemas(root)
    for line in (
        f"prepare --input {root}/churn.csv --schema {root}/good.toml --out {root}/data",
        f"batches --input {root}/data/train --out {root}/batches --batch-size 8 "
        "--epochs 1",
    ):
        result = CliRunner().invoke(dpsgd.cli, shlex.split(line))
        assert result.exit_code == 0, result.output
    return root


def test_there_are_fifty_mistakes() -> None:
    assert len({mistake for mistake, _, _ in MISTAKES}) == len(MISTAKES) >= 50
    assert len({command for _, command, _ in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize(
    ("command", "says"),
    [each[1:] for each in MISTAKES],
    ids=[mistake for mistake, _, _ in MISTAKES],
)
def test_a_natural_mistake_gets_one_right_line(
    command: str,
    says: str,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "argv", ["dpsgd", *shlex.split(command)])
    before = set(os.listdir(folder))
    with pytest.raises(SystemExit) as ended:
        dpsgd.main()
    assert ended.value.code == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    # Rows are converted before the bad ones are known: that may show its progress.
    (line,) = [
        each
        for each in printed.err.splitlines()
        if not each.startswith(("divide: ", "convert: "))
    ]
    assert line.startswith("error: ")
    for words in says.split(" .* "):
        assert words in line
    assert set(os.listdir(folder)) == before
