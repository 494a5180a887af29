"""``dpsgd fit``: from a table to a private model and a page, by the ordinary commands.

    OUT/fit.toml      the choices, for dpsgd fit --config
    OUT/schema.toml   ranges.toml   data/   batches/   run/   report.html

What a person alone can know is asked for before any work, all of it at once.  No value
of the table is looked at to choose a kind, a size or a setting.  Given again, the
command goes on after the stages that are done (see `fit_stages`); choices other than
those that the folder began with are refused.  One process at a time works in a folder.

Model, metrics and ranges together have the epsilon and delta of the run where the
result says so: a row is in one part of the table, and each part gives one of them.
Both are computed from the record of the run.  Other fits of the same table are not
covered: their epsilons add.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
import sys
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any

from accounting.cli.command import of_fields
from accounting.cli.options import (
    Config,
    Json,
    LocalText,
    check_delta,
)
from accounting.core.settings import check_fields
from accounting.core.validation import InputError, check_float
from dpsgd import fit_stages
from dpsgd.fit_stages import FitOptions
from pipelines.batches.folder import PRIVATE_NAME
from pipelines.cli.column_options import KINDS_WITH_OPTION
from pipelines.core.files.locks import LOCK_NAME, locked
from pipelines.files.storage import write_atomically

#: Not a choice about the model: another value goes on in the same folder.
_NO_CHOICE = ("out", "dry_run")
#: Columns of a kind that are named.
_SHOWN = 20
#: Files of the choices.
_CHOICES = ("fit.toml", "schema.toml")
#: Flags of `dpsgd train` that stages set; a second value would override.
_SET_BY_STAGES = (
    "--batches", "--out", "--epsilon", "--noise-multiplier", "--delta", "--of-runs",
    "--json",
)  # fmt: skip


# -- what a person alone can know ------------------------------------------------------


def _schema_text(asked: FitOptions) -> str:
    """Returns the user's schema, or a first one made from names, types and flags.

    Raises:
      InputError: a flag contradicts the table, or the file is not readable.
    """
    if asked.schema is not None:
        try:
            return pathlib.Path(asked.schema).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"Expected --schema {asked.schema} to be readable: "
                f"{error.strerror}. `dpsgd schema` writes one."
            ) from None
    from pipelines.cli import data_body  # after --help

    return data_body.schema_text(asked.table, asked)


def _columns_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(text).get("columns", {})
    return found


def _check_choices(text: str, asked: FitOptions) -> None:
    """Refuses a schema with open choices, naming all of them at once.

    Raises:
      InputError: there are such choices.
    """
    columns = _columns_of(text)
    kinds = {name: column.get("kind") for name, column in columns.items()}
    missing = []
    if "label" not in kinds.values():
        missing.append("which column to predict (--label NAME)")
    if unknown := [name for name, kind in kinds.items() if kind == "choose"]:
        flags_of_kinds = ", ".join(map(fit_stages.flag, KINDS_WITH_OPTION))
        missing.append(f"the kind of {', '.join(unknown)} (one of {flags_of_kinds})")
    ends = {name: column.get("range") for name, column in columns.items()}
    label = next((name for name, kind in kinds.items() if kind == "label"), "")
    if ends.get(label) == []:
        missing.append(
            f"the range of the label (--range {label}:LOW:HIGH), or its classes if it "
            "is no number (--classes 0,1)"
        )
    if columns.get(label, {}).get("classes") == []:
        missing.append(f"the classes of the label {label} (--classes no,yes)")
    if "user" not in kinds.values() and not asked.rows_are_independent:
        missing.append(
            "whether a person may have several rows (--user COLUMN of the person's id, "
            "or --rows-are-independent)"
        )
    if "user" in kinds.values() and None in (
        getattr(asked, name) for name in fit_stages.OF_USERS
    ):
        missing.append(
            "how many rows of a person to keep, and a public bound on their number "
            "(--max-examples-per-user K --num-examples N)"
        )
    if tomllib.loads(text).get("split", {}).get("cut_users"):
        raise InputError(
            "Expected a split that keeps users whole; cut_users of [split] is true, "
            "and a user with rows in several parts has the sum of their epsilons. "
            'Write by = "hash" and no cut_users, or give the commands one by one.'
        )
    if missing:
        raise InputError(
            f"Expected what only a person can know of {asked.table}: "
            f"{'; '.join(missing)}. Add these flags."
        )


def _kinds_in_words(columns: Mapping[str, Any]) -> str:
    """Returns the columns of each kind, of which some follow from types alone."""
    found: dict[str, list[str]] = {}
    for name, column in columns.items():
        length = column.get("length")
        told = f" (the first {length} of a list)" if length else ""
        found.setdefault(column["kind"], []).append(f"{name}{told}")
    kinds = (
        f"{kind} {', '.join(names[:_SHOWN])}"
        f"{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for kind, names in found.items()
    )
    return f"Columns by kind: {'; '.join(kinds)}."


# -- choices and stages ----------------------------------------------------------------


def holds_results(out: pathlib.Path) -> bool:
    """Whether a stage has made something in a folder of `fit`."""
    ours = {*_CHOICES, LOCK_NAME, PRIVATE_NAME}
    return out.exists() and bool({one.name for one in out.iterdir()} - ours)


def _keep_choices(out: pathlib.Path, asked: FitOptions, text: str) -> None:
    """Writes choices and schema into the folder, or compares them with what made it.

    Raises:
      InputError: the folder began with other choices, or holds something else.
    """
    of_fit = {
        {"ranges": "range"}.get(field.name, field.name): getattr(asked, field.name)
        for field in sorted(dataclasses.fields(asked), key=lambda field: field.name)
        if getattr(asked, field.name) != field.default and field.name not in _NO_CHOICE
    }
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in of_fit.items()]
    files = dict(zip(_CHOICES, ("".join(lines), text), strict=True))
    if not holds_results(out):
        for name, content in reversed(files.items()):
            write_atomically(out / name, content.encode())
        return
    for name, content in files.items():
        path = out / name
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            raise InputError(
                f"Expected --out {out} to be new, or to hold {name} of this command; "
                "its choices are others. Give its own ones, or choose another --out."
            )


def _result(out: pathlib.Path, asked: FitOptions) -> dict[str, Any]:
    """Returns where the results are, and what is released."""
    run = out / "run"
    read = fit_stages.published(run, asked)
    return {
        "out": str(out),
        "run": str(run),
        "page": str(out / "report.html"),
        "together": fit_stages.together(out, read, asked),
        **read,
    }


def _say(found: Mapping[str, Any]) -> None:
    if found["together"]:
        print(f"\n{found['together']}")
    print(
        f"\nmodel in {found['run']}, page in {found['page']}. For new rows:\n"
        f"$ dpsgd predict {shlex.quote(found['run'])} --input NEW.csv --out scores.csv"
    )


def fit(
    table: LocalText = "",
    *,
    asked: Annotated[FitOptions, of_fields] = FitOptions(),
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a private model of a table, and a page about it, in one command.

    What only a person can know is asked for at once: kinds of columns, the label, and
    whether several rows are one person's.  Names and types of columns are read for it,
    and no value.  Then come the ordinary commands, each as it would be typed.  Rows of
    the part `val` give ranges of numbers, those of `test` metrics, both with noise, so
    that all of it has --epsilon.  Stopped, it goes on with the same command.

    For example:
      dpsgd fit census.csv --label income --classes '<=50K,>50K' \\
          --numeric age --category workclass --rows-are-independent --epsilon 3
      dpsgd fit --config census-fit/fit.toml --out again

    Args:
      table: CSV, TSV, JSON lines or Parquet: a file, a folder or a quoted glob.
    """
    del config  # read before
    found = made(dataclasses.replace(asked, table=table), aside=as_json)
    if as_json and found:
        print(json.dumps(found, indent=2))
    elif found:
        _say(found)


