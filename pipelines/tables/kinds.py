"""Kinds of columns: their fields in a schema, their outputs, and their SQL.

    kind       becomes
    numeric    a float32, NaN if missing; or float32[length]
    boolean    the same, 0 or 1
    category   an int32 id, 0 if missing; or int32[length], padded with 0
    text       int32[tokens], ids of its words, padded with 0
    date       an int32 id for each part, 0 if missing; days are a float32
    label      int8 (binary), int32 (classes) or float32 (regression)
    user       nothing; holds the user's id (`Schema.user`)
    drop       nothing

A new kind is one class here: its fields, ``outputs``, and ``select``, which adds its
expressions and faults to a `Select`; and its name in ``AnyKind`` and ``KINDS``.

A row's numbers depend only on this row and on the schema: every constant with which a
value is transformed comes from the schema, which is public.  A missing number is NaN,
or the schema's choice; a missing category, word or part of a date is 0, and a present
one never is.  A cell that its kind does not accept makes its row malformed, for a
reason that names column and kind, and quotes nothing of the cell.

Public: kinds, names and reasons.  Sensitive: cells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import re
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    model_validator,
)

from pipelines.tables import cells
from pipelines.tables.cells import Cell, Ids

MOST_IDS = 2**31 - 1
_MOST_LENGTH = 1 << 20
_MOST_FLOAT = float(np.finfo(np.float32).max)

#: Roles of an output; see ``Output``.
COUNT, NUMBER, NUMBERS, ID, IDS = "count", "number", "numbers", "id", "ids"

#: What a missing number becomes.
NAN: Final = "nan"
INDICATOR: Final = "indicator"
REFUSE: Final = "refuse"

BINARY: Final = "binary"
CLASSES: Final = "classes"
REGRESSION: Final = "regression"

#: Part of a date -> number of ids, including 0 for missing.
ID_PARTS = {"month": 13, "weekday": 8, "day": 32, "hour": 25}
YEAR, DAYS = "year", "days"
PARTS = (YEAR, *ID_PARTS, DAYS)
_PART = {
    YEAR: "year({})",
    "month": "month({})",
    "weekday": "isodow({})",
    "day": "day({})",
    "hour": "hour({}) + 1",
}

UTC = "UTC"
#: Of ``strptime``, without those of the machine's language; %Z would ignore the zone.
_DIRECTIVES = "YmdHMSfzybBjIpaAwGVuUW%"
_EPOCH = datetime.datetime(1970, 1, 1)

#: Divisor of logarithms without another scale: counts of thousands become about 2.
LOG_SCALE = 4.0

LABEL: Final = "label"
USER: Final = "user"
#: Output that holds the one text of each row's user.
USER_ID = "__user"
_NO_CLASS = "is none of the classes of this label"
_NO_TEXT = (
    "no whole number, or one of more digits than floating point holds; as a "
    "category store it as a text"
)
_NO_DATE = "is not a date of the format that the schema says"


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


def _ids(name: str, size: int, length: int | None = None) -> Output:
    """Returns an output of ids, or of lists of so many."""
    shape, role = ((), ID) if length is None else ((length,), IDS)
    return Output(name=name, role=role, dtype="int32", shape=shape, size=size)


# --- Fields -------------------------------------------------------------------------


def _increasing(ends: tuple[Any, Any]) -> tuple[Any, Any]:
    if not ends[0] < ends[1]:
        raise ValueError("two values, the smaller first")
    return ends


def _words(values: Any) -> Any:
    if not isinstance(values, list | tuple) or not values:
        raise ValueError("a list with a value or more")
    if not all(isinstance(each, str | int) for each in values):
        raise ValueError("a list of texts or integers")
    words = tuple(cells.one_word(each) for each in values)
    if len(set(words)) < len(words):
        raise ValueError("a list of different values")
    return words


def _directives(form: str) -> str:
    unknown = set(re.findall("%(.?)", form, re.DOTALL)) - set(_DIRECTIVES)
    if unknown:
        raise ValueError(
            f"of strptime, without %{min(unknown)}: one of %{', %'.join(_DIRECTIVES)}"
        )
    return form


def _zone(zone: str) -> str:
    try:
        if zone != UTC:  # small container images have no time zones
            zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError("a time zone that this system knows") from None
    return zone


def to_moment(value: Any) -> datetime.datetime:
    """Returns the time of a date, a time or an ISO text.

    Raises:
      ValueError: it is something else, or has a zone.
    """
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.datetime.fromisoformat(value)
    if type(value) is datetime.date:
        value = datetime.datetime.combine(value, datetime.time())
    if not isinstance(value, datetime.datetime) or value.tzinfo is not None:
        raise ValueError("a date, or a time without a zone")
    return value


Number = FiniteFloat
Range = Annotated[tuple[Number, Number], AfterValidator(_increasing)]
Moment = Annotated[datetime.datetime, BeforeValidator(to_moment)]
Dates = Annotated[tuple[Moment, Moment], AfterValidator(_increasing)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Length = Annotated[int, Field(ge=1, le=_MOST_LENGTH)]
Buckets = Annotated[int, Field(ge=2, le=MOST_IDS)]
Missing = Literal["nan", "indicator", "refuse"] | Number
OutputName = Annotated[str, StringConstraints(pattern="^([A-Za-z][A-Za-z0-9_]*)?$")]


class Fields(BaseModel):
    """A table of a schema file.  Unknown fields are refused, nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Kind(Fields):
    """A column of the table.

    Attributes:
      name: Name of its output; empty for that of the column.
      stack: Name of an output that holds this column beside others of the same role:
        one array in place of many.
    """

    kind: str
    name: OutputName = ""
    stack: OutputName = ""

    #: Families of types whose cells it takes, besides texts; see `cells.family`.
    takes: ClassVar[tuple[str, ...]] = ()

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns the outputs of the column, whose usable name is ``name``."""
        del name
        return ()

    def select(self, cell: Cell, names: Sequence[str]) -> None:
        """Adds the expressions of the outputs, and the faults of cells.

        Args:
          cell: The cell of the column.
          names: Names of the outputs.
        """

    @property
    def is_list(self) -> bool:
        """Whether cells are lists."""
        return getattr(self, "length", None) is not None


# --- Numbers ------------------------------------------------------------------------


def _transformed(value: str, kind: Numeric) -> str:
    """Returns a number clipped, in logarithms and scaled, a FLOAT; null if null."""
    known = f"{value} IS NOT NULL"  # least and greatest leave nulls out
    low, high = kind.range or (-_MOST_FLOAT, _MOST_FLOAT)

    def log(number: float) -> float:
        return float(np.sign(number) * np.log(1 + abs(number)))

    value = f"greatest(least({value}, {high!r}::DOUBLE), {low!r}::DOUBLE)"
    if kind.log:
        value = f"sign({value}) * ln(1 + abs({value}))"
        low, high = log(low), log(high)
    if kind.scale is not None:
        value = f"({value} - {kind.mean or 0.0!r}::DOUBLE) / {kind.scale!r}::DOUBLE"
        value = f"greatest(least({value}, {_MOST_FLOAT!r}), {-_MOST_FLOAT!r})"
    elif kind.range is not None:
        value = f"2 * ({value} - {low!r}::DOUBLE) / {high - low!r}::DOUBLE - 1"
    elif kind.log:
        value = f"{value} / {LOG_SCALE}"
    return f"CASE WHEN {known} THEN CAST({value} AS FLOAT) END"


def _with_missing(
    cell: Cell,
    value: str,
    missing: str | float,
    names: Sequence[str],
    transform: Callable[[str], str],
) -> None:
    """Adds a number and, if ``missing`` asks for it, its indicator.

    Args:
      cell: The cell.
      value: Expression of its number, null if missing.
      missing: The schema's choice for missing values.
      names: Names of the outputs.
      transform: Function from a DOUBLE to a FLOAT.
    """
    output = cell.select.output
    if missing == REFUSE:
        cell.fault(f"{value} IS NULL", "is missing")
    if isinstance(missing, str):
        absent = "'nan'" if missing == NAN else "0"
        output(names[0], f"coalesce({transform(value)}, {absent}::FLOAT)")
    else:
        output(names[0], transform(f"coalesce({value}, {missing!r}::DOUBLE)"))
    if missing == INDICATOR:
        output(names[1], f"CAST({value} IS NULL AS TINYINT)")


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

    kind: Literal["numeric"] = "numeric"
    range: Range | None = None
    log: bool = False
    mean: Number | None = None
    scale: Annotated[Number, Field(gt=0)] | None = None
    missing: Missing = NAN
    length: Length | None = None
    separator: str = ""

    takes: ClassVar[tuple[str, ...]] = cells.NUMBERS

    @model_validator(mode="after")
    def _check(self) -> Numeric:
        if (self.mean is None) != (self.scale is None):
            raise ValueError("to have mean and scale, or neither")
        if self.length is not None and self.missing not in (NAN, REFUSE):
            raise ValueError('to be missing = "nan" or "refuse" in a list')
        if self.separator and self.length is None:
            raise ValueError("to have length = 8 beside separator")
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

    def select(self, cell: Cell, names: Sequence[str]) -> None:
        """Adds the number or list, and its indicator."""
        if self.length is not None:
            self._select_list(cell, names)
            return
        value = cell.number("is not a number")
        if self.range is None:
            infinite = "is not finite, and has no range in the schema"
            cell.fault(f"isinf({value})", infinite)
        transform = functools.partial(_transformed, kind=self)
        _with_missing(cell, value, self.missing, names, transform)

    def _select_list(self, cell: Cell, names: Sequence[str]) -> None:
        select = cell.select
        found, inner = cell.elements(self.separator)
        each = f"lambda e: {cell.parsed('e', inner)}"
        parsed = select.define(4, f"list_transform({found}, {each})")
        each = f"lambda e: {cells.known_number('e', select.missing)}"
        values = select.define(5, f"list_transform({parsed}, {each})")
        bad = f"list_count({found}) > list_count({parsed})"
        if self.range is None:
            infinite = f"list_count(list_filter({values}, lambda e: isinf(e))) > 0"
            bad = f"{bad} OR {infinite}"
        cell.fault(bad, "holds what is not a number")
        if self.missing == REFUSE:
            gaps = f"{found} IS NULL OR len({values}) > list_count({values})"
            cell.fault(gaps, "is missing, or a number of it is")
        each = f"lambda e: coalesce({_transformed('e', self)}, 0)"
        some = f"list_slice({values}, 1, {self.length})"
        select.output(
            names[0],
            f"CAST(list_resize(coalesce(list_transform({some}, {each}), []), "
            f"{self.length}, 0) AS FLOAT[{self.length}])",
        )


class Boolean(Kind):
    """True or false.

    Attributes:
      missing: As in ``Numeric``.
    """

    kind: Literal["boolean"] = "boolean"
    missing: Missing = NAN

    takes: ClassVar[tuple[str, ...]] = (*cells.NUMBERS, cells.BOOLEAN)

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns 0 or 1, and its indicator."""
        return Numeric(range=(0, 1), name=self.name, missing=self.missing).outputs(name)

    def select(self, cell: Cell, names: Sequence[str]) -> None:
        """Adds 0 or 1, and its indicator."""
        value = cell.select.define(3, cells.truth(cell.known, cell.kind))
        cell.fault(
            f"{cell.known} IS NOT NULL AND {value} IS NULL AND NOT {cell.is_nan()}",
            "is neither true nor false",
        )
        _with_missing(cell, value, self.missing, names, "CAST({} AS FLOAT)".format)


