"""Kinds of columns: their fields in a schema, and their outputs.

    kind       becomes
    numeric    a float32, NaN if missing; or float32[length]
    boolean    the same, 0 or 1
    category   an int32 id, 0 if missing; or int32[length], padded with 0
    text       int32[tokens], ids of its words, padded with 0
    date       an int32 id for each part, 0 if missing; days are a float32
    label      int8 (binary), int32 (classes) or float32 (regression)
    user       nothing; holds the user's id (`Schema.user`)
    drop       nothing

Formal guarantees:
  - Every constant that a value is transformed with comes from the schema, which is
    public; none comes from a value.

Everything here is public.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import zoneinfo
from collections.abc import Callable
from typing import Any, ClassVar

from pipelines.tables.schema.fields import Fields

MOST_IDS = 2**31 - 1
_MOST_LENGTH = 1 << 20

#: Roles of an output; see ``Output``.
COUNT, NUMBER, NUMBERS, ID, IDS = "count", "number", "numbers", "id", "ids"

#: What a missing number becomes.
NAN, INDICATOR, REFUSE = "nan", "indicator", "refuse"
MISSING = (NAN, INDICATOR, REFUSE)

BINARY, CLASSES, REGRESSION = "binary", "classes", "regression"
TASKS = (BINARY, CLASSES, REGRESSION)

#: Part of a date -> number of ids, including 0 for missing.
ID_PARTS = {"month": 13, "weekday": 8, "day": 32, "hour": 25}
YEAR, DAYS = "year", "days"
PARTS = (YEAR, *ID_PARTS, DAYS)

UTC = "UTC"
#: Of ``strptime``, without those of the machine's language; %Z would ignore the zone.
_DIRECTIVES = "YmdHMSfzybBjIpaAwGVuUW%"

#: Divisor of logarithms without another scale: counts of thousands become about 2.
LOG_SCALE = 4.0

LABEL = "label"
#: Reason of a row whose label is not listed.
NO_CLASS = "is none of the classes of this label"
USER = "user"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """A column of the prepared data.

    Attributes:
      name: Name of the column.
      role: Use in a model: "count" is a number whose logarithm it takes, "number" and
        "numbers" are taken unchanged, "id" and "ids" are embedded.
      dtype: Name of the NumPy dtype.
      shape: Shape of one row.
      size: Number of ids, including 0 for missing or padding; 0 for numbers.
      nullable: Whether NaN may stand for missing.
    """

    name: str
    role: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    size: int = 0
    nullable: bool = False


def _read(read: Callable[[Fields], Any], default: Any) -> Any:
    """Returns a field of a kind.

    Args:
      read: Function of the fields of a schema, which returns its checked value.
      default: Its default.
    """
    return dataclasses.field(default=default, metadata={"read": read})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A column of the table.

    Attributes:
      name: Name of its output; empty for that of the column.
    """

    kind: ClassVar[str]
    name: str = _read(lambda fields: fields.text("name", ""), "")

    @classmethod
    def read(cls, fields: Fields) -> Kind:
        """Returns the column that fields describe.

        Raises:
          InputError: a wrong or unknown field.
        """
        known = dataclasses.fields(cls)
        fields.only("kind", *(field.name for field in known))
        values = {field.name: field.metadata["read"](fields) for field in known}
        return cls(**values)._check(fields)

    def _check(self, fields: Fields) -> Kind:
        del fields  # some kinds check fields that depend on each other
        return self

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns the outputs of the column, whose usable name is ``name``."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that are not at their defaults, and the kind."""
        found: dict[str, Any] = {"kind": self.kind}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                found[field.name] = _plain(value)
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, datetime.datetime) else value


def _range(fields: Fields) -> tuple[float, float] | None:
    return fields.range("range")


def _length(fields: Fields) -> int | None:
    if fields.get("length") is None:
        return None
    return fields.integer("length", None, at_least=1, at_most=_MOST_LENGTH)


def _separator(fields: Fields) -> str:
    separator = fields.text("separator", "")
    if separator and fields.get("length") is None:
        raise fields.wrong("length", "beside separator", "length = 8")
    return separator


