"""``dpsgd fit``: from a table to a private model and a page, by the ordinary commands.

    OUT/fit.toml      the choices, for dpsgd fit --config
    OUT/schema.toml   ranges.toml   data/   batches/   run/   report.html

What a person alone can know is asked for before any work, all of it at once.  Given
again, the command goes on behind the stages that are done: see `fit_stages`.

Formal guarantees:
  - No value of the table is looked at to choose a kind, a size or a setting.
  - Model, metrics and ranges together have the epsilon and delta of the run where the
    result says so: a row is in one part of the table, and each part gives one of them.
    They are computed from the record of the run; edited ones are refused.
  - The choices of a folder are those it began with, or it is refused.
  - One process at a time makes the stages of a folder.
  - *not* covered: other fits of the same table, whose epsilons add.
"""

from __future__ import annotations

import functools
import json
import pathlib
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any

import click

from accounting.cli import paths, shared_options
from accounting.cli.grouped import REQUIRED, Grouped, Option
from accounting.core.plan import MOST_RUNS
from accounting.core.validation import InputError, check_float, check_int
from dpsgd import fit_stages
from pipelines.batches.folder import PRIVATE_NAME
from pipelines.cli.data_commands import kind_options
from pipelines.core.files.locks import LOCK_NAME, locked
from pipelines.files.storage import write_atomically
from trainer.cli import setting_flags

_KINDS = ("numeric", "category", "text", "date", "boolean", "user", "drop")
#: Flags of `dpsgd schema`.
_OF_SCHEMA = ("label", "classes", *_KINDS, "ranges", "header", "delimiter")
#: Not a choice about the model: another value goes on in the same folder.
_NO_CHOICE = ("out", "dry_run")
#: Flags of `dpsgd train` that stages set; a second value would override.
_SET_BY_STAGES = (
    "--batches", "--out", "--epsilon", "--noise-multiplier", "--delta", "--of-runs",
    "--input", "--score", "--runs", "--epsilon-of-score", "--delta-of-score", "--by",
    "--json",
)  # fmt: skip
#: Group of the options that describe the table.
_TABLE = "The table"
_of_table = functools.partial(click.option, cls=Option, group=_TABLE)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# -- what a person alone can know ------------------------------------------------------


def _schema_text(flags: Mapping[str, Any]) -> str:
    """Returns the user's schema, or a first one made from names, types and flags.

    Raises:
      InputError: a flag contradicts the table, or the file is not readable.
    """
    if flags["schema"] is not None:
        try:
            return pathlib.Path(flags["schema"]).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"Expected --schema {flags['schema']} to be readable: "
                f"{error.strerror}. `dpsgd schema` writes one."
            ) from None
    from pipelines.cli import data_work  # after --help

    kinds = {kind: flags[kind] for kind in _KINDS}
    others = {name: flags[name] for name in _OF_SCHEMA if name not in kinds}
    return data_work.schema_text(flags["table"], kinds, **others)


def _columns_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(text).get("columns", {})
    return found


def _check_choices(text: str, flags: Mapping[str, Any]) -> None:
    """Refuses a schema with open choices, naming all of them at once.

    Raises:
      InputError: there are such choices.
    """
    columns = _columns_of(text)
    kinds = {name: column.get("kind") for name, column in columns.items()}
    asked = []
    if "label" not in kinds.values():
        asked.append("which column to predict (--label NAME)")
    if unknown := [name for name, kind in kinds.items() if kind == "choose"]:
        flags_of_kinds = ", ".join(map(_flag, _KINDS))
        asked.append(f"the kind of {', '.join(unknown)} (one of {flags_of_kinds})")
    ends = {name: column.get("range") for name, column in columns.items()}
    label = next((name for name, kind in kinds.items() if kind == "label"), "")
    if ends.get(label) == []:
        asked.append(f"the range of the label (--range {label}:LOW:HIGH)")
    if "user" not in kinds.values() and not flags["rows_are_independent"]:
        asked.append(
            "whether a person may have several rows (--user COLUMN of the person's id, "
            "or --rows-are-independent)"
        )
    if "user" in kinds.values() and None in (
        flags[name] for name in fit_stages.OF_USERS
    ):
        asked.append(
            "how many rows of a person to keep, and a public bound on their number "
            "(--max-examples-per-user K --num-examples N)"
        )
    if tomllib.loads(text).get("split", {}).get("cut_users"):
        raise InputError(
            "Expected a split that keeps users whole; cut_users of [split] is true, "
            "and a user with rows in several parts has the sum of their epsilons. "
            'Write by = "hash" and no cut_users, or give the commands one by one.'
        )
    if asked:
        raise InputError(
            f"Expected what only a person can know of {flags['table']}: "
            f"{'; '.join(asked)}. Add these flags."
        )