# --- Categories and words -----------------------------------------------------------


class Category(Kind):
    """One of many values, or a list of them.

    Attributes:
      buckets: Number of ids of hashed values, including 0 for missing.
      vocabulary: Values with ids of their own, from 2; 1 is for all others.
      length: As in ``Numeric``.
      separator: Separator of the values in a text.
    """

    kind: Literal["category"] = "category"
    buckets: Buckets = 1024
    vocabulary: Words | None = None
    length: Length | None = None
    separator: str = ""

    takes: ClassVar[tuple[str, ...]] = (*cells.NUMBERS, cells.BOOLEAN, cells.DATE)

    @model_validator(mode="after")
    def _check(self) -> Category:
        if self.vocabulary is not None and "buckets" in self.model_fields_set:
            raise ValueError("to have buckets or vocabulary, not both")
        if self.separator and self.length is None:
            raise ValueError("to have length = 8 beside separator")
        return self

    @property
    def size(self) -> int:
        """Number of ids."""
        return self.buckets if self.vocabulary is None else len(self.vocabulary) + 2

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns the id or ids."""
        return (_ids(self.name or name, self.size, self.length),)

    def select(self, cell: Cell, names: Sequence[str]) -> None:
        """Adds the text or texts, of which ids are made."""
        ids = Ids(
            buckets=self.buckets,
            vocabulary=self.vocabulary,
            salt=names[0],
            length=self.length,
        )
        if self.length is None:
            cell.select.output(names[0], cell.text(f"is {_NO_TEXT}"), ids=ids)
            return
        found, inner = cell.elements(self.separator)
        text = f"lambda e: {cells.text('e', inner)}"
        parsed = cell.select.define(4, f"list_transform({found}, {text})")
        if cells.family(inner) != cells.TEXT:
            bad = f"list_count({found}) > list_count({parsed})"
            cell.fault(bad, f"holds {_NO_TEXT}")
        known = f"list_transform({parsed}, lambda e: {cell.known_text('e')})"
        cell.select.output(names[0], f"list_slice({known}, 1, {self.length})", ids=ids)


class Text(Kind):
    """Words in lower case, separated by characters that are no letters or digits.

    Attributes:
      tokens: Maximum number of words, the first ones.
      buckets: Number of ids of hashed words, including 0 for padding.
    """

    kind: Literal["text"] = "text"
    tokens: Length = 32
    buckets: Buckets = 8192

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns the ids."""
        return (_ids(self.name or name, self.buckets, self.tokens),)

    def select(self, cell: Cell, names: Sequence[str]) -> None:
        """Adds the words, of which ids are made."""
        words = f"regexp_extract_all(lower({cell.known}), '[\\pL\\pN]+')"
        ids = Ids(buckets=self.buckets, salt=names[0], length=self.tokens)
        cell.select.output(names[0], f"list_slice({words}, 1, {self.tokens})", ids=ids)


