"""What kinds of columns guarantee, held against one cell at a time."""

from __future__ import annotations

import datetime
import decimal
import math
import zoneinfo
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipelines.core.hashing import hash_texts, salt_of
from pipelines.tables.cells import Select
from pipelines.tables.kinds import Date
from pipelines.tables.reading import refusal
from pipelines.tables.schema import Schema
from tests.pipelines.tables.rows_of_tables import hash_string, read, selected, type_of

CANARY = "5ec4e7ca"
UTC = datetime.UTC


def schema_of(column: dict[str, Any], **others: Any) -> Schema:
    columns = {"y": {"kind": "label", "task": "binary"}, "x": column}
    return Schema.from_json({"version": 1, "columns": columns, **others})


def numbers(values: Any, column: dict[str, Any], **others: Any) -> dict[str, Any]:
    """What a column x of some values becomes: lists, the label left out."""
    array = values if isinstance(values, pa.Array) else pa.array(values)
    schema = schema_of(column, **others)
    labels = pa.array([1] * len(array))
    found = read(schema, {"y": labels, "x": array})
    assert not any(found.reasons)
    del found.arrays["label"]
    return {name: value.tolist() for name, value in found.arrays.items()}


def reasons(values: Any, column: dict[str, Any], **others: Any) -> list[str | None]:
    """What is wrong with each value of a column x."""
    array = values if isinstance(values, pa.Array) else pa.array(values)
    columns = {"y": pa.array([1] * len(array)), "x": array}
    return read(schema_of(column, **others), columns).reasons


NUMERIC = {"kind": "numeric"}


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ({}, [-3.0, 0.0, 12.0]),
        ({"range": [0, 10]}, [-1.0, -1.0, 1.0]),
        ({"log": True}, [-math.log(4) / 4, 0.0, math.log(13) / 4]),
        ({"log": True, "range": [-3, 0]}, [-1.0, 1.0, 1.0]),
        ({"mean": 2, "scale": 5}, [-1.0, -0.4, 2.0]),
        ({"range": [-1, 7], "mean": 2, "scale": 5}, [-0.6, -0.4, 1.0]),
    ],
)
def test_numbers_are_clipped_then_in_logarithms_then_scaled(
    column: dict[str, Any], expected: list[float]
) -> None:
    found = numbers([-3, 0, 12], {**NUMERIC, **column})["x"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_null_is_missing_whatever_bytes_its_file_left_there() -> None:
    whole = pa.array(["a", "b", ""], pa.large_string())
    valid = pa.py_buffer(bytes([0b101]))
    array = pa.Array.from_buffers(whole.type, 3, [valid, *whole.buffers()[1:]])
    found = numbers(array, {"kind": "category", "buckets": 50})["x"]
    assert found[0] > 0
    assert found[1:] == [0, 0]


def test_missing_numbers_are_what_the_schema_says() -> None:
    values = [50.0, None, float("nan")]
    column = {**NUMERIC, "range": [0, 100]}
    found = numbers(values, column)["x"]
    assert found[0] == 0
    assert np.isnan(found[1:]).all()
    told = numbers(values, {**column, "missing": "indicator"})
    assert told == {"x": [0.0, 0.0, 0.0], "x_missing": [0, 1, 1]}
    assert numbers(values, {**column, "missing": 75})["x"] == [0.0, 0.5, 0.5]
    found = reasons(values, {**column, "missing": "refuse"})
    assert found == [None, "x is missing", "x is missing"]


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["1", "2", None]),
        pa.array(["1", "2", "?"], pa.string_view()),
        pa.array([b"1", b"2", None], pa.binary()),
        pa.array(["1", "2", None]).dictionary_encode(),
        pa.array([1, 2, None], pa.uint64()),
        pa.array([1.0, 2.0, None], pa.float32()),
        pa.array([decimal.Decimal(1), decimal.Decimal(2), None], pa.decimal128(9, 0)),
    ],
    ids=lambda array: str(array.type),
)
def test_equal_cells_give_equal_numbers_whatever_their_type(array: pa.Array) -> None:
    missing = {"input": {"missing_values": ["?"]}}
    found = numbers(array, {**NUMERIC, "missing": 9}, **missing)["x"]
    assert found == [1.0, 2.0, 9.0]
    category = {"kind": "category", "vocabulary": ["2", "1"]}
    assert numbers(array, category, **missing)["x"] == [3, 2, 0]
    hashed = numbers(array, {"kind": "category", "buckets": 1000}, **missing)["x"]
    assert hashed[:2] == [bucket("x", "1", 1000), bucket("x", "2", 1000)]
    assert hashed[2] == 0