def _missing(fields: Fields) -> str | float:
    value = fields.get("missing", NAN)
    if value in MISSING:
        return str(value)
    if isinstance(value, str):
        return fields.choice("missing", MISSING)
    number = fields.number("missing")
    return NAN if number is None else number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numeric(Kind):
    """A number, or a list of numbers.

    Attributes:
      range: Range to which values are clipped before they are scaled to [-1, 1]; None
        for neither.
      log: Whether sign(x) log(1 + |x|) is taken, after clipping and before scaling.
      mean: Subtracted from values, instead of scaling to [-1, 1].
      scale: Divisor of values, after ``mean`` is subtracted.
      missing: "nan"; "indicator" for 0 and a column NAME_missing; "refuse"; or a number
        in place of missing ones.
      length: Length to which lists are truncated or padded with 0; None for a single
        number.
      separator: Separator of the numbers in a text.
    """

    kind: ClassVar[str] = "numeric"
    range: tuple[float, float] | None = _read(_range, None)
    log: bool = _read(lambda fields: fields.flag("log"), False)
    mean: float | None = _read(lambda fields: fields.number("mean"), None)
    scale: float | None = _read(lambda fields: fields.number("scale", above=0), None)
    missing: str | float = _read(_missing, NAN)
    length: int | None = _read(_length, None)
    separator: str = _read(_separator, "")

    def _check(self, fields: Fields) -> Kind:
        if (self.mean is None) != (self.scale is None):
            absent = "mean" if self.mean is None else "scale"
            raise fields.wrong(absent, "beside mean or scale", f"{absent} = 1.0")
        if self.length is not None and self.missing not in (NAN, REFUSE):
            raise fields.wrong("missing", "left out of a list", "no missing")
        return self

    @property
    def is_scaled(self) -> bool:
        """Whether the schema scales the values."""
        return self.range is not None or self.log or self.scale is not None

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns the number or list, and its indicator."""
        name = self.name or name
        if self.length is not None:
            return (Output(name=name, role=NUMBERS, shape=(self.length,)),)
        role = NUMBER if self.is_scaled else COUNT
        number = Output(name=name, role=role, nullable=self.missing == NAN)
        if self.missing != INDICATOR:
            return (number,)
        return number, Output(name=f"{name}_missing", role=NUMBER, dtype="int8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boolean(Kind):
    """True or false.

    Attributes:
      missing: As in ``Numeric``.
    """

    kind: ClassVar[str] = "boolean"
    missing: str | float = _read(_missing, NAN)

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns 0 or 1, and its indicator."""
        return Numeric(range=(0, 1), name=self.name, missing=self.missing).outputs(name)


def _hash_buckets(fields: Fields) -> int:
    if fields.get("vocabulary") is not None and fields.get("buckets") is not None:
        raise fields.wrong("buckets", "left out beside vocabulary", "one of them")
    return fields.integer("buckets", 1024, at_least=2, at_most=MOST_IDS)


def _vocabulary(fields: Fields) -> tuple[str, ...] | None:
    return fields.texts("vocabulary", 'vocabulary = ["red", "green"]')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Category(Kind):
    """One of many values, or a list of them.

    Attributes:
      buckets: Number of ids of hashed values, including 0 for missing.
      vocabulary: Values with ids of their own, from 2; 1 is for all others.
      length: As in ``Numeric``.
      separator: Separator of the values in a text.
    """

    kind: ClassVar[str] = "category"
    buckets: int = _read(_hash_buckets, 1024)
    vocabulary: tuple[str, ...] | None = _read(_vocabulary, None)
    length: int | None = _read(_length, None)
    separator: str = _read(_separator, "")

    @property
    def size(self) -> int:
        """Number of ids."""
        return self.buckets if self.vocabulary is None else len(self.vocabulary) + 2

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns the id or ids."""
        shape = () if self.length is None else (self.length,)
        return (
            Output(
                name=self.name or name,
                role=IDS if shape else ID,
                dtype="int32",
                shape=shape,
                size=self.size,
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Kind):
    """Words in lower case, separated by characters that are no letters or digits.

    Attributes:
      tokens: Maximum number of words, the first ones.
      buckets: Number of ids of hashed words, including 0 for padding.
    """

    kind: ClassVar[str] = "text"
    tokens: int = _read(
        lambda fields: fields.integer("tokens", 32, at_least=1, at_most=_MOST_LENGTH),
        32,
    )
    buckets: int = _read(
        lambda fields: fields.integer("buckets", 8192, at_least=2, at_most=MOST_IDS),
        8192,
    )

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns the ids."""
        return (
            Output(
                name=self.name or name,
                role=IDS,
                dtype="int32",
                shape=(self.tokens,),
                size=self.buckets,
            ),
        )


_PARTS = ("month", "weekday")


def _parts(fields: Fields) -> tuple[str, ...]:
    example = 'parts = ["month", "weekday", "hour"]'
    parts = fields.texts("parts", example) or _PARTS
    if not set(parts) <= set(PARTS):
        raise fields.wrong("parts", f"among {', '.join(PARTS)}", example)
    if {YEAR, DAYS} & set(parts) and fields.get("range") is None:
        raise fields.wrong(
            "range",
            "which year and days need",
            "range = [2020-01-01, 2030-01-01]",
        )
    return parts


def _dates(
    fields: Fields,
) -> tuple[datetime.datetime, datetime.datetime] | None:
    value = fields.get("range")
    if value is None:
        return None
    pair = isinstance(value, list | tuple) and len(value) == 2
    ends = [
        Fields({"range": each}, fields.place).moment("range")
        for each in (value if pair else ())
    ]
    if len(ends) != 2 or not ends[0] < ends[1]:  # type: ignore[operator]
        raise fields.wrong(
            "range",
            "two dates, the first first",
            "range = [2020-01-01, 2030-01-01]",
        )
    return ends[0], ends[1]  # type: ignore[return-value]


def _format(fields: Fields) -> str:
    found = fields.text("format", "")
    unknown = set(re.findall("%(.?)", found, re.DOTALL)) - set(_DIRECTIVES)
    if unknown:
        wanted = (
            f"of Python's strptime, without %{min(unknown)}: one of "
            f"%{', %'.join(_DIRECTIVES)}"
        )
        raise fields.wrong("format", wanted, 'format = "%d.%m.%Y %H:%M"')
    return found