# --- Dates --------------------------------------------------------------------------


class Date(Kind):
    """A day or a time.

    Attributes:
      parts: Some of ``PARTS``, each of which becomes a column NAME_part.
      range: First and last date, which bound the ids of years; "days" are clipped to it
        and scaled to [-1, 1].
      format: Format of texts for ``strptime``; empty for ISO 8601.
      zone: Time zone to which times with a zone are converted.
    """

    kind: Literal["date"] = "date"
    parts: Annotated[tuple[str, ...], BeforeValidator(_words)] = (YEAR, *ID_PARTS)
    range: Dates = (datetime.datetime(1970, 1, 1), datetime.datetime(2069, 12, 31))
    format: Annotated[str, AfterValidator(_directives)] = ""
    zone: Annotated[str, AfterValidator(_zone)] = UTC

    takes: ClassVar[tuple[str, ...]] = (cells.DATE, cells.TIME, cells.ZONED)

    @model_validator(mode="after")
    def _check(self) -> Date:
        if not set(self.parts) <= set(PARTS):
            raise ValueError(f"to have parts among {', '.join(PARTS)}")
        if DAYS in self.parts and "range" not in self.model_fields_set:
            raise ValueError(
                "to have range = [2020-01-01, 2030-01-01], which days need"
            )
        return self

    def outputs(self, name: str) -> tuple[Output, ...]:
        """Returns a column for each part."""
        found = []
        for part in self.parts:
            full = f"{self.name or name}_{part}"
            if part == DAYS:
                found.append(Output(name=full, role=NUMBER, nullable=True))
            else:
                num_years = self.range[1].year - self.range[0].year + 1
                size = num_years + 2 if part == YEAR else ID_PARTS[part]
                found.append(_ids(full, size))
        return tuple(found)

    def select(self, cell: Cell, names: Sequence[str]) -> None:
        """Adds the parts."""
        value = cell.time(self.format, self.zone, _NO_DATE)
        for part, name in zip(self.parts, names, strict=True):
            if part == DAYS:
                low, high = (
                    (e - _EPOCH) / datetime.timedelta(days=1) for e in self.range
                )
                day = f"greatest(least(epoch_us({value}) / 86400e6, {high!r}), {low!r})"
                day = f"2 * ({day} - {low!r}) / {high - low!r} - 1"
                day = f"CASE WHEN {value} IS NOT NULL THEN {day} END"
                found = f"CAST(coalesce({day}, 'nan'::DOUBLE) AS FLOAT)"
            else:
                number = _PART[part].format(value)
                if part == YEAR:
                    first, last = self.range[0].year, self.range[1].year
                    number = (
                        f"CASE WHEN {number} BETWEEN {first} AND {last} THEN {number} "
                        f"- {first} + 2 WHEN {value} IS NOT NULL THEN 1 END"
                    )
                found = f"CAST(coalesce({number}, 0) AS INTEGER)"
            cell.select.output(name, found)