# --- The hash, one byte string at a time --------------------------------------------


def bucket(column: str, text: str, buckets: int) -> int:
    salt = hash_string(0, column.encode())
    return 1 + ((hash_string(salt, text.encode()) >> 32) * (buckets - 1) >> 32)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.none(), st.text()), max_size=8), st.text(min_size=1))
def test_the_hash_is_that_of_the_obvious_implementation(
    texts: list[str | None], name: str
) -> None:
    salt = hash_string(0, name.encode())
    assert int(salt_of(name)) == salt
    array = pa.array(["left out", *texts], pa.large_string())[1:]
    found = hash_texts(array, salt_of(name)).tolist()
    assert found == [hash_string(salt, (text or "").encode()) for text in texts]


# --- Other kinds --------------------------------------------------------------------


def test_unknown_and_missing_categories_have_ids_of_their_own() -> None:
    column = {"kind": "category", "vocabulary": ["red", "green"]}
    assert numbers(["green", "red", "blue", None, ""], column)["x"] == [3, 2, 1, 0, 0]
    hashed = numbers(["a", None], {"kind": "category", "buckets": 2})["x"]
    assert hashed == [1, 0]


def test_words_are_lower_case_and_cut_or_filled_up() -> None:
    column = {"kind": "text", "tokens": 3, "buckets": 5000}
    found = numbers(["Ünder, the-SEA 42 x", "the", " .. ", None], column)["x"]
    words = [bucket("x", word, 5000) for word in ("ünder", "the", "sea")]
    assert found == [words, [words[1], 0, 0], [0, 0, 0], [0, 0, 0]]


def test_lists_of_categories_are_cut_or_filled_up() -> None:
    column = {"kind": "category", "vocabulary": ["a", "b"], "length": 2}
    lists = [["a", "b", "c"], [], None, ["b", None]]
    texts = pa.array(["a|b|c", "", None, "b|"])
    for array, more in (
        (pa.array(lists, pa.large_list(pa.string())), {}),
        (pa.array([["zz"], *lists])[1:], {}),
        (texts, {"separator": "|"}),
    ):
        found = numbers(array, {**column, **more})["x"]
        assert found == [[2, 3], [0, 0], [0, 0], [3, 0]]


