"""What ``pipelines.tables.cells`` guarantees of dates and times."""

from __future__ import annotations

import datetime
import zoneinfo
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipelines.tables.cells import Select
from pipelines.tables.kinds import Date
from tests.pipelines.tables.rows_of_tables import selected, type_of

UTC = datetime.UTC


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
    hour = 10 if clock else 0
    assert good[:2] == [
        datetime.datetime(2020, 2, 29, hour),
        datetime.datetime(2021, 3, 1, hour),
    ]
    assert good[2] is None
    assert times(["2021-02-30", "2021-04-31 10:00"]) == ["bad"] * 2
    assert times(["01.01.2021 24:00:00", "31.12.2016 23:59:60"], format=form) == [
        "bad", "bad",
    ]  # fmt: skip


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo"])
def test_a_format_with_a_zone_is_read_in_the_zone_of_the_schema(zone: str) -> None:
    written = ["04.03.2020 23:30 +0100", "04.03.2020 22:30Z", "04.03.2020 21:30-01:00"]
    expected = datetime.datetime(2020, 3, 4, 22, 30)
    expected += datetime.timedelta(hours=9 if zone != "UTC" else 0)
    found = times(written[:1], format="%d.%m.%Y %H:%M %z", zone=zone)
    found += times(written[1:], format="%d.%m.%Y %H:%M%z", zone=zone)
    assert found == [expected] * 3


@settings(max_examples=60, deadline=None)
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