# --- Labels, users, and what is left out --------------------------------------------


class Label(Kind):
    """The column to predict, which becomes ``label``.

    Attributes:
      task: "binary", "classes" or "regression".
      classes: Values that become 0, 1, ...; or the number of integers from 0; None for
        0 and 1, or false and true.
      range: Range of a regression: numbers are clipped to it and scaled to [-1, 1].
    """

    kind: Literal["label"] = LABEL
    task: Literal["binary", "classes", "regression"] = BINARY
    classes: Annotated[int, Field(ge=2, le=MOST_IDS)] | Words | None = None
    range: Range | None = None

    takes: ClassVar[tuple[str, ...]] = (*cells.NUMBERS, cells.BOOLEAN)

    @model_validator(mode="after")
    def _check(self) -> Label:
        if self.name or self.stack:
            raise ValueError("to have no name: a label is named label")
        if self.task == REGRESSION:
            if self.classes is not None:
                raise ValueError("to have no classes, which a regression has not")
            if self.range is None:
                raise ValueError(
                    "to have a range, such as range = [0, 100]: one that is public, "
                    "no number that was seen in the data"
                )
        elif self.range is not None:
            raise ValueError("to have no range, which only a regression has")
        elif self.task == CLASSES and self.num_classes < 2:
            raise ValueError("to have classes: two values or more, or their number")
        elif self.task == BINARY and (
            isinstance(self.classes, int) or self.num_classes != 2
        ):
            raise ValueError('to have two classes, such as classes = ["no", "yes"]')
        return self

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

    def select(self, cell: Cell, names: Sequence[str]) -> None:
        """Adds the label."""
        select = cell.select
        if self.task == REGRESSION:
            value = cell.number()
            cell.fault(f"{value} IS NULL", "is not a number, as this label has to be")
            select.output(names[0], _transformed(value, Numeric(range=self.range)))
            return
        dtype = "TINYINT" if self.task == BINARY else "INTEGER"
        if isinstance(self.classes, tuple):
            value = cell.text(_NO_CLASS)
            place = f"list_position([{cells.listed(self.classes)}], {value})"
            place = select.define(4, place)
            cell.fault(f"{value} IS NULL", "is missing")
            cell.fault(f"{place} IS NULL", _NO_CLASS)
            select.output(names[0], f"CAST(coalesce({place}, 1) - 1 AS {dtype})")
            return
        is_counted = self.classes is not None
        read = cell.parsed if is_counted else cells.truth
        value = select.define(2, read(cell.known, cell.kind))
        last = self.num_classes - 1
        good = f"{value} BETWEEN 0 AND {last} AND floor({value}) = {value}"
        cell.fault(f"{cell.known} IS NULL OR {cell.is_nan()}", "is missing")
        cell.fault(
            f"NOT coalesce({good}, false)",
            f"is no integer from 0 to {last}: list its values by --classes of "
            "`dpsgd schema` and `fit`, or give the range of a number by --range",
        )
        value = f"CASE WHEN {good} THEN {value} ELSE 0 END"
        select.output(names[0], f"CAST({value} AS {dtype})")


