"""One table gives the same rows, in Parquet of any type and in CSV of any program."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import decimal
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from accounting.core.validation import InputError
from pipelines.tables.cells import Select, one_word
from pipelines.tables.reading import Reader, check_columns
from pipelines.tables.schema import Schema
from pipelines.tables.table_files import list_table
from tests.pipelines.tables.rows_of_tables import selected

UTC = datetime.UTC
#: Texts, numbers and a day that stand for missing values in every table below.
MISSING = ["?", "NA", "-999", "1900-01-01"]

#: An array, its texts, and the fields of its column in a schema.
Column = tuple[pa.Array, list[str], dict[str, Any]]
Writer = Callable[[Any], str]


# --- How programs write values ------------------------------------------------------


def plain_digits(text: str) -> str:
    """A number in digits alone, with a point: as polars and DuckDB write most."""
    found = f"{decimal.Decimal(text):f}"
    return found if "." in found else f"{found}.0"


def as_java(text: str) -> str:
    """As Spark writes: 1.2345678E7 from ten million on, and below a thousandth."""
    number = decimal.Decimal(text)
    if number == 0 or decimal.Decimal("1e-3") <= abs(number) < 10**7:
        return plain_digits(text)
    mantissa, exponent = f"{number:e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}E{int(exponent)}"


def of_finite(writer: Writer, nan: str = "nan") -> Writer:
    return lambda x: nan if np.isnan(x) else writer(str(x)) if np.isfinite(x) else "inf"


def as_arrow(kind: pa.DataType) -> Writer:
    return lambda x: pa.array([x], kind).cast(pa.string())[0].as_py()


#: With an exponent a number is equal as a number, but no longer as a category.
WITH_EXPONENTS = [
    of_finite(str, ""),
    of_finite(lambda text: f"{decimal.Decimal(text):e}", ""),
    of_finite(as_java, "NaN"),
]


def times(join: str, spec: str) -> Writer:
    """Times with a number of digits after the point, which hold the value."""
    return lambda x: (
        f"{x.strftime('%Y-%m-%d').zfill(10)}{join}{x.time().isoformat(spec)}"
    )


@dataclasses.dataclass(frozen=True)
class Type:
    """A type of Parquet, values, how programs write them, and kinds that take it."""

    type: pa.DataType
    values: st.SearchStrategy[Any]
    writers: Sequence[Writer]
    kinds: Sequence[str]

    def __repr__(self) -> str:
        return str(self.type)


def near(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def decimals(precision: int, scale: int) -> Type:
    quantum = decimal.Decimal(1).scaleb(-scale)
    most = 10**precision - 1
    some = [n for n in (0, 1, 5 * 10**scale, -999 * 10**scale) if abs(n) <= most]
    numbers = st.one_of(st.integers(-most, most), near(*some))
    context = decimal.Context(prec=80)
    return Type(
        pa.decimal128(precision, scale),
        numbers.map(lambda n: decimal.Decimal(n).scaleb(-scale, context)).map(
            lambda d: d.quantize(quantum, context=context)
        ),
        [lambda d: f"{d:f}"],
        [*NUMBERS, "user"],
    )


NUMBERS = ["numeric", "category", "boolean"]
DOUBLES = st.one_of(
    st.floats(allow_infinity=False),
    st.integers(-(2**54), 2**54).map(float),
    near(1e15, 1e16, -0.0, 1e7, 12345678.0, -999.0, 2.0**53, 0.1, 1.0, 0.0),
)
SINGLES = st.one_of(
    st.floats(width=32, allow_infinity=False),
    st.integers(-(2**25), 2**25).map(np.float32),
    near(0.1, 0.3, 1e10, -0.0, 1e7, 16777216.0, -999.0, 1.0, 0.0),
).map(np.float32)
TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9),
    near(" clerk", "clerk ", "5", "5.0", " 5.00", "-0", "-0.0", "1e+16", "1e5", "12e4"),
    near(
        "True", "TRUE", "nan", "NaN", "None", "?", "-999", '"a', 'b"', "a,b", "a\r\nb"
    ),
    near("1E+3", "0E-10", "1.5", "1.50", "-999.0", "1.0E7", "\t", "''", "yes", "1"),
)
TIMES = st.one_of(
    st.datetimes(),
    st.datetimes(datetime.datetime(1950, 1, 1), datetime.datetime(2100, 1, 1)),
    near(datetime.datetime(1969, 12, 31, 23, 59, 59, 999999)),
    near(datetime.datetime(1900, 1, 1), datetime.datetime(2040, 7, 1, 12)),
)
SPLIT_SECONDS = [times(" ", "microseconds"), times("T", "microseconds")]
ZONES = ["+00:00", "Z", "+0000", "+00"]


def nanoseconds(count: int) -> str:
    """As pandas and polars write times of nine digits."""
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(
        microseconds=count // 1000
    )
    return f"{moment.isoformat(' ', 'microseconds')}{count % 1000:03}"


TYPES = [
    Type(pa.int64(), st.one_of(st.integers(-(2**63), 2**63 - 1), near(-999, 0, 1)),
         [str], NUMBERS),
    Type(pa.uint64(), st.integers(0, 2**64 - 1), [str], ["numeric", "category"]),
    *(
        each
        for kind, values in ((pa.float64(), DOUBLES), (pa.float32(), SINGLES))
        for each in (
            Type(kind, values, [*WITH_EXPONENTS, as_arrow(kind)], ["numeric"]),
            Type(  # plus zero: that -0 is another text than 0 matters to nobody
                kind,
                values.map(lambda x: x + 0.0),
                [of_finite(plain_digits, "NaN")],
                [*NUMBERS, "user"],
            ),
        )
    ),
    *(decimals(*each) for each in [(9, 2), (38, 10), (20, 0), (5, 1), (38, 37)]),
    Type(pa.bool_(), st.booleans(),
         [str, lambda x: str(x).lower(), lambda x: str(x).upper()],
         ["category", "boolean"]),
    Type(pa.string(), TEXTS, [str], [*NUMBERS, "text", "date", "user"]),
    Type(pa.dictionary(pa.int8(), pa.string()), TEXTS, [str], ["category", "text"]),
    Type(pa.date32(), st.one_of(st.dates(), near(datetime.date(1900, 1, 1))),
         [lambda x: x.isoformat()], ["date", "category"]),
    Type(pa.timestamp("us"), TIMES, SPLIT_SECONDS, ["date"]),
    Type(pa.timestamp("ns"), st.integers(-(2**62), 2**62), [nanoseconds], ["date"]),
    Type(
        pa.timestamp("us", "Asia/Tokyo"),
        TIMES.map(lambda moment: moment.replace(tzinfo=UTC)),
        [
            lambda x, join=join, zone=zone: times(join, "microseconds")(x) + zone
            for join in " T"
            for zone in ZONES
        ],
        ["date"],
    ),
]  # fmt: skip

FIELDS: dict[str, list[dict[str, Any]]] = {
    "numeric": [
        {}, {"range": [-1, 3]}, {"range": [0, 1e9], "missing": "indicator"},
        {"log": True}, {"mean": 0.3, "scale": 7, "missing": 0},
        {"range": [0, 0.7], "log": True},
    ],
    "category": [
        {}, {"buckets": 1 << 30},
        {"vocabulary": ["5", "clerk", "true", " 1.0 ", "12345678"]},
    ],
    "boolean": [{}, {"missing": "indicator"}],
    "text": [{"tokens": 2}],
    "user": [{}],
    "date": [
        {
            "parts": ["year", "month", "day", "weekday", "hour", "days"],
            "range": ["1950-01-01", "2050-01-01"], "zone": zone,
        }
        for zone in ("UTC", "America/New_York", "Asia/Kolkata")
    ],
}  # fmt: skip


#: Of columns that hold 0 and 1.
LABELS: list[dict[str, Any]] = [
    {"task": "binary"}, {"task": "binary", "classes": ["0.0", 1]},
    {"task": "binary", "classes": [True, False]}, {"task": "classes", "classes": 2},
    {"task": "regression", "range": [-3, 0.4]},
]  # fmt: skip


def truths(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """0 and 1 as values of a type."""
    return near(*pa.array(["0", "1"]).cast(kind).to_pylist())


@st.composite
def column(draw: st.DrawFn, num_rows: int) -> Column:
    """A column as an array, as texts of some program, and of some kind."""
    kind = draw(st.sampled_from(TYPES))
    name = draw(st.sampled_from(list(kind.kinds)))
    fields = {"kind": name, **draw(st.sampled_from(FIELDS[name]))}
    writer = draw(st.sampled_from(list(kind.writers)))
    null = draw(st.sampled_from(["", "?"]))
    values: Any = truths(kind.type) if name == "boolean" else kind.values
    if draw(st.booleans()):
        values = st.one_of(st.none(), values)
    array_type = kind.type
    if name in ("numeric", "category") and draw(st.booleans()):
        fields |= {"length": 2, "separator": "|"}
        if fields.get("missing") in (0, "indicator"):
            del fields["missing"]
        values = st.one_of(st.none(), st.lists(values, max_size=3))
        array_type = pa.list_(kind.type)
        writer = of_list(writer, null)
    found = draw(st.lists(values, min_size=num_rows, max_size=num_rows))
    texts = [null if value is None else writer(value) for value in found]
    return pa.array(found, array_type), texts, fields


def of_list(writer: Writer, null: str) -> Writer:
    return lambda values: "|".join(null if x is None else writer(x) for x in values)


@st.composite
def label(draw: st.DrawFn, num_rows: int) -> Column:
    """Zeros and ones of some type, as of some task."""
    types = [kind for kind in TYPES if "boolean" in kind.kinds]
    kind = draw(st.sampled_from(types))
    writer = draw(st.sampled_from(list(kind.writers)))
    found = draw(st.lists(truths(kind.type), min_size=num_rows, max_size=num_rows))
    fields = {"kind": "label", **draw(st.sampled_from(LABELS))}
    return pa.array(found, kind.type), list(map(writer, found)), fields


def is_user(column: Column) -> bool:
    return column[2]["kind"] == "user"


@st.composite
def table(draw: st.DrawFn) -> tuple[pa.Table, list[list[str]], Schema]:
    """A table in Arrow, its rows as texts, and a schema of it."""
    num_rows = draw(st.integers(1, 5))
    columns = draw(st.lists(column(num_rows), min_size=1, max_size=3))
    for number, each in enumerate(columns):
        if is_user(each) and any(map(is_user, columns[:number])):
            each[2].update(kind="drop")
    columns.append(draw(label(num_rows)))
    names = [f"c{number}" for number in range(len(columns))]
    by_hash = {"by": "hash", "shares": [5, 1, 1], "column": draw(near(*names))}
    in_order: dict[str, Any] = {"by": "fraction", "shares": [1, 0, 0]}
    split = draw(near(in_order, in_order, by_hash))
    if any(map(is_user, columns)):
        split = {**by_hash, "cut_users": True}
    return of_columns(columns, split)


def of_columns(
    columns: Sequence[Column], split: dict[str, Any] | None = None
) -> tuple[pa.Table, list[list[str]], Schema]:
    """A table in Arrow, its rows as texts, and a schema of it."""
    if all(fields["kind"] != "label" for _, _, fields in columns):
        zeros = ["0"] * len(columns[0][0])
        zero = (pa.array(zeros), zeros, {"kind": "label", "task": "binary"})
        columns = [*columns, zero]
    names = [f"c{number}" for number in range(len(columns))]
    arrays, texts, kinds = zip(*columns, strict=True)
    schema = {
        "version": 1,
        "split": split or {"by": "fraction", "shares": [1, 0, 0]},
        "input": {"missing_values": MISSING},
        "columns": dict(zip(names, kinds, strict=True)),
    }
    rows = [names, *map(list, zip(*texts, strict=True))]
    return pa.table(list(arrays), names), rows, Schema.from_json(schema)


def outcome(path: pathlib.Path, schema: Schema) -> dict[str, Any] | str:
    """The rows that are read, also of whom and for which part, or why they are not."""
    (file,) = list_table(str(path))
    reader = Reader(file, schema)
    try:
        check_columns(file, schema)
        found = list(reader)
        reader.malformed.refuse(schema)
    except InputError as error:
        return str(error)
    (rows,) = found
    columns = {**rows.arrays, "users": rows.users, "split": rows.splits}
    # As text: NaN is itself.
    return {name: str(np.asarray(each).tolist()) for name, each in columns.items()}


def both(arrow: pa.Table, rows: list[list[str]], schema: Schema) -> tuple[Any, Any]:
    """What Parquet and CSV of a table become."""
    with tempfile.TemporaryDirectory() as name:
        stored, text = pathlib.Path(name, "a.parquet"), pathlib.Path(name, "b.csv")
        pq.write_table(arrow, stored)
        with text.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        return outcome(stored, schema), outcome(text, schema)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(table())
def test_a_table_that_parquet_gives_has_the_same_rows_in_csv(
    made: tuple[pa.Table, list[list[str]], Schema],
) -> None:
    stored, text = both(*made)
    event(f"refused: {isinstance(stored, str)}")
    if not isinstance(stored, str):
        assert text == stored


DATE = {"kind": "date", **FIELDS["date"][0]}
LISTS = {"kind": "category", "length": 2, "separator": "|"}
THIRDS = {"kind": "numeric", "range": [0, 0.3]}


@pytest.mark.parametrize(
    ("array", "texts", "fields"),
    [
        # Each of these was silently other data in CSV.
        (pa.array([decimal.Decimal("5.0")]), ["5.0"], {"kind": "category"}),
        (pa.array([" clerk"]), [" clerk"], {"kind": "category"}),
        (pa.array([12345678.0]), ["12345678.0"], {"kind": "category"}),
        (pa.array([float("nan")]), ["NaN"], {"kind": "category"}),
        (pa.array([-999, 1]), ["-999", "1"], {"kind": "numeric", "missing": 7}),
        (pa.array([-999, 1]), ["-999.0", "1"], {"kind": "category"}),
        (pa.array([[-999, 1]]), ["-999|1"], LISTS),
        (pa.array([0.1], pa.float32()), ["0.1"], THIRDS),
        (pa.array([-1], pa.timestamp("ns")), ["1969-12-31 23:59:59.999999999"], DATE),
        (pa.array([datetime.date(1900, 1, 1)]), ["1900-01-01"], DATE),
    ],
)
def test_a_value_has_the_same_rows_in_csv(
    array: pa.Array, texts: list[str], fields: dict[str, Any]
) -> None:
    stored, text = both(*of_columns([(array, texts, dict(fields))]))
    assert isinstance(stored, dict)
    assert text == stored


@pytest.mark.parametrize(
    ("array", "fields", "reason"),
    [
        (pa.array([1e16]), {"kind": "category"}, "more digits than floating point"),
        (pa.array([2.0**24], pa.float32()), {"kind": "category"}, "more digits than"),
        (pa.array([1.5]), {"kind": "category"}, "no whole number"),
        (pa.array([True]), {"kind": "numeric"}, 'write kind = "boolean"'),
        (pa.array([300_000], pa.timestamp("s")), {"kind": "category"}, '"date"'),
        (pa.array([9 * 10**12], pa.timestamp("s")), DATE, "not a date"),
    ],
)
def test_a_value_that_has_several_texts_is_refused(
    array: pa.Array, fields: dict[str, Any], reason: str
) -> None:
    stored, _ = both(*of_columns([(array, [""], dict(fields))]))
    assert reason in stored


@settings(max_examples=30, deadline=None)
@given(
    st.one_of(
        TEXTS, st.from_regex(r"\s?-?[0-9.]{1,3}([eE][-+]?[0-9])?", fullmatch=True)
    )
)
def test_words_of_a_schema_are_read_as_cells_are(word: str) -> None:
    select = Select({"x": "f0"})
    text = select.cell("x", "VARCHAR").text("is bad")
    [found] = selected(pa.array([word]), select, text)
    assert found is None or found == one_word(word)