def made(asked: FitOptions, *, aside: bool = False) -> dict[str, Any]:
    """Makes a model and its page; returns where they are, and what is released.

    Args:
      asked: Options of `dpsgd fit`.
      aside: Whether standard output is left for JSON.

    Returns:
      See `dpsgd.frames.fit`; nothing for a dry run.

    Raises:
      InputError: what only a person can know is missing, or a stage is refused.
    """
    from trainer.cli import several_runs  # after --help

    if not asked.table or asked.epsilon is None:
        missing = "--epsilon" if asked.table else "TABLE"
        raise InputError(f"Expected {missing}, here or in --config. Add it.")
    check_float("epsilon", asked.epsilon, above=0)
    check_fields(asked)
    check_delta(asked.delta, asked.allow_large_delta)
    words = several_runs.split("--train", asked.train)
    several_runs.refuse(words, _SET_BY_STAGES)
    if any(word.partition("=")[0] == "--config" for word in words):
        raise InputError(
            "Expected flags in --train, and no file of them (--config): what no "
            "epsilon covers, such as --eval, is looked for here. Write them out."
        )
    text = _schema_text(asked)
    _check_choices(text, asked)
    fit_stages.settings_of_run(asked)
    stem = pathlib.Path(asked.table.rstrip("/*")).name.partition(".")[0]
    out = pathlib.Path(asked.out or f"{stem}-fit")
    sources = fit_stages.sources_of(asked.table)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, out):  # two at once would find ranges twice, of other choices
        _keep_choices(out, asked, text)
        if asked.schema is None:
            print(_kinds_in_words(_columns_of(text)), file=sys.stderr)
        fit_stages.run(out, asked, sources, aside=aside)
    return {} if asked.dry_run else _result(out, asked)