def _zone(fields: Fields) -> str:
    zone = fields.text("zone", UTC)
    try:
        if zone != UTC:  # small container images have no time zones
            zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        wanted = "a time zone that this system knows"
        raise fields.wrong("zone", wanted, 'zone = "UTC"') from None
    return zone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Date(Kind):
    """A day or a time.

    Attributes:
      parts: Some of ``PARTS``, each of which becomes a column NAME_part.
      range: First and last date.  "year" needs it to bound its ids, and "days", which
        is clipped to it and scaled to [-1, 1].
      format: Format of texts for Python's ``strptime``; empty for ISO 8601.
      zone: Time zone to which times with a zone are converted.
    """

    kind: ClassVar[str] = "date"
    parts: tuple[str, ...] = _read(_parts, _PARTS)
    range: tuple[datetime.datetime, datetime.datetime] | None = _read(_dates, None)
    format: str = _read(_format, "")
    zone: str = _read(_zone, UTC)

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns a column for each part."""
        found = []
        for part in self.parts:
            full = f"{self.name or name}_{part}"
            if part == DAYS:
                found.append(Output(name=full, role=NUMBER, nullable=True))
            else:
                size = self.num_years + 2 if part == YEAR else ID_PARTS[part]
                found.append(Output(name=full, role=ID, dtype="int32", size=size))
        return tuple(found)

    @property
    def num_years(self) -> int:
        """Number of years in ``range``."""
        return self.range[1].year - self.range[0].year + 1 if self.range else 0


def _classes(fields: Fields) -> tuple[str, ...] | int | None:
    value = fields.get("classes")
    if type(value) is int:
        return fields.integer("classes", None, at_least=2, at_most=MOST_IDS)
    return fields.texts("classes", 'classes = ["no", "yes"]')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label(Kind):
    """The column to predict, which becomes ``label``.

    Attributes:
      task: "binary", "classes" or "regression".
      classes: Values that become 0, 1, ...; or the number of integers from 0; None for
        0 and 1, or false and true.
      range: Range of a regression: numbers are clipped to it and scaled to [-1, 1].
    """

    kind: ClassVar[str] = "label"
    task: str = _read(lambda fields: fields.choice("task", TASKS), BINARY)
    classes: tuple[str, ...] | int | None = _read(_classes, None)
    range: tuple[float, float] | None = _read(_range, None)

    def _check(self, fields: Fields) -> Kind:
        if self.name:
            raise fields.wrong("name", "left out: a label is named label", "no name")
        example = 'classes = ["no", "yes"]'
        if self.task == REGRESSION:
            if self.classes is not None:
                raise fields.wrong("classes", "left out of a regression", "no classes")
            if self.range is None:
                wanted = "which is public: no number that was seen in the data"
                raise fields.wrong("range", wanted, "range = [0, 100]")
        elif self.range is not None:
            raise fields.wrong("range", "left out but of a regression", "no range")
        elif self.task == CLASSES and self.num_classes < 2:
            raise fields.wrong("classes", "two or more values, or a number", example)
        elif self.task == BINARY and not self._is_pair:
            wanted = "two values, the one that becomes 0 first"
            raise fields.wrong("classes", wanted, example)
        return self

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that are not at their defaults, and kind and task."""
        return {**Kind.to_json(self), "task": self.task}

    @property
    def _is_pair(self) -> bool:
        if self.classes is None:
            return True
        return not isinstance(self.classes, int) and len(self.classes) == 2

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 for a regression, or if the schema does not say."""
        if isinstance(self.classes, int):
            return self.classes
        return len(self.classes or ()) or (2 if self.task == BINARY else 0)

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns the column ``label``, whatever the name."""
        del name
        dtype = {BINARY: "int8", CLASSES: "int32", REGRESSION: "float32"}[self.task]
        return (Output(name=LABEL, role=LABEL, dtype=dtype),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class User(Kind):
    """Id of the row's user: integers or text, none missing."""

    kind: ClassVar[str] = USER

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns nothing: no model uses ids."""
        del name
        return ()

    def _check(self, fields: Fields) -> Kind:
        if self.name:
            raise fields.wrong("name", "left out: ids do not stay", "no name")
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop(Kind):
    """A column that is left out."""

    kind: ClassVar[str] = "drop"

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns nothing."""
        del name
        return ()


KINDS: dict[str, type[Kind]] = {
    kind.kind: kind
    for kind in (Numeric, Category, Text, Date, Boolean, Label, User, Drop)
}


def usable_name(name: str) -> str:
    """Returns a name that a model can use for a column: letters, digits and _.

    Example:
      >>> usable_name("hours-per-week"), usable_name("2nd")
      ('hours_per_week', 'c_2nd')
    """
    plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    return plain if re.match("[A-Za-z]", plain) else f"c_{plain}"


def is_usable(name: str) -> bool:
    """Whether a model can use this name for a column."""
    return re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name) is not None
