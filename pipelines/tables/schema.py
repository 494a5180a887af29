"""Schemas of tables: how columns become numbers, and rows training data or not.

    version = 1

    [split]
    by = "random"
    shares = [80, 10, 10]

    [columns.age]
    kind = "numeric"
    range = [0, 100]

Everything that decides how a value is read and transformed is in the schema, which is
public; nothing is taken from rows.  Unknown tables, fields and values are refused, by
file, column and field.  ``from_json(to_json())`` is the same schema.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from accounting.core.validation import InputError, did_you_mean
from pipelines.core.batches.manifest import RESERVED_NAMES
from pipelines.core.hashing import HASH_NAME
from pipelines.tables import kinds
from pipelines.tables.cells import CELLS_NAME

VERSION = 1
#: ``dataset["name"]`` of a manifest whose data has a schema.
DATASET_NAME = "table"
#: Schemas that ship with the package, by name.
KNOWN = ("criteo",)

SPLITS = ("train", "val", "test")
RANDOM: Final = "random"
FRACTION: Final = "fraction"
TIME: Final = "time"
HASH: Final = "hash"

#: Placeholder of a first schema for an unknown kind.
UNCHOSEN = "choose"


def _shares(shares: tuple[int, ...]) -> tuple[int, ...]:
    if len(shares) != len(SPLITS) or min(shares) < 0 or not shares[0]:
        raise ValueError("three shares, of train, val and test; train has at least 1")
    return shares


class Split(kinds.Fields):
    """Which rows are for training, validation and test.

    Attributes:
      by: "random", by the place of a row in the table; "fraction", first to last;
        "time"; or "hash", with all rows of one value, such as a person's, in one split.
      shares: Shares of train, val and test, in any unit; not used by "time".
      column: Column of the time or of the hashed value.
      val_from: Time at which val begins.
      test_from: Time at which test begins.
      salt: Public salt of "random" and "hash", which selects another split.
      cut_users: Whether rows of one user may be in several splits.
    """

    by: Literal["random", "fraction", "time", "hash"] = RANDOM
    shares: Annotated[tuple[int, ...], AfterValidator(_shares)] = (80, 10, 10)
    column: str = ""
    val_from: kinds.Moment | None = None
    test_from: kinds.Moment | None = None
    salt: str = ""
    cut_users: bool = False

    @model_validator(mode="after")
    def _check(self) -> Split:
        used = {
            RANDOM: {"shares", "salt"},
            FRACTION: {"shares"},
            TIME: {"column", "val_from", "test_from", "cut_users"},
            HASH: {"shares", "column", "salt", "cut_users"},
        }[self.by]
        for name in self.model_fields_set - used - {"by"}:
            raise ValueError(f'to have no {name}, which by = "{self.by}" does not use')
        if "column" in used and not self.column:
            raise ValueError('to have a column, such as column = "date"')
        if self.by == TIME:
            if self.val_from is None or self.test_from is None:
                raise ValueError("to have val_from and test_from, two dates")
            if self.val_from > self.test_from:
                raise ValueError("to have test_from at or after val_from")
        return self


class InputOptions(kinds.Fields):
    """How cells of text are read.

    Attributes:
      missing_values: Texts that stand for a missing value, besides null; the empty one
        always does.
      delimiter: Delimiter of cells; empty for a comma, or a tab in TSV.
      header: Names of the columns of a text without a header; empty if it has one.
      quotes: Whether cells may be in quotation marks.
      decimal_comma: Whether numbers of text are written as 1.234,5.
      encoding: Encoding of text.
    """

    missing_values: tuple[str, ...] = ()
    delimiter: Annotated[str, Field(max_length=1, pattern="^[ -~\t]?$")] = ""
    header: tuple[str, ...] = ()
    quotes: bool = True
    decimal_comma: bool = False
    encoding: Literal["utf-8", "utf-16", "latin-1"] = "utf-8"


class Schema(kinds.Fields):
    """How the columns of a table become numbers.  All fields are public.

    Attributes:
      columns: Name in the table -> kind, in the order of the prepared data.
      split: Which rows are for training, validation and test.
      input: How cells of text are read.

    Raises:
      InputError: there is no label or several, or two outputs have one name.
    """

    columns: dict[str, kinds.AnyKind] = Field(default_factory=dict)
    split: Split = Split()
    input: InputOptions = InputOptions()

    @model_validator(mode="after")
    def _check(self) -> Schema:
        labels = self._named(kinds.LABEL)
        if len(labels) != 1:
            found = ", ".join(labels) if labels else "there is none"
            raise InputError(
                f"Expected one column of kind label in the schema; {found}. Write "
                'kind = "label" for the one that is predicted.'
            )
        self._check_users()
        seen = {self.user: self.user} if self.user else {}
        for column, kind in self.columns.items():
            for output in kind.outputs(kinds.usable_name(column)):
                _check_name(column, output, seen)
        for stack, members in self.stacks.items():
            if len({(each.role, each.dtype, each.nullable) for each in members}) > 1:
                raise InputError(
                    f"Expected columns of stack {stack} of the schema to be all "
                    "numbers or all ids, with one choice of missing."
                )
        if self.split.by == TIME and self.split.column in self.columns:
            kind = self.columns[self.split.column]
            if not isinstance(kind, kinds.Date | kinds.Drop):
                raise InputError(
                    f"Expected column {self.split.column} of [split] to be of kind "
                    f"date, not {kind.kind}."
                )
        return self

    def _check_users(self) -> None:
        """Checks that there is at most one column of users, and no split cuts them."""
        users = self._named(kinds.USER)
        if len(users) > 1:
            raise InputError(
                f"Expected one column of kind user in the schema; {', '.join(users)}. "
                'Write kind = "drop" for the others.'
            )
        split, by_user = self.split, f'by = "hash" and column = "{self.user}"'
        if not users or (split.by, split.column) == (HASH, self.user):
            return
        if split.by in (FRACTION, RANDOM):
            raise InputError(
                f"Expected [split] not to be by {split.by} beside a column of kind "
                f"user: it would depend on how many rows users have. Write {by_user}."
            )
        if not split.cut_users:
            raise InputError(
                f"Expected [split] by {split.by} of {split.column} not to cut users of "
                f"column {self.user}, whose rows may be in train and in test. Write "
                f"{by_user}; or cut_users = true, if that is meant."
            )

    @classmethod
    def of_user(cls, column: str) -> Schema:
        """Returns the schema of ids of users alone, whose rows are all for training."""
        split = Split(by=HASH, column=column, shares=(1, 0, 0))
        return cls.model_construct(columns={column: kinds.User()}, split=split)

    def with_user(self, column: str) -> Schema:
        """Returns the schema whose users are named by a column.

        Args:
          column: Name of the column of ids.

        Raises:
          InputError: another column holds the users, or the split cuts them.
        """
        fields = self.to_json()
        fields["columns"] = {**fields["columns"], column: {"kind": kinds.USER}}
        if self.split.by in (RANDOM, FRACTION):
            shares = list(self.split.shares)
            fields["split"] = {"by": HASH, "column": column, "shares": shares}
        return Schema.from_json(fields)

    # Reading and writing.

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Schema:
        """Returns the schema in a TOML file, or one that ships with the package.

        Args:
          path: Path of the file; or one of ``KNOWN``.

        Raises:
          InputError: there is no such file, or it is no TOML, or no schema.
        """
        try:
            if path in KNOWN:
                files = importlib.resources.files("pipelines.tables")
                values = tomllib.loads((files / f"{path}.toml").read_text())
            else:
                with open(path, "rb") as file:
                    values = tomllib.load(file)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise InputError(
                f"Expected {path} to be a readable schema: {reason}. `dpsgd schema "
                "TABLE` writes a first one."
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
          InputError: a field is wrong or unknown.
        """
        if not isinstance(values, Mapping) or values.get("version") != VERSION:
            raise InputError(f"Expected version = {VERSION} in {place}.")
        values = {name: value for name, value in values.items() if name != "version"}
        columns = values.get("columns")
        given = {
            name: fields.get("kind")
            for name, fields in (columns.items() if isinstance(columns, dict) else ())
            if isinstance(fields, dict)
        }
        if unchosen := [name for name, kind in given.items() if kind == UNCHOSEN]:
            raise InputError(
                f"Expected a kind for each column in {place}; to be chosen: "
                f"{', '.join(unchosen)}. Write one of {', '.join(kinds.KINDS)}."
            )
        users = [name for name, kind in given.items() if kind == kinds.USER]
        if users and "split" not in values:
            values["split"] = {"by": HASH, "column": users[0]}
        text = json.dumps(values, default=str)  # dates of TOML
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise _one_line(error, place) from None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict for ``from_json``."""
        found = self.model_dump(mode="json", exclude_defaults=True)
        columns = {}
        for name, kind in self.columns.items():
            fields = {"kind": kind.kind, **found["columns"][name]}
            if isinstance(kind, kinds.Label):
                fields["task"] = kind.task
            columns[name] = fields
        split = {"by": self.split.by, **found.get("split", {})}
        if self.split.by != TIME:
            split["shares"] = list(self.split.shares)
        return {
            "version": VERSION,
            "input": found.get("input", {}),
            "split": split,
            "columns": columns,
        }

    # What it says.

    @property
    def user(self) -> str:
        """Name of the column of users; empty if there is none."""
        return next(iter(self._named(kinds.USER)), "")

    @property
    def label(self) -> kinds.Label:
        """The column to predict."""
        found = self.columns[self.label_name]
        assert isinstance(found, kinds.Label)
        return found

    @property
    def label_name(self) -> str:
        """Name of the column to predict; empty for one of ``of_user``."""
        return next(iter(self._named(kinds.LABEL)), "")

    def _named(self, kind: str) -> list[str]:
        return [name for name, each in self.columns.items() if each.kind == kind]

    def outputs_of(self, column: str) -> tuple[kinds.Output, ...]:
        """Returns the outputs of a column of the table, before they are stacked."""
        return self.columns[column].outputs(kinds.usable_name(column))

    @functools.cached_property
    def stacks(self) -> dict[str, tuple[kinds.Output, ...]]:
        """Name of a stack -> the outputs that it holds, in order."""
        found: dict[str, tuple[kinds.Output, ...]] = {}
        for name, kind in self.columns.items():
            if kind.stack:
                found[kind.stack] = (*found.get(kind.stack, ()), *self.outputs_of(name))
        return found

    @functools.cached_property
    def outputs(self) -> tuple[kinds.Output, ...]:
        """Columns of the prepared data, in order."""
        found: dict[str, kinds.Output] = {}
        for name, kind in self.columns.items():
            for output in self.outputs_of(name):
                if kind.stack:
                    members = self.stacks[kind.stack]
                    output = dataclasses.replace(
                        output, name=kind.stack, shape=(len(members),)
                    )
                found[output.name] = output
        return tuple(found.values())

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns of the table that are read, in order."""
        kept, column = self.kept, self.split.column
        return (*kept, column) if column and column not in kept else kept

    @property
    def kept(self) -> tuple[str, ...]:
        """Columns of the table that are not dropped, in order."""
        found = self.columns.items()
        return tuple(name for name, kind in found if not isinstance(kind, kinds.Drop))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns of the table that a model uses, in order."""
        left_out = ("drop", kinds.LABEL, kinds.USER)
        return tuple(n for n, kind in self.columns.items() if kind.kind not in left_out)

    @property
    def description(self) -> dict[str, Any]:
        """Description of the prepared data, for the manifest and for models."""
        inputs = []
        for output in self.outputs:
            if output.role == kinds.LABEL:
                continue
            sizes = [each.size for each in self.stacks.get(output.name, (output,))]
            fields = {**dataclasses.asdict(output), "shape": list(output.shape)}
            del fields["size"]
            fields["sizes"] = sizes if output.role in (kinds.ID, kinds.IDS) else []
            inputs.append(fields)
        label = {"task": self.label.task, "num_classes": self.label.num_classes}
        return {
            "name": DATASET_NAME,
            "cells": CELLS_NAME,
            "hash": HASH_NAME,
            "label": label,
            "inputs": inputs,
            "schema": self.to_json(),
        }


def _one_line(error: ValidationError, place: str) -> InputError:
    """Returns the first error of a schema as one line with name, value and bound."""
    first = error.errors(include_url=False)[0]
    kind, value = first["type"], first["input"]
    top, *path = map(str, first["loc"] or ("",))
    where, known = place, list[type[kinds.Fields]]([Schema])
    if top == "columns" and path:
        where, known = f"column {path[0]} of {place}", [*kinds.Kind.__subclasses__()]
        path = [part for part in path[1:] if part not in kinds.KINDS]
    elif path:
        where, known = f"[{top}] of {place}", [Split, InputOptions]
    elif top:
        where = f"[{top}] of {place}" if kind != "extra_forbidden" else place
    # Beside the field a union names its alternatives, and a tuple its places.
    field = next((part for part in path if part.isidentifier()), "")
    wanted = first["msg"].removeprefix("Value error, ").rstrip(".")
    wanted = wanted[:1].lower() + wanted[1:]
    if kind == "extra_forbidden":
        name = field or top
        names = sorted({each for model in known for each in model.model_fields})
        hint = did_you_mean(name, names)
        return InputError(f"Expected no {name} in {where}: no field of it.{hint}")
    if kind.startswith("union_tag"):
        hint = did_you_mean(str(dict(value).get("kind", "")), kinds.KINDS)
        known_kinds = ", ".join(kinds.KINDS)
        return InputError(f"Expected kind of {where} to be one of {known_kinds}.{hint}")
    if not field or isinstance(value, dict):
        told = f"{field}: " if field else ""
        return InputError(f"Expected {where} {told}{wanted.removeprefix('expected ')}.")
    return InputError(
        f"Expected {field} = {value!r} of {where} to be another value: {wanted}."
    )


def _check_name(column: str, output: kinds.Output, seen: dict[str, str]) -> None:
    name = output.name
    remedy = f'Write name = "{name}_2" in [columns.{column}] of the schema.'
    if name in RESERVED_NAMES or (name == kinds.LABEL and output.role != kinds.LABEL):
        raise InputError(
            f"Expected column {column} not to be {name}, a reserved name. {remedy}"
        )
    first = seen.setdefault(name, column)
    if first != column:
        raise InputError(
            f"Expected columns {first} and {column} not to become one. {remedy}"
        )