class User(Kind):
    """Id of the row's user: integers or text, none missing.

    A person whose ids were two texts would be two users, and would keep twice as many
    rows as epsilon says; two people of one text keep fewer rows, and are hidden as a
    pair.  So what may be one id in two forms is one: texts that Unicode holds to be
    compatible (NFKC), without the white space around them, and numbers as in `cells`.
    """

    kind: Literal["user"] = USER

    takes: ClassVar[tuple[str, ...]] = cells.NUMBERS

    @model_validator(mode="after")
    def _check(self) -> User:
        if self.name or self.stack:
            raise ValueError("to have no name: ids do not stay")
        return self

    def select(self, cell: Cell, names: Sequence[str]) -> None:
        """Adds the one text of the id."""
        del names
        cell.select.output(USER_ID, cell.user_id())


class Drop(Kind):
    """A column that is left out."""

    kind: Literal["drop"] = "drop"


AnyKind = Annotated[
    Numeric | Boolean | Category | Text | Date | Label | User | Drop,
    Field(discriminator="kind"),
]
KINDS = ("numeric", "category", "text", "date", "boolean", LABEL, USER, "drop")


def usable_name(name: str) -> str:
    """Returns a name that a model can use for a column: letters, digits and _.

    Example:
      >>> usable_name("hours-per-week"), usable_name("2nd")
      ('hours_per_week', 'c_2nd')
    """
    plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    return plain if re.match("[A-Za-z]", plain) else f"c_{plain}"
