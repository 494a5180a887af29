"""What ``pipelines.tables.schema`` guarantees, and the right line of every fault."""

from __future__ import annotations

import json
import pathlib

import pytest

from accounting.core.validation import InputError
from pipelines.tables.schema import Schema

LABEL = '[columns.y]\nkind = "label"\ntask = "binary"\n'
EVERYTHING = """
version = 1

[input]
missing_values = ["?"]
delimiter = ";"
header = ["y", "a"]

[columns.y]
kind = "label"
task = "classes"
classes = ["a", "b", "c"]

[columns.number]
kind = "numeric"
range = [0, 10]
log = true
missing = "indicator"

[columns.scaled]
kind = "numeric"
mean = 2
scale = 0.5
missing = 3

[columns.vector]
kind = "numeric"
length = 4
separator = " "

[columns."a b"]
kind = "category"
name = "renamed"
vocabulary = ["x", 7, true]

[columns.tags]
kind = "category"
buckets = 9
length = 2

[columns.words]
kind = "text"
tokens = 3
buckets = 11

[columns.day]
kind = "date"
parts = ["year", "days"]
range = [2020-01-01, 2021-06-01T12:00:00]
zone = "Europe/Berlin"

[columns.flag]
kind = "boolean"
missing = "refuse"

[columns.left]
kind = "drop"
"""
SPLITS = [
    "",
    '[split]\nby = "fraction"\nshares = [1, 0, 1]\n',
    '[split]\nby = "hash"\ncolumn = "who"\nsalt = "s"\n',
    '[split]\nby = "time"\ncolumn = "day"\nval_from = 2020-05-01\n'
    "test_from = 2020-06-01T10:00:00\n",
]


def read(folder: pathlib.Path, text: str) -> Schema:
    path = folder / "schema.toml"
    path.write_text(text)
    return Schema.read(path)


@pytest.mark.parametrize("split", SPLITS)
def test_json_gives_the_schema_back(tmp_path: pathlib.Path, split: str) -> None:
    schema = read(tmp_path, EVERYTHING + split)
    fields = json.loads(json.dumps(schema.to_json()))
    assert Schema.from_json(fields) == schema
    assert json.loads(json.dumps(schema.description))["schema"] == fields


def test_what_columns_become(tmp_path: pathlib.Path) -> None:
    outputs = read(tmp_path, EVERYTHING).outputs
    found = {out.name: (out.role, out.dtype, out.shape, out.size) for out in outputs}
    assert found == {
        "label": ("label", "int32", (), 0),
        "number": ("number", "float32", (), 0),
        "number_missing": ("number", "int8", (), 0),
        "scaled": ("number", "float32", (), 0),
        "vector": ("numbers", "float32", (4,), 0),
        "renamed": ("id", "int32", (), 5),
        "tags": ("ids", "int32", (2,), 9),
        "words": ("ids", "int32", (3,), 11),
        "day_year": ("id", "int32", (), 4),
        "day_days": ("number", "float32", (), 0),
        "flag": ("number", "float32", (), 0),
    }
    assert {out.name for out in outputs if out.nullable} == {"day_days"}
    needed = read(tmp_path, EVERYTHING + SPLITS[2]).needed
    assert (needed[-1], "left" in needed) == ("who", False)


def column(lines: str, name: str = "age") -> str:
    return f"version = 1\n{LABEL}[columns.{name}]\n{lines}\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("version = 2", "version = 1"),
        (LABEL, "version = 1"),
        ("version = [", "to be TOML: "),
        ("version = 1", "there is none"),
        (f"version = 1\ncolums = 3\n{LABEL}", "Did you mean columns?"),
        (f"version = 1\n{LABEL}{LABEL.replace('.y', '.z')}", "kind label .*; y, z"),
        (column('kind = "numerc"'), "column age .* Did you mean numeric?"),
        (column('kind = "choose"'), "to be chosen: age. Write one of numeric"),
        (column('kind = "numeric"\nrnage = [0, 1]'), "rnage .* Did you mean range?"),
        (column('kind = "numeric"\nrange = [1, 0]'), r"range = \[1, 0\] of column age"),
        (column('kind = "numeric"\nlog = 1'), "log = 1 .* boolean"),
        (column('kind = "numeric"\nmean = 1'), "column age .*mean and scale"),
        (column('kind = "numeric"\nmean = 1\nscale = 0'), "scale = 0 .*greater than 0"),
        (column('kind = "numeric"\nmissing = "nna"'), "'nan', 'indicator' or 'refuse'"),
        (column('kind = "category"\nbuckets = 1'), "buckets = 1 .*equal to 2"),
        (column('kind = "category"\nbuckets = 5\nvocabulary = ["a"]'), "not both"),
        (column('kind = "category"\nvocabulary = ["a", "a"]'), "different values"),
        (column('kind = "category"\nseparator = "|"'), "length = 8"),
        (column('kind = "date"\nparts = ["minute"]'), "among year, month"),
        (column('kind = "date"\nparts = ["days"]'), "range = \\[2020-01-01"),
        (column('kind = "date"\nrange = [2021-01-01, 2020-01-01]'), "smaller first"),
        (column('kind = "date"\nzone = "Mars"'), "zone = 'Mars'"),
        (column('kind = "date"\nformat = "%Z"'), "format = '%Z' .*without %Z"),
        (column('kind = "numeric"', "weight"), 'weight.* Write name = "weight_2"'),
        (column('kind = "numeric"', "label"), 'label.* Write name = "label_2"'),
        (column('kind = "numeric"\n[columns."a-b"]\nkind = "numeric"\n[columns.a_b]\n'
         'kind = "boolean"'), 'a-b and a_b .* Write name = "a_b_2"'),
        (column("").replace('task = "binary"', 'task = "regression"'),
         "column y.* range.* public"),
        (column("").replace('task = "binary"', 'task = "classes"'),
         "column y.* classes"),
        (column("").replace('task = "binary"', 'task = "binary"\nclasses = ["a"]'),
         "two classes"),
        (f"version = 1\n{LABEL}[split]\nby = 'hash'", "split.* column"),
        (f"version = 1\n{LABEL}[split]\nby = 'time'\ncolumn = 'd'", "val_from"),
        (f"version = 1\n{LABEL}[split]\nby = 'time'\ncolumn = 'y'\n"
         "val_from = 2020-01-01\ntest_from = 2020-01-02",
         "column y of .split. to be of kind date"),
        (f"version = 1\n{LABEL}[split]\nshares = [0, 1, 1]", "shares = .*train has"),
        (f"version = 1\n{LABEL}[input]\ndelimiter = '||'", "delimiter = '||' .*1 char"),
        (column('kind = "numeric"\nstack = "s"\n[columns.b]\nkind = "category"\n'
         'stack = "s"'), "stack s"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_refused_by_file_column_and_remedy(
    tmp_path: pathlib.Path, text: str, told: str
) -> None:
    with pytest.raises(InputError, match=told) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused_with_who_writes_it() -> None:
    with pytest.raises(InputError, match=r"No such file.*`dpsgd schema TABLE`"):
        Schema.read("nowhere.toml")
