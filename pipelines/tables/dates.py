"""Dates and times of a table to ids and numbers.

Sensitive: everything but the schema.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.type_kinds import is_text
from pipelines.tables.cells import Cells, cast
from pipelines.tables.schema import column_kinds as kinds

_ZONED = r"[Tt ].*([Zz]|[+-][0-9]{2}:?[0-9]{2})$"
_EPOCH = datetime.datetime(1970, 1, 1)
_DAY = 86_400_000_000  # microseconds


def times_of(cells: Cells, kind: kinds.Date) -> tuple[pa.Array, np.ndarray]:
    """Returns local times in the zone of the schema, and which cells are malformed.

    Args:
      cells: Dates, times, texts or integers.
      kind: How they are read.
    """
    local, array = pa.timestamp("us"), cells.array
    if kind.unit:
        array, bad = cast(array, pa.int64())
        return array.cast(pa.timestamp(kind.unit)).cast(local, safe=False), bad
    if is_text(array.type):
        return _parsed_times(array, kind)
    if pa.types.is_timestamp(array.type) and array.type.tz is not None:
        return _in_zone(array, kind.zone), np.zeros(len(array), bool)
    return array.cast(local, safe=False), np.zeros(len(array), bool)


def _in_zone(array: pa.Array, zone: str) -> pa.Array:
    known = array.cast(pa.timestamp("us", "UTC"), safe=False)
    if zone == kinds.UTC:  # small container images have no time zones
        return known.cast(pa.timestamp("us"))
    return pc.local_timestamp(known.cast(pa.timestamp("us", zone)))


def _parsed_times(array: pa.Array, kind: kinds.Date) -> tuple[pa.Array, np.ndarray]:
    if kind.format:
        times = pc.strptime(array, format=kind.format, unit="us", error_is_null=True)
        bad = pc.and_(times.is_null(), array.is_valid())
        return times, bad.to_numpy(zero_copy_only=False)
    zoned = pc.fill_null(pc.match_substring_regex(array, _ZONED), False)
    nothing = pa.scalar(None, array.type)
    plain, bad = cast(pc.if_else(zoned, nothing, array), pa.timestamp("us"))
    there, worse = cast(pc.if_else(zoned, array, nothing), pa.timestamp("us", "UTC"))
    return pc.coalesce(plain, _in_zone(there, kind.zone)), bad | worse


def microseconds(times: pa.Array) -> np.ndarray:
    """Returns int64 microseconds since 1970, 0 if missing."""
    counts = times.cast(pa.timestamp("us")).cast(pa.int64())
    found: np.ndarray = pc.fill_null(counts, 0).to_numpy(zero_copy_only=False)
    return found


def since_1970(moment: datetime.datetime) -> int:
    """Returns the microseconds since 1970 of a time without a zone."""
    return (moment - _EPOCH) // datetime.timedelta(microseconds=1)


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
    missing = times.is_null().to_numpy(zero_copy_only=False)
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
