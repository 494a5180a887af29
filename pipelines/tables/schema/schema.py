"""The schema of a table: a public file that says how its columns become numbers.

    version = 1

    [columns.income]
    kind = "label"
    task = "binary"
    classes = ["<=50K", ">50K"]

    [columns.age]
    kind = "numeric"
    range = [0, 100]

    [columns.occupation]
    kind = "category"
    buckets = 256

docs/your_table.md describes every field.  The metadata of the prepared data and the
manifest of its batches hold the schema, where models read it.

Formal guarantees:
  - An unknown field, kind or version is refused, as is every wrong value, with file,
    column and remedy.
  - ``Schema.from_json`` returns the schema that ``to_json`` wrote.
  - No two columns of the prepared data have one name, and one of them is ``label``.
  - Rows of one user are in one split, unless the schema says ``cut_users``; with users
    the split of a row depends on this row alone.

Everything here is public.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from accounting.core.validation import InputError, did_you_mean
from pipelines.core.batches.columns import RESERVED_NAMES
from pipelines.core.users.hashing import HASH_NAME
from pipelines.tables.convert import check_shares
from pipelines.tables.schema.column_kinds import (
    KINDS,
    LABEL,
    USER,
    Category,
    Date,
    Drop,
    Kind,
    Label,
    Output,
    is_usable,
    usable_name,
)
from pipelines.tables.schema.fields import CELLS_NAME, Fields

VERSION = 1
#: ``dataset["name"]`` of a manifest whose data has a schema.
DATASET_NAME = "table"

FRACTION, TIME, HASH = "fraction", "time", "hash"

#: Placeholder of a first schema for an unknown kind.
UNCHOSEN = "choose"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Which rows are for training, validation and test.

    Attributes:
      by: "fraction", first to last; "time"; or "hash", with all rows of one value, such
        as a person's, in one split.
      shares: Shares of train, val and test, in any unit; not used by "time".
      column: Column of the time or of the hashed value.
      val_from: Time at which val begins.
      test_from: Time at which test begins.
      salt: Public salt of the hash, which selects another split.
      cut_users: Whether rows of one user may be in several splits.
    """

    by: str = FRACTION
    shares: tuple[int, ...] = (80, 10, 10)
    column: str = ""
    val_from: datetime.datetime | None = None
    test_from: datetime.datetime | None = None
    salt: str = ""
    cut_users: bool = False

    @classmethod
    def read(cls, fields: Fields, user: str = "") -> Split:
        """Returns the split that fields describe.

        Args:
          fields: Fields of [split].
          user: Column of users, by which rows are split by default; empty if none.

        Raises:
          InputError: a wrong or unknown field.
        """
        by = fields.choice("by", (FRACTION, TIME, HASH), HASH if user else FRACTION)
        if by == TIME:
            fields.only("by", "column", "val_from", "test_from", "cut_users")
            return cls._by_time(fields)
        shares = fields.get("shares", list(cls.shares))
        example = "shares = [80, 10, 10]"
        if not isinstance(shares, list):
            raise fields.wrong("shares", "a list of three shares", example)
        check_shares(f"shares of {fields.place}", shares)
        if by == FRACTION:
            fields.only("by", "shares")
            return cls(shares=tuple(shares))
        fields.only("by", "shares", "column", "salt", "cut_users")
        return cls(
            by=HASH,
            shares=tuple(shares),
            column=fields.text("column", user or None, example='column = "user_id"'),
            salt=fields.text("salt", ""),
            cut_users=fields.flag("cut_users"),
        )

    @classmethod
    def _by_time(cls, fields: Fields) -> Split:
        column = fields.text("column", example='column = "date"')
        starts = [fields.moment(name) for name in ("val_from", "test_from")]
        for name, start in zip(("val_from", "test_from"), starts, strict=True):
            if start is None:
                raise fields.wrong(name, "a date", f"{name} = 2024-01-31")
        if starts[0] > starts[1]:  # type: ignore[operator]
            wanted = "at or after val_from"
            raise fields.wrong("test_from", wanted, f"test_from = {starts[0]}")
        return cls(
            by=TIME,
            column=column,
            val_from=starts[0],
            test_from=starts[1],
            cut_users=fields.flag("cut_users"),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that ``by`` uses."""
        if self.by == FRACTION:
            return {"by": self.by, "shares": list(self.shares)}
        more = {"cut_users": True} if self.cut_users else {}
        if self.by == HASH:
            fields = {"by": self.by, "shares": list(self.shares), "column": self.column}
            return {**fields, "salt": self.salt, **more}
        assert self.val_from is not None
        assert self.test_from is not None
        return {
            "by": self.by,
            "column": self.column,
            "val_from": self.val_from.isoformat(),
            "test_from": self.test_from.isoformat(),
            **more,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How cells of text are read.

    Attributes:
      missing_values: Texts that stand for a missing value, besides null; the empty one
        always does.
      delimiter: Delimiter of cells; empty for a comma, or a tab in TSV.
      header: Names of the columns of CSV or TSV without a header; empty if it has one.
    """

    missing_values: tuple[str, ...] = ("",)
    delimiter: str = ""
    header: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Fields) -> InputOptions:
        """Returns the options that fields describe.

        Raises:
          InputError: a wrong or unknown field.
        """
        fields.only(*(field.name for field in dataclasses.fields(cls)))
        delimiter = fields.text("delimiter", "")
        if len(delimiter.encode()) > 1:
            raise fields.wrong("delimiter", "one ASCII character", "delimiter = ';'")
        missing = fields.texts("missing_values", 'missing_values = ["", "?"]')
        header = fields.texts("header", 'header = ["age", "income"]')
        return cls(
            missing_values=tuple(dict.fromkeys(("", *(missing or ())))),
            delimiter=delimiter,
            header=header or (),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that are not at their defaults."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
    """How the columns of a table become numbers.  All fields are public.

    Attributes:
      columns: Name in the table -> kind, in the order of the prepared data.
      split: Which rows are for training, validation and test.
      input: How cells of text are read.

    Raises:
      InputError: no label or several, or two outputs with one name.
    """

    columns: Mapping[str, Kind]
    split: Split = Split()
    input: InputOptions = InputOptions()

    def __post_init__(self) -> None:
        labels = [name for name, kind in self.columns.items() if kind.kind == LABEL]
        if len(labels) != 1:
            found = ", ".join(labels) if labels else "there is none"
            raise InputError(
                f"Expected one column of kind label in the schema; {found}. Write "
                'kind = "label" and task = "binary" for the one that is predicted.'
            )
        self._check_users()
        seen = {self.user: self.user} if self.user else {}
        for column, kind in self.columns.items():
            for output in kind.outputs(usable_name(column)):
                _check_name(column, output, seen)
        if self.split.by == TIME and self.split.column in self.columns:
            kind = self.columns[self.split.column]
            if not isinstance(kind, Date | Drop):
                raise InputError(
                    f"Expected column {self.split.column} of [split] to be of kind "
                    f'date, not {kind.kind}. Write kind = "date".'
                )

    def _check_users(self) -> None:
        """Checks that there is at most one column of users, and no split cuts them."""
        users = [name for name, kind in self.columns.items() if kind.kind == USER]
        if len(users) > 1:
            raise InputError(
                f"Expected one column of kind user in the schema; {', '.join(users)}. "
                'Write kind = "drop" for the others.'
            )
        split, by_user = self.split, f'by = "hash" and column = "{self.user}"'
        if not users or (split.by, split.column) == (HASH, self.user):
            return
        if split.by == FRACTION:
            raise InputError(
                f"Expected [split] not to be by fraction beside column {self.user} of "
                "kind user: where a split ends would depend on how many rows each user "
                f"has. Write {by_user}."
            )
        if not split.cut_users:
            raise InputError(
                f"Expected [split] by {split.by} of {split.column} not to cut users of "
                f"column {self.user}: one in val or test whose rows are trained on is "
                f"no stranger to the model. Write {by_user}; or cut_users = true, if "
                "that is meant."
            )

    @property
    def user(self) -> str:
        """Name of the column of users; empty if there is none."""
        found = (name for name, kind in self.columns.items() if kind.kind == USER)
        return next(found, "")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Schema:
        """Returns the schema in a TOML file.

        Raises:
          InputError: no such file, not TOML, or not a schema.
        """
        try:
            with open(path, "rb") as file:
                values = tomllib.load(file)
        except OSError as error:
            raise InputError(
                f"Expected {path} to be a readable schema: "
                f"{error.strerror or type(error).__name__}. `dpsgd schema TABLE` "
                "writes a first one."
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"Expected {path} to be TOML: {error}.") from None
        return cls.from_json(values, str(path))

    @classmethod
    def from_json(cls, values: Any, place: str = "the schema") -> Schema:
        """Returns the schema that the values of a file describe.

        Args:
          values: Values from TOML or JSON.
          place: The file, for messages.

        Raises:
          InputError: a wrong or unknown field.
        """
        fields = Fields(values, place)
        if fields.get("version") != VERSION:
            raise fields.wrong("version", f"{VERSION}", f"version = {VERSION}")
        fields.only("version", "columns", "split", "input")
        columns = Fields(fields.get("columns", {}), f"[columns] of {place}")
        _refuse_unchosen(columns)
        read = {name: _column(columns, name, place) for name in columns.names()}
        user = next((name for name, kind in read.items() if kind.kind == USER), "")
        split = Fields(fields.get("split", {}), f"[split] of {place}")
        return cls(
            columns=read,
            split=Split.read(split, user),
            input=InputOptions.read(
                Fields(fields.get("input", {}), f"[input] of {place}")
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict for ``from_json``."""
        return {
            "version": VERSION,
            "input": self.input.to_json(),
            "split": self.split.to_json(),
            "columns": {name: kind.to_json() for name, kind in self.columns.items()},
        }

    @property
    def label(self) -> Label:
        """The column to predict."""
        return next(kind for kind in self.columns.values() if isinstance(kind, Label))

    @property
    def label_name(self) -> str:
        """Name of the column to predict."""
        return next(name for name, kind in self.columns.items() if kind == self.label)

    def outputs_of(self, column: str) -> tuple[Output, ...]:
        """Returns the outputs of a column of the table."""
        return _outputs(self.columns[column], column)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Columns of the prepared data, in order."""
        return tuple(out for name in self.columns for out in self.outputs_of(name))

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns of the table that are read, in order."""
        kept, column = self.kept, self.split.column
        return (*kept, column) if column and column not in kept else kept

    @property
    def kept(self) -> tuple[str, ...]:
        """Columns of the table that are not dropped, in order."""
        found = self.columns.items()
        return tuple(name for name, kind in found if kind.kind != Drop.kind)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns of the table that a model uses, in order."""
        left_out = (Drop.kind, LABEL, USER)
        return tuple(n for n, kind in self.columns.items() if kind.kind not in left_out)

    @property
    def unlisted(self) -> dict[str, str]:
        """Output -> column of the table, of categories whose values are not listed."""
        return {
            output.name: name
            for name, kind in self.columns.items()
            if isinstance(kind, Category)
            and kind.vocabulary is None
            and kind.length is None
            for output in self.outputs_of(name)
        }

    @property
    def description(self) -> dict[str, Any]:
        """Description of the prepared data, for the manifest and for models."""
        inputs = [
            {**dataclasses.asdict(output), "shape": list(output.shape)}
            for output in self.outputs
            if output.role != LABEL
        ]
        label = {"task": self.label.task, "num_classes": self.label.num_classes}
        return {
            "name": DATASET_NAME,
            "cells": CELLS_NAME,
            "hash": HASH_NAME,
            "label": label,
            "inputs": inputs,
            "schema": self.to_json(),
        }


@functools.lru_cache(maxsize=1 << 14)  # called for every block
def _outputs(kind: Kind, column: str) -> tuple[Output, ...]:
    return kind.outputs(usable_name(column))


def _refuse_unchosen(columns: Fields) -> None:
    unchosen = [
        name
        for name in columns.names()
        if isinstance(columns.get(name), Mapping)
        and columns.get(name).get("kind") == UNCHOSEN
    ]
    if unchosen:
        raise InputError(
            f"Expected a kind for each column in {columns.place}; to be chosen: "
            f"{', '.join(unchosen)}. Write one of {', '.join(KINDS)} for each."
        )


def _column(columns: Fields, name: str, place: str) -> Kind:
    fields = Fields(columns.get(name), f"column {name} in {place}")
    return KINDS[fields.choice("kind", tuple(KINDS))].read(fields)


def _check_name(column: str, output: Output, seen: dict[str, str]) -> None:
    name = output.name
    remedy = f'Write name = "{name}_2" in [columns.{column}] of the schema.'
    if name in RESERVED_NAMES or (name == LABEL and output.role != LABEL):
        raise InputError(
            f"Expected column {column} not to become {name}, which has a meaning of "
            f"its own. {remedy}"
        )
    if not is_usable(name):
        raise InputError(
            f"Expected name = {name!r} of column {column} in the schema to begin with "
            f'a letter and to hold letters, digits and _. Write name = "'
            f'{usable_name(name)}".'
        )
    first = seen.setdefault(name, column)
    if first != column:
        raise InputError(
            f"Expected columns {first} and {column} to become different columns, not "
            f"both {name}. {remedy}"
        )


def hint_of_delimiter(header: str) -> str:
    """Returns a hint if the name of the only column holds those of several."""
    found = next((each for each in ";\t|" if each in header), None)
    if found is None:
        return ""
    return (
        f" Give `dpsgd schema --delimiter {found!r}`, or write delimiter = "
        f"{json.dumps(found)} below [input] of the schema."
    )


def refuse_missing(
    needed: Sequence[str], names: Sequence[str], place: str, *, has_header: bool = True
) -> None:
    """Refuses a table that lacks columns of a schema, all in one line.

    Args:
      needed: Names of the needed columns.
      names: Names of the table's columns.
      place: The table, for messages.
      has_header: Whether these are names for certain; else they may be cells of a row.

    Raises:
      InputError: a column is missing.
    """
    missing = [name for name in needed if name not in names]
    if missing:
        hints = [did_you_mean(name, names) for name in missing]
        if len(names) == 1:
            hints.append(hint_of_delimiter(names[0]))
        has_header = has_header or len(missing) < len(needed)
        raise InputError(
            f"Expected columns {', '.join(missing)} of the schema in {place}; "
            f"{shown_names(names, has_header)}.{''.join(hints)}"
        )


def shown_names(names: Sequence[str], has_header: bool) -> str:
    """Returns the columns that a table has; arguments as for ``refuse_missing``."""
    if has_header:
        return f"it has {', '.join(names)}"
    return (
        "its first row has no such name. If that row is no header, write one, or "
        "header = [...] with all names below [input] of the schema (--header of "
        "`dpsgd schema`)"
    )