def test_lists_of_numbers_are_flat_and_scaled() -> None:
    column = {"kind": "numeric", "length": 4, "range": [0, 2]}
    images = pa.array(
        [[[0, 1], [2, 9]], [[2, 2], [2, 2]], None], pa.list_(pa.list_(pa.uint8(), 2), 2)
    )
    expected = [[-1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert numbers(images, column)["x"] == expected
    ragged = pa.array([[0.0], [2.0] * 9, [None, 1.0]])
    assert numbers(ragged, column)["x"] == [[-1, 0, 0, 0], [1] * 4, [0, 0, 0, 0]]
    assert numbers(["0 2", "1"], {**column, "separator": " "})["x"] == [
        [-1, 1, 0, 0], [0, 0, 0, 0],
    ]  # fmt: skip


MOMENT = datetime.datetime(2020, 3, 4, 23, 30)
PARTS = ["year", "month", "day", "weekday", "hour", "days"]
DATE = {"kind": "date", "parts": PARTS, "range": ["2019-01-01", "2021-01-01"]}


def parts_of(moment: datetime.datetime) -> list[float]:
    first, last = datetime.datetime(2019, 1, 1), datetime.datetime(2021, 1, 1)
    days = 2 * ((moment - first) / (last - first)) - 1
    return [
        moment.year - 2019 + 2, moment.month, moment.day, moment.isoweekday(),
        moment.hour + 1, np.float32(days),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("array", "more", "zone_hours"),
    [
        (pa.array([MOMENT, None], pa.timestamp("ns")), {}, 0),
        (pa.array([MOMENT, None], pa.timestamp("ms", "Asia/Tokyo")), {}, 0),
        (pa.array([MOMENT, None], pa.timestamp("s", "UTC")), {"zone": "Asia/Tokyo"}, 9),
        (pa.array(["2020-03-04 23:30:00", ""]), {}, 0),
        (pa.array(["2020-03-04T23:30:00Z", None]), {"zone": "Asia/Tokyo"}, 9),
        (pa.array(["2020-03-05T00:30:00+01:00", None]), {}, 0),
        (pa.array(["04.03.2020 23-30", None]), {"format": "%d.%m.%Y %H-%M"}, 0),
    ],
)
def test_dates_become_their_parts(
    array: pa.Array, more: dict[str, str], zone_hours: int
) -> None:
    found = numbers(array, {**DATE, **more})
    expected = parts_of(MOMENT + datetime.timedelta(hours=zone_hours))
    assert [found[f"x_{part}"][0] for part in PARTS] == expected
    assert [found[f"x_{part}"][1] for part in PARTS[:-1]] == [0] * 5
    assert np.isnan(found["x_days"][1])


def test_days_and_years_out_of_range_are_bounded() -> None:
    days = pa.array([datetime.date(2018, 12, 31), datetime.date(2022, 1, 1)])
    found = numbers(days, DATE)
    assert found["x_days"] == [-1, 1]
    assert found["x_year"] == [1, 1]


@pytest.mark.parametrize(
    "values", [[True, False, None], [1, 0, None], ["True", "no", ""]]
)
def test_booleans_are_0_and_1(values: list[Any]) -> None:
    found = numbers(values, {"kind": "boolean"})["x"]
    assert found[:2] == [1, 0]
    assert np.isnan(found[2])


@pytest.mark.parametrize(
    ("label", "values", "expected"),
    [
        ({"task": "binary"}, [False, True, True], [0, 1, 1]),
        ({"task": "binary"}, ["0", "true", "1"], [0, 1, 1]),
        ({"task": "binary"}, ["0.0", "True", "1.0"], [0, 1, 1]),
        ({"task": "classes", "classes": ["7.0", "9"]}, ["9.0", "7"], [1, 0]),
        ({"task": "binary", "classes": ["no", "yes"]}, ["yes", "no"], [1, 0]),
        ({"task": "classes", "classes": [7, 9, 8]}, [8, 7], [2, 0]),
        ({"task": "classes", "classes": 4}, ["3", "0"], [3, 0]),
        ({"task": "regression", "range": [0, 4]}, [1.0, 9.0], [-0.5, 1.0]),
    ],
)
def test_labels(label: dict[str, Any], values: list[Any], expected: list[Any]) -> None:
    columns = {"y": {"kind": "label", **label}}
    schema = Schema.from_json({"version": 1, "columns": columns})
    found = read(schema, {"y": pa.array(values)})
    assert not any(found.reasons)
    assert found.arrays["label"].tolist() == expected


@pytest.mark.parametrize(
    ("label", "values"),
    [
        ({"task": "binary"}, [None, 2, -1, 0]),
        ({"task": "binary"}, [CANARY, "", "2", "0"]),
        ({"task": "binary", "classes": ["no", "yes"]}, [CANARY, None, "No", "no"]),
        ({"task": "classes", "classes": 4}, [4, None, 0.5, 3]),
        ({"task": "regression", "range": [0, 4]}, [CANARY, "", "nan", "3"]),
    ],
)
def test_a_label_that_is_none_makes_its_row_malformed(
    label: dict[str, Any], values: list[Any]
) -> None:
    columns = {"y": {"kind": "label", **label}}
    schema = Schema.from_json({"version": 1, "columns": columns})
    *bad, good = read(schema, {"y": pa.array(values)}).reasons
    assert good is None
    assert all(str(reason).startswith("y is ") for reason in bad)
    assert CANARY not in str(bad)


@pytest.mark.parametrize(
    ("values", "column", "reason"),
    [
        ([CANARY, "1"], NUMERIC, "x is not a number"),
        (["inf", "1"], NUMERIC, "x is not finite, and has no range in the schema"),
        ([1.5, 1.0], {"kind": "category"}, "x is no whole number, or one of more"),
        ([CANARY, "2020-01-01"], {"kind": "date"}, "x is not a date"),
        (["2020-02-31", "2020-01-01"], {"kind": "date"}, "x is not a date"),
        ([CANARY, "%d"], {"kind": "date", "format": "%%d"}, "x is not a date"),
        ([CANARY, "yes"], {"kind": "boolean"}, "x is neither true nor false"),
        ([f"1 {CANARY}", "1"], {**NUMERIC, "length": 2, "separator": " "}, "x holds"),
        ([[1.5], [1.0]], {"kind": "category", "length": 1}, "x holds no whole number"),
    ],
)
def test_a_wrong_cell_makes_its_row_malformed_and_is_not_quoted(
    values: list[Any], column: dict[str, Any], reason: str
) -> None:
    found = reasons(values * 3, column)
    assert all(str(each).startswith(reason) for each in found[::2])
    assert found[1::2] == [None] * 3
    assert CANARY not in str(found)


@pytest.mark.parametrize("kind", ["category", "text", "numeric", "date"])
def test_texts_that_are_none_are_refused_without_a_word_of_them(kind: str) -> None:
    array = pa.array([b"\xff" + CANARY.encode()])
    assert reasons(array, {"kind": kind}) == ["x is not UTF-8"]


MIXED = {
    "a": {"kind": "numeric", "log": True},
    "b": {"kind": "category"},
    "c": {"kind": "text", "tokens": 2},
    "d": {"kind": "date", "parts": ["month", "hour"]},
    "e": {"kind": "category", "length": 2, "separator": ","},
    "f": {"kind": "boolean"},
    "y": {"kind": "label", "task": "binary"},
}


ROWS = [
    ("1", "ab", "Two words", "2020-01-02", "a,b,a", "true", "1"),
    ("", "", "", "", "", "", "0"),
    ("-2e3", "ab", "über 42", "2020-01-02T03:04:05Z", "b", "0", "0"),
    (CANARY, "x", "y", "2020-01-02", "a", "true", "1"),
    ("nan", "\ud7ff", "two", CANARY, ",", "0", "0"),
    ("1", "5.0", "Words", "2020-01-02", "a", CANARY, "1"),
    ("1", "5", "words", "2020-01-02", "b,", "1", "1"),
    ("1", "ab", "y", "", "a", "", CANARY),
]


def test_a_rows_numbers_depend_on_this_row_alone() -> None:
    split = {"by": "hash", "column": "b"}
    schema = Schema.from_json({"version": 1, "columns": MIXED, "split": split})

    def of(rows: list[tuple[str, ...]]) -> Any:
        texts = zip(MIXED, zip(*rows, strict=True), strict=True)
        return read(schema, {name: pa.array(each) for name, each in texts})

    found = of(ROWS)
    good = [number for number, reason in enumerate(found.reasons) if reason is None]
    assert good == [0, 2, 6]
    for number, row in enumerate(ROWS):
        own = of([row])
        assert own.reasons == [found.reasons[number]]
        if number not in good:
            continue
        place = good.index(number)
        assert own.splits[0] == found.splits[place]
        for name, values in found.arrays.items():
            np.testing.assert_array_equal(values[place], own.arrays[name][0])


def test_shares_of_a_hash_are_kept_and_values_stay_together() -> None:
    people = [f"person {number}" for number in range(3000)]
    split = {"by": "hash", "column": "x", "shares": [60, 10, 30]}
    schema = schema_of({"kind": "drop"}, split=split)
    columns = {"y": pa.array([1] * 6000), "x": pa.array(people * 2)}
    splits = read(schema, columns).splits
    assert splits is not None
    assert (splits[:3000] == splits[3000:]).all()
    counts = np.bincount(splits[:3000], minlength=3)
    # Five standard deviations of a binomial of 3,000.
    assert (abs(counts - [1800, 300, 900]) < 5 * 27).all()
    other = schema_of({"kind": "drop"}, split={**split, "salt": "other"})
    again = read(other, columns).splits
    assert (again != splits).any()


def test_a_split_by_time_has_its_bounds() -> None:
    split = {"by": "time", "column": "x"}
    split |= {"val_from": "2020-01-02", "test_from": "2020-01-03"}
    days = ["2020-01-01T23:59:59", "2020-01-02", "2020-01-02T12:00:00", "2020-01-03"]
    schema = schema_of({"kind": "drop"}, split=split)
    found = read(schema, {"y": pa.array([1] * 4), "x": pa.array(days)})
    assert found.splits is not None
    assert found.splits.tolist() == [0, 1, 1, 2]
    wrong = reasons([days[0], None, CANARY], {"kind": "drop"}, split=split)
    assert wrong == [None, *["x is missing, or no date to split by"] * 2]


@pytest.mark.parametrize(
    ("column", "kind", "remedy"),
    [
        (NUMERIC, pa.string(), None),
        (NUMERIC, pa.list_(pa.float32()), "length = 8"),
        (NUMERIC, pa.timestamp("us"), 'kind = "date"'),
        (NUMERIC, pa.struct([("a", pa.int8())]), 'kind = "drop"'),
        ({**NUMERIC, "length": 3}, pa.float32(), "a single value neither"),
        ({**NUMERIC, "length": 3}, pa.string(), "separator"),
        ({"kind": "boolean"}, pa.list_(pa.bool_()), 'kind = "numeric" or "category"'),
        ({"kind": "date"}, pa.int64(), "date, time, zoned time"),
        ({"kind": "category"}, pa.dictionary(pa.int8(), pa.string()), None),
        ({"kind": "category"}, pa.null(), None),
    ],
)
def test_types_that_a_kind_cannot_take_are_told_with_what_to_write(
    column: dict[str, Any], kind: pa.DataType, remedy: str | None
) -> None:
    found = refusal(schema_of(column).columns["x"], type_of(pa.array([], kind)))
    assert (found is None) == (remedy is None)
    assert remedy is None or remedy in str(found)


def times(values: Any, **fields: Any) -> Any:
    """The times of some values, None for missing, and "bad" for malformed ones."""
    array = values if isinstance(values, pa.Array) else pa.array(values)
    kind, select = Date(**fields), Select({"x": "f0"})
    cell = select.cell("x", type_of(array))
    time = cell.time(kind.format, kind.zone, "is no date")
    return selected(array, select, time)


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%d.%m.%Y %H:%M:%S"])
def test_days_that_no_calendar_has_are_malformed(form: str) -> None:
    days = ["30.02.2021", "29.02.2021", "31.04.2021", "32.01.2021", "00.01.2021"]
    clock = " 10:00:00" if "%H" in form else ""
    assert times([day + clock for day in days], format=form) == ["bad"] * 5
    good = times([f"29.02.2020{clock}", f"1.3.2021{clock}", ""], format=form)
    days = [(2020, 2, 29), (2021, 3, 1)]
    hour = 10 if clock else 0
    assert good == [*(datetime.datetime(*day, hour) for day in days), None]
    assert times(["2021-02-30", "2021-04-31 10:00"]) == ["bad"] * 2
    late = ["01.01.2021 24:00:00", "31.12.2016 23:59:60"]
    assert times(late, format=form) == ["bad"] * 2


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_a_format_with_a_zone_is_read_in_the_zone_of_the_schema(zone: str) -> None:
    written = ["04.03.2020 23:30 +0100", "04.03.2020 22:30Z", "04.03.2020 21:30-01:00"]
    expected = datetime.datetime(2020, 3, 4, 22, 30)
    expected += datetime.timedelta(hours=9 if zone != "UTC" else 0)
    found = times(written[:1], format="%d.%m.%Y %H:%M %z", zone=zone)
    found += times(written[1:], format="%d.%m.%Y %H:%M%z", zone=zone)
    assert found == [expected] * 3


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.datetimes(datetime.datetime(1850, 1, 1)), min_size=1, max_size=9),
    st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]),
)
def test_summer_time_is_that_of_the_zone_in_every_year(
    moments: list[datetime.datetime], zone: str
) -> None:
    moments = [min(moment, datetime.datetime(9999, 12, 30)) for moment in moments]
    known = [moment.replace(tzinfo=UTC) for moment in moments]
    expected = [
        each.astimezone(zoneinfo.ZoneInfo(zone)).replace(tzinfo=None) for each in known
    ]
    assert times(pa.array(known, pa.timestamp("us", "UTC")), zone=zone) == expected
    assert times([each.isoformat() for each in known], zone=zone) == expected


