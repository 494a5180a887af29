"""Dates and times of a table to ids and numbers.

Formal guarantees:
  - Days that no calendar has, and times outside of the years 1 to 9999, are malformed.
  - A time with a zone is read in the zone of the schema, with its summer time in every
    year, also if a format says where the text holds the zone.
  - Parts of a microsecond are cut off, in every type and text.

Sensitive: everything but the schema.
"""

from __future__ import annotations

import datetime
import functools
import zoneinfo
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.type_kinds import is_text
from pipelines.tables.cells.cells import Cells, cast, nulls
from pipelines.tables.schema import column_kinds as kinds

_ZONED = r"[Tt ].*([Zz]|[+-][0-9]{2}(:?[0-9]{2})?)$"
_LOCAL, _UTC = pa.timestamp("us"), pa.timestamp("us", kinds.UTC)
#: Length of a time with six digits after the point.
_MICROSECONDS_LENGTH = len("2020-01-01T00:00:00.123456")
_EPOCH = datetime.datetime(1970, 1, 1)
_SECOND = 1_000_000  # microseconds
_DAY = 86_400 * _SECOND


def times_of(cells: Cells, kind: kinds.Date) -> tuple[pa.Array, np.ndarray]:
    """Returns local times in the zone of the schema, and which cells are malformed.

    Args:
      cells: Dates, times or texts.
      kind: How they are read.
    """
    times, bad = _parsed(cells, kind)
    counts = microseconds(times)
    outside = (counts < _FIRST) | (counts >= _END)
    absent = outside
    if len(cells.missing_values) > 1:  # beside the empty text
        listed = _missing_times(cells.missing_values, kind)
        absent = outside | np.isin(counts, listed)
    if absent.any():
        times = pc.if_else(pa.array(absent), pa.scalar(None, _LOCAL), times)
    return times, bad | outside


@functools.lru_cache(maxsize=64)  # called for every block
def _missing_times(missing_values: Sequence[str], kind: kinds.Date) -> np.ndarray:
    times, _ = times_of(Cells("", pa.array(missing_values), (), []), kind)
    return microseconds(times.drop_null())


def _parsed(cells: Cells, kind: kinds.Date) -> tuple[pa.Array, np.ndarray]:
    """Returns local times that may be in any year; see ``times_of``."""
    array = cells.array
    if is_text(array.type):
        parse = _by_format if kind.format else _by_iso_8601
        return parse(array, kind)
    zoned = pa.types.is_timestamp(array.type) and array.type.tz is not None
    if zoned:
        array = array.cast(pa.timestamp(array.type.unit))  # of UTC
    times, bad = _in_microseconds(array)
    return _in_zone(times, kind.zone) if zoned else times, bad


