"""The work of ``dpsgd synth``, ``dpsgd schema`` and ``dpsgd prepare``."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import io
import math
import time
from collections.abc import Sequence
from typing import Any

from accounting.core.validation import InputError
from pipelines.cli import console
from pipelines.cli.column_options import KINDS_WITH_OPTION, ColumnOptions
from pipelines.cli.console import show
from pipelines.core.users import UserBound
from pipelines.files.outputs import check_new, output_file
from pipelines.files.processes import stoppable
from pipelines.files.progress_bars import Bars
from pipelines.tables import prepare as preparation
from pipelines.tables.first_schema import Range, first_schema
from pipelines.tables.kinds import to_moment
from pipelines.tables.prepare import PrepareSummary, TableOptions, UserOptions
from pipelines.tables.schema import UNCHOSEN, InputOptions, Schema
from pipelines.tables.synthetic import SynthOptions, write_synth

#: Options about users; the first ones are needed.
_NEEDED = ("max_examples_per_user", "num_examples")
_OF_USERS = (*_NEEDED, "bound_held_out", "key_file", "memory_limit")


def synth(
    out: str, rows: int, seed: int, rows_per_user: float | None, *, as_json: bool
) -> None:
    """Writes synthetic text in Criteo's format, or rows of users; prints a summary.

    Args:
      out: New or empty folder.
      rows: Number of rows.
      seed: Seed of the rows.
      rows_per_user: Mean number of rows of a user; None for no users.
      as_json: Whether the summary is JSON.

    Raises:
      InputError: a number is out of range, or the folder is not empty.
    """
    found = SynthOptions(num_rows=rows, seed=seed, rows_per_user=rows_per_user)
    began = time.perf_counter()
    with Bars({"write": rows}) as bars:
        update = functools.partial(bars.update, "write")
        path = write_synth(out, found, on_progress=update)
    summary = {
        "out": out,
        "rows": found.num_rows,
        "seed": found.seed,
        **({"users": found.num_users} if found.num_users else {}),
        "bytes_written": path.stat().st_size,
        "seconds": round(time.perf_counter() - began, 2),
    }
    title = "Synthetic rows of users" if found.num_users else "Synthetic Criteo text"
    show(title, summary, as_json)


def schema(table: str, out: str, columns: ColumnOptions, *, as_json: bool) -> None:
    """Writes a first schema and prints a summary.

    Args:
      table: File, folder or glob.
      out: New file.
      columns: What is known of the columns.
      as_json: Whether the summary is JSON.

    Raises:
      InputError: an option contradicts the table, or ``out`` exists.
    """
    check_new(out)
    text = schema_text(table, columns)
    with output_file(out) as write:
        write(text.encode())
    summary = {
        "out": out,
        "columns": text.count("\n[columns."),
        "to_be_chosen": text.count(f'kind = "{UNCHOSEN}"')
        + text.count(" = []  # to be"),
        "looked_at": "names and types, no value",
        "next": f"read and complete {out}; dpsgd prepare --input TABLE --schema {out} "
        "--out data",
    }
    show("First schema", summary, as_json)


def schema_text(table: Any, columns: ColumnOptions) -> str:
    """Returns the text of a first schema.

    Args:
      table: File, folder or glob.
      columns: What is known of the columns.

    Raises:
      InputError: an option contradicts the table.
    """
    options = InputOptions(
        delimiter=columns.delimiter.replace("\\t", "\t"),
        header=tuple(_words(columns.header)),
    )
    return first_schema(
        table,
        label=columns.label,
        classes=_words(columns.classes),
        kinds=_kinds_of_columns(columns),
        ranges=dict(map(_range, columns.ranges)),
        options=options,
    )


def _range(text: str) -> tuple[str, Range]:
    """Returns name and range of the text of a flag.

    Raises:
      InputError: it has no two numbers, or no two dates, the smaller first.
    """
    name, *ends = text.rsplit(":", 2)
    with contextlib.suppress(ValueError):
        low, high = map(float, ends)
        if math.isfinite(low) and low < high < math.inf:
            return name, (low, high)
    with contextlib.suppress(ValueError):
        since, until = map(to_moment, ends)
        if since < until:
            return name, (since, until)
    raise InputError(
        f"Expected --range {text} to be NAME:LOW:HIGH, two numbers or dates, the "
        "smaller first, such as age:0:120 or joined:2000-01-01:2030-01-01."
    )


def _kinds_of_columns(columns: ColumnOptions) -> dict[str, str]:
    """Returns the kind of each named column.

    Raises:
      InputError: a column has two kinds.
    """
    found: dict[str, str] = {}
    for kind in KINDS_WITH_OPTION:
        for name in _words(getattr(columns, kind)):
            if found.setdefault(name, kind) != kind:
                raise InputError(
                    f"Expected one kind of column {name}; it is in --{found[name]} and "
                    f"--{kind}."
                )
    return found


def prepare(
    source: Any,
    schema_file: str | None,
    out: str,
    runner: str | None,
    others: list[str],
    options: dict[str, Any],
    *,
    as_json: bool,
    names: Sequence[str] = (),
) -> None:
    """Prepares a raw table and prints a summary.

    Args:
      source: File, folder or glob; or a pyarrow Table.
      schema_file: Schema of the table; None for Parquet of numbers with users.
      out: New or empty folder.
      runner: Name of a Beam runner; None for this process.
      others: Options that the command does not know, for Beam.
      options: The other flags that were given, by name.
      as_json: Whether the summary is JSON.
      names: The options of the command.

    Raises:
      InputError: flags contradict each other, or the table cannot be prepared.
    """
    runtime = console.runtime(runner, others, options.pop("threads", None), names)
    user = options.pop("user", "")
    if schema_file is None and not user:
        raise InputError(
            "Expected --schema, which says how columns become numbers. `dpsgd schema "
            f"{source}` writes a first one."
        )
    flags = {name: options.pop(name) for name in _OF_USERS if name in options}
    if schema_file is None:
        prepared = preparation.of_numbers(source, user, **options)
    else:
        schema = Schema.read(schema_file)
        schema = schema.with_user(user) if user else schema
        prepared = preparation.TableOptions(schema=schema, **options)
    users = _users_of(prepared, flags)
    began = time.perf_counter()
    steps = preparation.STEPS if users else preparation.STEPS[:1]
    with stoppable(), Bars(dict.fromkeys(steps, 100)) as bars:
        runtime = dataclasses.replace(runtime, on_progress=bars.update)
        summary = preparation.prepare(
            source, out, prepared, users=users, runtime=runtime
        )
    shown = _prepared(out, users.settings if users else None, summary)
    shown["seconds"] = round(time.perf_counter() - began, 2)
    show("Prepared data", shown, as_json)


def _words(text: str) -> list[str]:
    """Returns the words of a line of CSV: one with a comma is between quotes."""
    lines = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    return [word.strip() for word in next(lines, []) if word.strip()]


def _prepared(
    out: str, bound: UserBound | None, summary: PrepareSummary
) -> dict[str, Any]:
    """Returns a summary; with users it has no counts of their rows."""
    if bound:
        return {
            "out": out,
            "unit_of_privacy": "user",
            "max_examples_per_user": bound.max_examples_per_user,
            "num_examples": bound.num_examples,
            "input_files": summary.num_files,
            "columns_left_out": [bound.user_column, *summary.left_out],
        }
    fields = {
        "out": out,
        "rows": summary.num_rows,
        "input_files": summary.num_files,
        "malformed_lines": summary.num_bad_lines,
    }
    if summary.left_out:
        fields["columns_left_out"] = list(summary.left_out)
    if summary.num_bad_lines:
        fields["first_malformed_lines"] = list(summary.bad_lines)
    return fields


def _users_of(prepared: TableOptions, flags: dict[str, Any]) -> UserOptions | None:
    """Returns how users are bounded; None if the table has none.

    Args:
      prepared: Options of the table.
      flags: Flags about users, by name.

    Raises:
      InputError: flags without a column of users, or missing flags.
    """
    user = prepared.schema.user
    if not user:
        if not flags:
            return None
        flag = next(iter(flags)).replace("_", "-")
        raise InputError(
            f"Expected no --{flag} without a column of users. Name it by --user."
        )
    missing = [name.replace("_", "-") for name in _NEEDED if name not in flags]
    if missing:
        raise InputError(
            f"Expected --{' and --'.join(missing)} beside column {user} of kind user, "
            "such as --max-examples-per-user 5 --num-examples NUMBER: they bound the "
            "rows kept of a user and of all, for training. NUMBER is public; if it is "
            "ten times the rows that are kept, batches are a tenth as large."
        )
    settings = UserBound(
        user_column=user, **{name: flags.pop(name) for name in _NEEDED}
    )
    return UserOptions(settings=settings, **flags)
