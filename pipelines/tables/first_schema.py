"""A first schema of a table, for the user to complete.

Formal guarantees:
  - No value is read, only names and types in the footers of Parquet, or the header of
    text.  Other fields are left to the user.
  - The schema can be read: names of columns and classes are quoted as in TOML.

Public: the schema.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence

from accounting.core.validation import InputError, did_you_mean
from pipelines.core.batches.columns import RESERVED_NAMES
from pipelines.files.paths import StrPath
from pipelines.tables import cells
from pipelines.tables.kinds import (
    BINARY,
    CLASSES,
    DAYS,
    ID_PARTS,
    LABEL,
    PARTS,
    REGRESSION,
    USER,
    YEAR,
    usable_name,
)
from pipelines.tables.reading import kind_of_type
from pipelines.tables.schema import (
    UNCHOSEN,
    VERSION,
    InputOptions,
    hint_of_delimiter,
    shown_names,
)
from pipelines.tables.table_files import (
    PARQUET,
    TableFile,
    columns_of,
    list_table,
)

_HEAD = """\
# How the columns of a table become numbers, for `dpsgd prepare --schema`.
#
# Made from {source} alone.  No value was looked at:
# there may be missing values, ranges and classes that are not in this file.
#
# This file is public.  Write no number into it that was counted from the data: a range
# holds the possible values, a vocabulary public ones.
version = {version}
"""
_SPLIT = """
[split]  # train, val and test
by = "random"  # or "fraction", first to last; "hash" or "time" of a column
shares = [80, 10, 10]
"""
_SPLIT_BY_USER = """
[split]  # train, val and test
by = "hash"  # of the user: all rows of one are in one split
column = {user}
shares = [80, 10, 10]
"""


#: The least and the largest possible value of a column, which are public.
Range = tuple[float, float] | tuple[datetime.datetime, datetime.datetime]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the schema.

    Attributes:
      name: Name in the table.
      type: Type in the file.
      kind: Kind in the schema.
      lines: Lines after ``kind``.
    """

    name: str
    type: str
    kind: str
    lines: tuple[str, ...] = ()


def first_schema(
    table: StrPath,
    *,
    label: str = "",
    classes: Sequence[str] = (),
    kinds: Mapping[str, str] | None = None,
    ranges: Mapping[str, Range] | None = None,
    options: InputOptions | None = None,
) -> str:
    """Returns the text of a first schema.

    Args:
      table: A file, a folder or a glob.
      label: Column to predict; empty if unknown.
      classes: Its values, which are public; empty if unknown.
      kinds: Name of a column -> its kind, where known.
      ranges: Name of a column -> its range, where known.  One of numbers makes it a
        number, or the label one that is predicted; one of dates makes it a date.
      options: How text is read.

    Raises:
      InputError: no table, or a column that it does not have.
    """
    file = list_table(table)[0]
    options = options or InputOptions()
    types = columns_of(file, options)
    kinds, ranges = dict(kinds or {}), ranges or {}
    told = [*([label] if label else []), *kinds, *ranges]
    has_header = file.has_header or bool(options.header or types.keys() & set(told))
    for name in told:
        _check_there(name, list(types), file, has_header)
    if label in kinds and label:
        raise InputError(
            f"Expected column {label} to be the label alone. Leave it out of "
            f"--{kinds[label]}."
        )
    if len(classes) == 1:
        raise InputError(
            f"Expected two classes or more, not {classes[0]} alone. Give all of them, "
            "as --classes no,yes."
        )
    for name in ranges.keys() - {label}:
        kinds.setdefault(name, _kind_of(ranges[name]))
    for name, ends in ranges.items():
        _check_range(name, "numeric" if name == label else kinds[name], ends)
    if classes and label in ranges:
        raise InputError(
            f"Expected label {label} to be of classes, or a number with a range; it "
            "has both. Leave out --classes or --range."
        )
    columns = [
        _label(name, kind, classes, ranges.get(name), file.format)
        if label and name == label
        else _column(name, kind, kinds.get(name), ranges.get(name), file.format)
        for name, kind in types.items()
    ]
    return _text(columns, file.format, options)


def _check_there(
    name: str, names: Sequence[str], file: TableFile, has_header: bool
) -> None:
    if name not in names:
        raise InputError(
            f"Expected column {name} in {file.shown}; {shown_names(names, has_header)}."
            f"{did_you_mean(name, names)}"
            f"{hint_of_delimiter(names[0]) if len(names) == 1 else ''}"
        )


def _kind_of(ends: Range) -> str:
    return "date" if isinstance(ends[0], datetime.datetime) else "numeric"


def _check_range(name: str, kind: str, ends: Range) -> None:
    if kind != _kind_of(ends):
        raise InputError(
            f"Expected --range {name} to be of a {_kind_of(ends)} column; it is "
            f"{kind}. Leave it out, or give the column another kind."
        )


# --- From names and types -----------------------------------------------------------


def _column(
    name: str, kind: str, told: str | None, ends: Range | None, table: str
) -> _Column:
    """Returns a column by the user's choice, or its type."""
    chosen = told
    if chosen is None and (not name or re.fullmatch("__index_level_[0-9]+__", name)):
        chosen = "drop"
    if chosen is None:
        chosen = UNCHOSEN if table != PARQUET else kind_of_type(kind)
    lines = _LINES[chosen](kind)
    if ends is not None:
        known = _length(kind) if chosen == "numeric" else [_parts(kind, PARTS)]
        lines = (*known, _range(ends))
    if chosen == "numeric" and not told and re.search("(^|_)id$", name.lower()):
        lines += ('# of ids: kind = "drop", "category" or "user"',)
    return _Column(name=name, type=kind, kind=chosen, lines=lines)