def test_times_outside_of_the_years_1_to_9999_are_malformed() -> None:
    assert times(["0000-12-31", "0001-01-01"])[0] == "bad"
    # Microseconds that are called seconds are no times that overflow.
    seconds = pa.array([1_583_364_600_000_000, -(10**15), 0], pa.timestamp("s"))
    assert times(seconds) == ["bad", "bad", datetime.datetime(1970, 1, 1)]
    far = pa.array([10**12], pa.timestamp("s", "UTC"))
    for zone in ("UTC", "Asia/Tokyo"):
        assert times(far, zone=zone) == ["bad"]


def test_parts_of_a_microsecond_are_cut_off() -> None:
    expected = [datetime.datetime(1969, 12, 31, 23, 59, 59, 999999)]
    assert times(pa.array([-1], pa.timestamp("ns"))) == expected
    assert times(["1969-12-31 23:59:59.999999999"]) == expected
    assert times(["1969-12-31 23:59:59.9999999999"]) == ["bad"]


@pytest.mark.parametrize("form", ["%e.%m.%Y", "%c", "%d.%m.%Y %Z", "%s", "%Y %"])
def test_a_format_of_other_directives_is_refused(form: str) -> None:
    with pytest.raises(ValidationError, match="strptime, without %"):
        Date(format=form)
