"""What ``pipelines.tables.schema.first_schema`` guarantees."""

from __future__ import annotations

import datetime
import pathlib
import tomllib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accounting.core.validation import InputError
from pipelines.tables.first_schema import first_schema
from pipelines.tables.kinds import Date
from pipelines.tables.reading import RawInputs
from pipelines.tables.schema import InputOptions, Schema

TYPES: dict[str, Any] = {
    "age": pa.array([1, 2]),
    "weight": pa.array([1.5, None]),
    "job": pa.array(["a", "b"]).dictionary_encode(),
    "ok": pa.array([True, False]),
    "day": pa.array([0, 1], pa.date32()),
    "at": pa.array([0, 1], pa.timestamp("us", "UTC")),
    "image": pa.array([[1.0] * 6] * 2, pa.list_(pa.float32(), 6)),
    "tags": pa.array([["x"], []]),
    "pair": pa.array([{"a": 1}, {"a": 2}]),
    "__index_level_0__": pa.array([0, 1]),
    "sold": pa.array([0, 1], pa.int8()),
}


@pytest.fixture
def table(tmp_path: pathlib.Path) -> str:
    pq.write_table(pa.table(TYPES), tmp_path / "t.parquet")
    return str(tmp_path / "t.parquet")


def kinds_of(text: str) -> dict[str, str]:
    return {name: c["kind"] for name, c in tomllib.loads(text)["columns"].items()}


def test_names_and_types_give_a_schema_that_works(
    table: str, tmp_path: pathlib.Path
) -> None:
    text = first_schema(table, label="sold")
    assert kinds_of(text) == {
        "age": "numeric", "weight": "numeric", "job": "category", "ok": "boolean",
        "day": "date", "at": "date", "image": "numeric", "tags": "category",
        "pair": "drop", "__index_level_0__": "drop", "sold": "label",
    }  # fmt: skip
    assert "No value was looked at" in text
    schema = Schema.from_json(tomllib.loads(text))
    names = [output.name for output in schema.outputs]
    # A column of a reserved name gets one of its own.
    assert names == [
        "age", "weight_2", "job", "ok",
        *(f"day_{part}" for part in ("year", "month", "weekday", "day")),
        *(f"at_{part}" for part in ("year", "month", "weekday", "day", "hour")),
        "image", "tags", "label",
    ]  # fmt: skip
    assert schema.columns["image"].length == 6  # type: ignore[attr-defined]


def test_no_value_is_read(tmp_path: pathlib.Path) -> None:
    # Rows that no reader could read.
    text = tmp_path / "t.csv"
    text.write_bytes(b"a,sold\n" + b"\xff" * 9)
    assert kinds_of(first_schema(str(text), label="sold")) == {
        "a": "choose", "sold": "label",
    }  # fmt: skip


CSV = """\
,age,job,joined,note,at home,empty,income
0,39,clerk,2020-01-02,a b c d e f g h,yes,,<=50K
1,?,?,2021-01-02,a b c d e f g,no,,>50K
2,canary,x,x,y,maybe,full,neither
"""


def test_what_is_told_is_taken(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    kinds = dict.fromkeys(("job", "joined", "empty"), "category")
    kinds |= {"age": "numeric", "note": "text", "at home": "boolean"}
    text = first_schema(
        str(path), label="income", classes=["<=50K", ">50K"], kinds=kinds
    )
    schema = Schema.from_json(tomllib.loads(text))
    assert {name: schema.columns[name].kind for name in kinds} == kinds
    assert schema.label.classes == ("<=50K", ">50K")
    for wrong in ({"label": "incom"}, {"kinds": {"incom": "numeric"}}):
        with pytest.raises(InputError, match=r"columns incom .* Did you mean income\?"):
            first_schema(str(path), **wrong)  # type: ignore[arg-type]


def test_a_range_says_what_a_column_is(tmp_path: pathlib.Path) -> None:
    """Of a number, of a date whose parts it bounds, and of a label that is a number."""
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    since, until = datetime.datetime(2020, 1, 1), datetime.datetime(2030, 1, 1)
    text = first_schema(
        str(path),
        label="empty",
        kinds=dict.fromkeys(("job", "note", "at home", "income"), "drop"),
        ranges={"age": (0.0, 90.0), "joined": (since, until), "empty": (-1.5, 2.0)},
    )
    schema = Schema.from_json(tomllib.loads(text))
    assert schema.to_json()["columns"]["age"] == {"kind": "numeric", "range": [0, 90]}
    joined = schema.columns["joined"]
    assert isinstance(joined, Date)
    assert joined.range == (since, until)
    assert set(joined.parts) == {"year", "month", "weekday", "day", "hour", "days"}
    assert schema.label.task == "regression"
    assert schema.label.range == (-1.5, 2.0)


def test_a_row_is_not_taken_for_a_header(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("39;clerk;no\n40;canary;yes\n")
    told = InputOptions(delimiter=";", header=("age", "job", "income"))
    for options in (InputOptions(delimiter=";"), None):
        # The delimiter is not known either: one text, which is no number.
        if options is None:
            path.write_text(path.read_text().replace(";", ","))
        with pytest.raises(InputError, match="dpsgd schema --header") as caught:
            first_schema(str(path), options=options)
        assert "39" not in str(caught.value).replace(str(tmp_path), "")
    path.write_text(path.read_text().replace(",", ";"))
    text = first_schema(str(path), label="income", options=told)
    assert list(kinds_of(text)) == ["age", "job", "income"]
    values = tomllib.loads(text)["input"]
    assert values == {"delimiter": ";", "header": ["age", "job", "income"]}
    # What pandas writes of columns without names.
    path.write_text(",0,1\n0,39,1\n")
    assert list(kinds_of(first_schema(str(path)))) == ["", "0", "1"]


def test_a_row_in_place_of_a_header_is_not_quoted(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("canary,clerk,no\nother,farmer,yes\n")
    columns = {"z": {"kind": "numeric"}, "y": {"kind": "label", "task": "binary"}}
    schema = Schema.from_json({"version": 1, "columns": columns})
    with pytest.raises(InputError, match=r"columns income .* If that row") as told:
        first_schema(str(path), label="income")
    with pytest.raises(InputError, match=r"columns z .* header = \[") as read:
        RawInputs(str(path), schema)
    path.write_text("canary,no,no\nother,no,yes\n")
    with pytest.raises(InputError, match="some of columns 2, 3 have one name") as twice:
        first_schema(str(path), label="income")
    for caught in (told, read, twice):
        assert "canary" not in str(caught.value)
        assert "\n" not in str(caught.value)
    # One column that is there says that the others are names, too.
    path.write_text("age,job,income\n1,a,no\n")
    with pytest.raises(InputError, match=r"jobs .*it has age, job, income"):
        first_schema(str(path), label="income", kinds={"jobs": "category"})
