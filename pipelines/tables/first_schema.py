"""A first schema of a table, for the user to complete.

Only names and types are read, in the footers of Parquet or the header of text, and no
value.  Other fields are left to the user.  The schema can be read as it is: names of
columns and classes are quoted as in TOML.

Public: the schema.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import RESERVED_NAMES
from pipelines.files.storage import StrPath
from pipelines.tables import cells
from pipelines.tables.kinds import KINDS, LABEL, PARTS, USER, usable_name
from pipelines.tables.reading import kind_of_type
from pipelines.tables.schema import UNCHOSEN, VERSION, InputOptions
from pipelines.tables.table_files import PARQUET, columns_of, list_table, refuse_missing

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
{by}
shares = [80, 10, 10]
"""
_AT_RANDOM = 'by = "random"  # or "fraction", in order; "hash" or "time" of a column'
_BY_USER = 'by = "hash"  # of the user: all rows of one are in one split'
_IS_ID = re.compile("(^|_)id$", re.IGNORECASE)
#: The least and the largest possible value of a column, which are public.
Range = tuple[float, float] | tuple[datetime.datetime, datetime.datetime]


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
      classes: Values of the label, which are public; empty if unknown.
      kinds: Name of a column -> its kind, where known.
      ranges: Name of a column -> its range, where known.  One of numbers makes it a
        number, or the label one that is predicted; one of dates makes it a date.
      options: How text is read.

    Raises:
      InputError: there is no table, or it does not have a column.
    """
    file = list_table(table)[0]
    options, kinds, ranges = options or InputOptions(), dict(kinds or {}), ranges or {}
    types = columns_of(file, options)
    told = [*([label] if label else []), *kinds, *ranges]
    refuse_missing(told, list(types), file, options)
    for name, ends in ranges.items():
        kind = "date" if isinstance(ends[0], datetime.datetime) else "numeric"
        given = "numeric" if name == label else kinds.setdefault(name, kind)
        if given != kind:
            raise InputError(
                f"Expected --range {name} to be of a {kind} column; it is {given}. "
                "Leave it out, or give the column another kind."
            )
    if label in kinds and label:
        raise InputError(
            f"Expected column {label} to be the label alone. Leave it out of "
            f"--{kinds[label]}."
        )
    if len(classes) == 1 or (classes and label in ranges):
        raise InputError(
            f"Expected label {label} to be of two --classes or more, such as no,yes; "
            "or to be a number with a --range, and no classes."
        )
    is_typed, taken = file.format == PARQUET, {*RESERVED_NAMES, LABEL}
    tables = []
    for name, kind in types.items():
        is_index = not name or re.fullmatch("__index_level_[0-9]+__", name)
        by_type = kind_of_type(kind) if is_typed else UNCHOSEN
        chosen = kinds.get(name) or ("drop" if is_index else by_type)
        lines = _lines(kind, chosen, ranges.get(name))
        if name == label and label:
            chosen, lines = LABEL, _label(kind, classes, ranges.get(name), is_typed)
        elif chosen == "numeric" and name not in kinds and _IS_ID.search(name):
            lines += ['# of ids: kind = "drop", "category" or "user"']
        if chosen not in (LABEL, USER, "drop"):
            usable = usable_name(name)
            others = (f"{usable}_{number}" for number in itertools.count(2))
            free = next(e for e in itertools.chain([usable], others) if e not in taken)
            taken.add(free)
            lines = lines if free == usable else [f'name = "{free}"', *lines]
        head = f"[columns.{_key(name)}]{f'  # {kind}' if is_typed else ''}"
        hint = f"  # {', '.join(KINDS)}" if chosen == UNCHOSEN else ""
        tables.append("\n".join([head, f'kind = "{chosen}"{hint}', *lines]))
    source = "names and types of columns" if is_typed else "names of columns"
    head = _HEAD.format(source=source, version=VERSION)
    if fields := options.model_dump(exclude_defaults=True):
        lines = [f"{name} = {_value(each)}" for name, each in fields.items()]
        head += "\n".join(["", "[input]", *lines, ""])
    users = [name for name, kind in kinds.items() if kind == USER]
    by = f"{_BY_USER}\ncolumn = {_value(users[0])}" if users else _AT_RANDOM
    return "\n".join([head + _SPLIT.format(by=by), "\n\n".join(tables)]) + "\n"


# --- From names and types -----------------------------------------------------------


def _lines(kind: str, chosen: str, ends: Range | None) -> list[str]:
    """Returns the lines after the kind of a column."""
    length = []
    if cells.family(kind) == cells.LIST and chosen in ("numeric", "category"):
        sizes = re.findall(r"\[([0-9]*)\]", kind)
        length = ["length = 16  # longer lists are cut, shorter ones padded with 0"]
        if all(sizes):
            length = [f"length = {math.prod(map(int, sizes))}"]
    if chosen == "date":
        hours = cells.family(kind) != cells.DATE  # text may hold days alone, or times
        parts = [part for part in PARTS if hours or part != "hour"]
        if ends is not None:
            return [f"parts = {json.dumps(parts)}", _range(ends)]
        parts.remove("days")
        hint = "# also days, which need a range: [2020-01-01, 2030-01-01]"
        return [f"parts = {json.dumps(parts)}", hint]
    hint = "# range = [0, 100]  # clips, and scales to [-1, 1]; also: log = true"
    return {
        "numeric": [*length, hint if ends is None else _range(ends)],
        "category": [
            *length,
            "buckets = 1024  # of the hash",
            '# vocabulary = ["red", "green"]  # in place of buckets',
        ],
        "text": ["tokens = 32  # words that are kept", "buckets = 8192"],
        USER: ["# none may be missing; the ids are removed"],
    }.get(chosen, [])


def _range(ends: Range) -> str:
    low, high = (str(end).replace(" ", "T") for end in ends)
    return f"range = [{low}, {high}]"


def _label(
    kind: str, classes: Sequence[str], ends: Range | None, is_typed: bool
) -> list[str]:
    """Returns the lines after the kind of the label."""
    task, line, held = "binary", "", cells.family(kind)
    if ends is not None:
        task, line = "regression", _range(ends)
    elif classes:
        task = "binary" if len(classes) == 2 else "classes"
        line = f"classes = {_value(classes)}"
    elif held == cells.INTEGER:
        line = '# 0 or 1; or "classes" with classes = [1, 2, 3]; or "regression"'
    elif held in cells.NUMBERS:
        task, line = "regression", "range = []  # to be chosen: smallest and largest"
    elif not is_typed:
        line = '# classes = ["no", "yes"]  # unless they are 0 and 1, or false and true'
    elif held != cells.BOOLEAN:
        line = 'classes = []  # to be chosen, such as ["no", "yes"]'
    return [f'task = "{task}"', line]


# --- TOML ---------------------------------------------------------------------------


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: str | bool | Sequence[str]) -> str:
    # TOML's values are JSON's, but with this character escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