def _check_runs(text: str, flags: Mapping[str, Any]) -> None:
    """Refuses a run or a search that cannot be made, before any work.

    Raises:
      InputError: its flags are refused, or the number, unit or candidates of a search.
    """
    check_int("of_runs", flags["of_runs"], at_least=1, at_most=MOST_RUNS)
    if flags["runs"] is None:
        fit_stages.single_run(flags)
        return
    if flags["of_runs"] != 1:
        raise InputError(
            "Expected --runs or --of-runs, not both: the theorem of a search gives one "
            "epsilon, of which those of several searches add. Omit one."
        )
    from accounting.claims.selection.best_of import MOST_AS_GOOD  # after --help
    from trainer.run import privacy

    check_int("runs", flags["runs"], at_least=2, at_most=MOST_AS_GOOD)
    if fit_stages.has_users(text):
        raise privacy.no_search_of_users()
    fit_stages.of_candidates(flags)


# -- choices and stages ----------------------------------------------------------------


def _keep_choices(out: pathlib.Path, flags: Mapping[str, Any], text: str) -> None:
    """Writes choices and schema into the folder, or compares them with what made it.

    Raises:
      InputError: the folder began with other choices, or holds something else.
    """
    of_fit = {
        name: value
        for name, value in sorted(flags.items())
        if value not in (None, "", (), False)
        and (name, value) != ("of_runs", 1)  # the default
        and name not in _NO_CHOICE
    }
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in of_fit.items()]
    files = {"fit.toml": "".join(lines), "schema.toml": text}
    ours = {*files, LOCK_NAME, PRIVATE_NAME}
    others = {one.name for one in out.iterdir()} - ours
    if not others:  # nothing was made by other choices
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