def _length(kind: str) -> list[str]:
    if cells.family(kind) != cells.LIST:
        return []
    sizes = re.findall(r"\[([0-9]*)\]", kind)
    if not all(sizes):
        return ["length = 16  # longer lists are truncated, shorter ones padded with 0"]
    return [f"length = {math.prod(map(int, sizes))}"]


def _numeric(kind: str) -> tuple[str, ...]:
    hint = "# range = [0, 100]  # clips, and scales to [-1, 1]; also: log = true"
    return (*_length(kind), hint)


def _category(kind: str) -> tuple[str, ...]:
    hint = '# vocabulary = ["red", "green"]  # in place of buckets'
    found = (*_length(kind), "buckets = 1024  # of the hash", hint)
    if kind.startswith("ENUM") or cells.family(kind) == cells.LIST:
        return found
    return (*found, '# of words: kind = "text" and tokens = 32, with other buckets')


def _range(ends: Range) -> str:
    low, high = (str(end).replace(" ", "T") for end in ends)
    return f"range = [{low}, {high}]"


def _parts(kind: str, parts: Sequence[str]) -> str:
    """Returns the line of parts; text may hold days alone, or times."""
    told = [
        each for each in parts if each != "hour" or cells.family(kind) != cells.DATE
    ]
    return f"parts = {json.dumps(told)}"


def _date(kind: str) -> tuple[str, ...]:
    hint = f"# also {DAYS}, which need a range, as years may have one:"
    return (
        _parts(kind, (YEAR, *ID_PARTS)),
        hint,
        "# range = [2020-01-01, 2030-01-01]",
    )


_LINES = {
    "numeric": _numeric,
    "category": _category,
    "date": _date,
    "boolean": lambda kind: (),
    "text": lambda kind: ("tokens = 32  # words that are kept", "buckets = 8192"),
    USER: lambda kind: ("# none may be missing; the ids are removed",),
    "drop": lambda kind: (),
    UNCHOSEN: lambda kind: (),
}


def _label(
    name: str,
    kind: str,
    classes: Sequence[str],
    ends: Range | None,
    table: str,
) -> _Column:
    def of(task: str, *lines: str) -> _Column:
        lines = (f'task = "{task}"', *lines)
        return _Column(name=name, type=kind, kind=LABEL, lines=lines)

    if ends is not None:
        return of(REGRESSION, _range(ends))
    if classes:
        task = BINARY if len(classes) == 2 else CLASSES
        return of(task, f"classes = {_words(classes)}")
    held = cells.family(kind)
    if held == cells.BOOLEAN:
        return of(BINARY)
    if held == cells.INTEGER:
        hint = '# 0 or 1; or "classes" with classes = [1, 2, 3]; or "regression"'
        return of(BINARY, hint)
    if held in cells.NUMBERS:
        return of(REGRESSION, "range = []  # to be chosen: smallest and largest")
    if table != PARQUET:
        hint = '# classes = ["no", "yes"]  # unless they are 0 and 1, or false and true'
        return of(BINARY, hint)
    return of(BINARY, 'classes = []  # to be chosen, such as ["no", "yes"]')


# --- TOML ---------------------------------------------------------------------------


def _text(columns: Sequence[_Column], table: str, options: InputOptions) -> str:
    source = "names and types of columns" if table == PARQUET else "names of columns"
    head = _HEAD.format(source=source, version=VERSION)
    if fields := options.model_dump(exclude_defaults=True):
        lines = [f"{name} = {_value(value)}\n" for name, value in fields.items()]
        head += "\n[input]\n" + "".join(lines)
    taken: set[str] = set()
    tables = [_table(column, table, taken) for column in columns]
    split = _SPLIT
    for column in columns:
        if column.kind == USER:
            split = _SPLIT_BY_USER.format(user=_word(column.name))
    return "\n".join([head.rstrip("\n"), split.rstrip("\n"), *tables]) + "\n"


def _table(column: _Column, table: str, taken: set[str]) -> str:
    told = f"  # {column.type}" if table == PARQUET else ""
    kind = f'kind = "{column.kind}"'
    if column.kind == UNCHOSEN:
        kind += "  # numeric, category, text, date, boolean, user or drop"
    lines = ["", f"[columns.{_key(column.name)}]{told}", kind]
    if column.kind not in (LABEL, USER, "drop"):
        name = usable_name(column.name)
        others = (f"{name}_{number}" for number in itertools.count(2))
        used = {*taken, *RESERVED_NAMES, LABEL}
        free = next(
            each for each in itertools.chain([name], others) if each not in used
        )
        taken.add(free)
        if free != name:
            lines.append(f'name = "{free}"')
    return "\n".join([*lines, *column.lines])


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _word(name)


def _word(text: str) -> str:
    # TOML's strings are JSON's, but with this character escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: str | bool | Sequence[str]) -> str:
    return (
        json.dumps(value)
        if isinstance(value, bool)
        else _word(value)
        if isinstance(value, str)
        else _words(value)
    )


def _words(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_word, texts))}]"