def _in_microseconds(array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Returns times in microseconds, and which of them are too far away."""
    if array.type == pa.timestamp("ns"):
        return pc.floor_temporal(array, unit="microsecond").cast(_LOCAL), _none(array)
    return cast(array, _LOCAL)


def _none(array: pa.Array) -> np.ndarray:
    return np.zeros(len(array), bool)


def _in_zone(times: pa.Array, zone: str) -> pa.Array:
    """Returns times of UTC in a zone; those of impossible years are unchanged."""
    if zone == kinds.UTC:  # small container images have no time zones
        return times
    # Arrow's own conversion has no summer time after 2037.
    counts = microseconds(times)
    known = (counts >= _FIRST + _DAY) & (counts < _END - _DAY)
    seconds, place = np.unique(counts[known] // _SECOND, return_inverse=True)
    place_of = zoneinfo.ZoneInfo(zone)
    offsets = [_offset(second, place_of) for second in seconds.tolist()]
    counts[known] += np.array(offsets, np.int64)[place]
    return pa.array(counts, mask=nulls(times)).cast(_LOCAL)


def _offset(seconds: int, zone: zoneinfo.ZoneInfo) -> int:
    """Returns microseconds to add to a time of UTC, in seconds since 1970."""
    moment = _EPOCH + datetime.timedelta(seconds=seconds)
    offset = moment.replace(tzinfo=datetime.UTC).astimezone(zone).utcoffset()
    assert offset is not None
    return offset // datetime.timedelta(microseconds=1)


def _by_iso_8601(array: pa.Array, kind: kinds.Date) -> tuple[pa.Array, np.ndarray]:
    if len(array) and (pc.max(pc.binary_length(array)).as_py() or 0) > (
        _MICROSECONDS_LENGTH
    ):
        array = pc.replace_substring_regex(array, r"(\.[0-9]{6})[0-9]{1,3}", r"\1")
    zoned = pc.fill_null(pc.match_substring_regex(array, _ZONED), False)
    nothing = pa.scalar(None, array.type)
    plain, bad = cast(pc.if_else(zoned, nothing, array), _LOCAL)
    there, worse = cast(pc.if_else(zoned, array, nothing), _UTC)
    there = _in_zone(there.cast(_LOCAL), kind.zone)
    return pc.coalesce(plain, there), bad | worse


def _by_format(array: pa.Array, kind: kinds.Date) -> tuple[pa.Array, np.ndarray]:
    """Returns times by Python's ``strptime``: C's takes 30 February for 2 March."""
    coded = array.dictionary_encode()
    found = [_moment(text, kind.format) for text in coded.dictionary.to_pylist()]
    zoned = np.array([each is not None and each[1] for each in found], bool)
    counts = pa.array([each and each[0] for each in found], pa.int64())
    times = counts.cast(_LOCAL)
    if zoned.any():
        times = _in_zone(times, kind.zone)
    times = times.take(coded.indices)
    return times, nulls(times) & ~nulls(array)


def _moment(text: str, form: str) -> tuple[int, bool] | None:
    """Returns microseconds since 1970, and whether of UTC; None if malformed."""
    try:
        moment = datetime.datetime.strptime(text, form)
        offset = moment.utcoffset()
        local = since_1970(moment.replace(tzinfo=None))
        if offset is None:
            return local, False
        return local - offset // datetime.timedelta(microseconds=1), True
    except (ValueError, OverflowError):
        return None


def microseconds(times: pa.Array) -> np.ndarray:
    """Returns int64 microseconds since 1970, 0 if missing."""
    counts = pc.fill_null(times.cast(pa.int64()), 0)
    found: np.ndarray = counts.to_numpy(zero_copy_only=False).copy()
    return found


def since_1970(moment: datetime.datetime) -> int:
    """Returns the microseconds since 1970 of a time without a zone."""
    return (moment - _EPOCH) // datetime.timedelta(microseconds=1)


#: Of the years 1 to 9999.
_FIRST = since_1970(datetime.datetime.min)
_END = since_1970(datetime.datetime.max) + 1

_ID_PARTS: dict[str, Callable[[pa.Array], pa.Array]] = {
    kinds.YEAR: pc.year,
    "month": pc.month,
    "day": pc.day,
    "hour": lambda times: pc.add(pc.hour(times), 1),
    "weekday": lambda times: pc.day_of_week(times, count_from_zero=False),
}


def part_of(times: pa.Array, kind: kinds.Date, part: str) -> np.ndarray:
    """Returns int32 ids, 0 if missing, or days scaled to [-1, 1], NaN if missing.

    Args:
      times: From ``times_of``.
      kind: Kind with the range of years and days.
      part: One of ``kinds.PARTS``.
    """
    missing = nulls(times)
    if part == kinds.DAYS:
        assert kind.range is not None
        first, last = (since_1970(moment) / _DAY for moment in kind.range)
        days = np.where(missing, np.nan, microseconds(times) / _DAY)
        days = 2 * (np.clip(days, first, last) - first) / (last - first) - 1
        return days.astype(np.float32)
    numbers = pc.fill_null(_ID_PARTS[part](times), 0)
    ids = numbers.to_numpy(zero_copy_only=False).astype(np.int64)
    if part == kinds.YEAR:
        assert kind.range is not None
        place = ids - kind.range[0].year
        ids = np.where((place >= 0) & (place < kind.num_years), place + 2, 1)
    ids[missing] = 0
    return ids.astype(np.int32)