def _result(out: pathlib.Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns where the results are, and what is released."""
    run = fit_stages.folder_of_run(out, flags) / "run"
    read = fit_stages.published(run, flags)
    return {
        "out": str(out),
        "run": str(run),
        "page": str(out / "report.html"),
        "together": fit_stages.together(out, read, flags),
        **read,
    }


def _say(found: Mapping[str, Any]) -> None:
    if found["together"]:
        click.echo(f"\n{found['together']}")
    click.echo(
        f"\nmodel in {found['run']}, page in {found['page']}. For new rows:\n"
        f"$ dpsgd predict {shlex.quote(found['run'])} --input NEW.csv --out scores.csv"
    )


@click.command(name="fit", cls=Grouped)
@click.argument("table", type=paths.TEXT, required=False)
@setting_flags.config()
@click.option(
    "--label", default="", cls=Option, group=REQUIRED, help="Column to predict."
)
@shared_options.epsilon("Target epsilon.")
@shared_options.delta("[default: a power of ten, at most 0.1 / training rows]")
@_of_table(
    "--classes", default="",
    help="Values of the label, separated by commas, class 0 first; public.",
)  # fmt: skip
@kind_options
@click.option(
    "--schema",
    cls=Option,
    group=_TABLE,
    type=paths.TEXT,
    help="Instead of these: see dpsgd schema.",
)
@click.option(
    "--header", default="", cls=Option, group=_TABLE, help="See dpsgd schema."
)
@click.option(
    "--delimiter", default="", cls=Option, group=_TABLE, help="See dpsgd schema."
)
@_of_table(
    "--rows-are-independent", is_flag=True,
    help="Declare that no person has several rows: needed without --user.",
)  # fmt: skip
@shared_options.max_examples_per_user("With --user: rows kept per person.")
@_of_table(
    "--num-examples", type=int,
    help="With --user: public bound on the rows kept for training.",
)  # fmt: skip
@click.option(
    "--batch-size", type=int,
    help="[default: the power of two nearest to twice the root of the training rows]",
)  # fmt: skip
@_of_table(
    "--on-bad-row", type=click.Choice(("fail", "skip")),
    help="Malformed rows: refuse the table, or omit them.  [default: fail]",
)  # fmt: skip
@click.option("--epochs", type=int, help="[default: for 500 steps, but at most 8]")
@click.option(
    "--train", default="", metavar="FLAGS",
    help='Flags for dpsgd train, such as "--hidden 32 --ema-decay 0.99".',
)  # fmt: skip
@click.option(
    "--runs", type=int, metavar="N",
    help="Search as well as N runs would, and keep the best alone: see dpsgd tune.  "
    "--train says by lists and --or what is tried; by default the defaults of dpsgd "
    "train, and three learning rates.",
)  # fmt: skip
@shared_options.of_runs(
    "Noise for so many such fits of this table together, declared before the first: "
    "each in a folder of its own, by the same plan and split."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="End after the noise and the time that steps would take, before any sampling.",
)
@click.option(
    "--out",
    type=paths.TEXT,
    help="New folder, or that of the same choices.  [default: TABLE-fit]",
)
@shared_options.as_json
def fit(**flags: Any) -> None:
    """Make a private model of a table, and a page about it, in one command.

    What only a person can know is asked for at once: kinds of columns, the label, and
    whether several rows are one person's.  Names and types of columns are read for it,
    and no value.  Then come the ordinary commands, each as it would be typed.  Rows of
    the part `val` give ranges of numbers, those of `test` metrics, both with noise, so
    that all of it has --epsilon.  Stopped, it goes on with the same command.

    With --runs it makes a search in place of one run, within the same --epsilon, by
    more noise in each run.  Rows of `val` then score the runs; where they give ranges,
    too, each of both has half of epsilon and delta.  It takes many times as long, and
    where the defaults are good it gains nothing.

    \b
    Examples:
      dpsgd fit census.csv --label income --classes '<=50K,>50K' \\
          --numeric age --category workclass --rows-are-independent --epsilon 3
      dpsgd fit --config census-fit/fit.toml --out again
    """
    as_json = flags.pop("as_json")
    found = made(flags, aside=as_json)
    if as_json and found:
        click.echo(json.dumps(found, indent=2))
    elif found:
        _say(found)


def made(flags: dict[str, Any], *, aside: bool = False) -> dict[str, Any]:
    """Makes a model and its page; returns where they are, and what is released.

    Args:
      flags: Values of the options of `dpsgd fit`, by name.
      aside: Whether standard output is left for JSON.

    Returns:
      See `dpsgd.frames.fit`; nothing for a dry run.

    Raises:
      InputError: what only a person can know is missing, or a stage is refused.
    """
    from trainer.cli.experiments import experiment_flags  # after --help

    if not flags["table"] or flags["epsilon"] is None:
        missing = "--epsilon" if flags["table"] else "TABLE"
        raise InputError(f"Expected {missing}, here or in --config. Add it.")
    check_float("epsilon", flags["epsilon"], above=0)
    for name in ("batch_size", "epochs", "max_examples_per_user", "num_examples"):
        if flags[name] is not None:
            check_int(name, flags[name], at_least=1)
    words = experiment_flags.split("--train", flags["train"])
    experiment_flags.refuse(words, _SET_BY_STAGES)
    if any(word.partition("=")[0] == "--config" for word in words):
        raise InputError(
            "Expected flags in --train, and no file of them (--config): what no "
            "epsilon covers, such as --eval, is looked for here. Write them out."
        )
    text = _schema_text(flags)
    _check_choices(text, flags)
    _check_runs(text, flags)
    stem = pathlib.Path(flags["table"].rstrip("/*")).name.partition(".")[0]
    out = pathlib.Path(flags["out"] or f"{stem}-fit")
    sources = fit_stages.sources_of(flags["table"])
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, out):  # two at once would find ranges twice, of other choices
        _keep_choices(out, flags, text)
        fit_stages.run(out, flags, sources, aside=aside)
    return {} if flags["dry_run"] else _result(out, flags)
