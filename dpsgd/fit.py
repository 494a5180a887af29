"""``dpsgd fit``: from a table to a private model and a page, by the ordinary commands.

    OUT/fit.toml      the choices, for dpsgd fit --config
    OUT/schema.toml   data/   batches/   run/   report.html

What a person alone can know is asked for before any work, all of it at once.  Sizes
follow from the number of rows, which is public.  A stage is done when its last file is
there; given again, the command goes on behind the stages that are done.

Held-out rows are evaluated by `dpsgd evaluate` with the same epsilon, which costs
training rows nothing.  Rows of users, and losses without a public bound, are evaluated
by `dpsgd train --eval`, which no epsilon covers, as its statement says.

Formal guarantees:
  - No value of the table is looked at to choose a kind, a size or a setting, unless
    --look-at-rows is given, which the statement then says.
  - The choices of a folder are those it began with, or it is refused.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import click

from accounting.cli import shared_options
from accounting.cli.grouped import REQUIRED, Grouped, Option
from accounting.core.neighboring_relation import ADD_OR_REMOVE_ONE
from accounting.core.validation import InputError, check_float
from pipelines.cli.data_commands import kind_options
from pipelines.files.storage import write_atomically
from trainer.cli import setting_flags
from trainer.cli.stages import run as run_stage

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The record of a run, as ``trainer.core.run.run_record`` names it.
_RECORD = "run_record.json"

#: Steps that a run should have at least, in at most this many epochs.
_STEPS, _MOST_EPOCHS = 500, 8
#: Names of columns of which each value may be one person's.
_PERSON = re.compile(
    r"(?:^|_)(?:account|client|customer|device|email|household|member|patient|person|"
    r"player|student|subject|user|visitor)(?:_?id)?$",
    re.IGNORECASE,
)
#: How held-out rows are evaluated.
_PRIVATE, _OPEN, _NONE = "privately", "without protection", "not"
_KINDS = ("numeric", "category", "text", "date", "boolean", "user", "drop")
#: Flags of `dpsgd schema`, and those of users of `dpsgd prepare`.
_OF_SCHEMA = ("label", "classes", *_KINDS, "header", "delimiter", "look_at_rows")
_OF_USERS = ("max_examples_per_user", "num_examples")
#: Group of the options that describe the table.
_TABLE = "The table"
_of_table = functools.partial(click.option, cls=Option, group=_TABLE)


def sizes(num_rows: int) -> tuple[int, int]:
    """Returns batch size and epochs for a number of training rows.

    The batch is the power of two nearest to twice the root of the rows, the epochs make
    500 steps of it, at most 8 epochs.

    Args:
      num_rows: Number of training rows, at least 1.

    Example:
      >>> sizes(16_000), sizes(200_000), sizes(46_000_000)
      ((256, 8), (1024, 3), (16384, 1))
    """
    batch = 2 ** max(0, round(math.log2(2 * math.sqrt(num_rows))))
    epochs = round(_STEPS * batch / num_rows)
    return min(batch, num_rows), min(_MOST_EPOCHS, max(1, epochs))


def default_delta(num_rows: int) -> float:
    """Returns the largest power of ten that is at most a tenth of ``1 / num_rows``.

    Args:
      num_rows: Number of training rows, at least 1.

    Example:
      >>> default_delta(16_000), default_delta(200_000)
      (1e-06, 1e-07)
    """
    return float(f"1e-{math.ceil(math.log10(10 * num_rows) - 1e-9)}")


def _delta(flags: Mapping[str, Any], num_rows: int) -> float:
    return flags["delta"] or default_delta(num_rows)


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


def _check_choices(text: str, flags: Mapping[str, Any]) -> None:
    """Refuses a schema with open choices, naming all of them at once.

    Raises:
      InputError: there are such choices.
    """
    columns = tomllib.loads(text).get("columns", {})
    kinds = {name: column.get("kind") for name, column in columns.items()}
    asked = []
    if "label" not in kinds.values():
        asked.append("which column to predict (--label NAME)")
    if unknown := [name for name, kind in kinds.items() if kind == "choose"]:
        flags_of_kinds = ", ".join(map(_flag, _KINDS))
        asked.append(f"the kind of {', '.join(unknown)} (one of {flags_of_kinds})")
    persons = [name for name in kinds if _PERSON.search(name)]
    if persons and "user" not in kinds.values() and not flags["rows_are_independent"]:
        asked.append(
            f"whether rows with the same {persons[0]} are one person's "
            f"(--user {persons[0]}, or --rows-are-independent)"
        )
    if "user" in kinds.values() and None in (flags[name] for name in _OF_USERS):
        asked.append(
            "how many rows of a person to keep, and a public bound on their number "
            "(--max-examples-per-user K --num-examples N)"
        )
    if asked:
        raise InputError(
            f"Expected what only a person can know of {flags['table']}: "
            f"{'; '.join(asked)}. Add these flags."
        )


# -- choices and stages ----------------------------------------------------------------


def _keep_choices(out: pathlib.Path, flags: Mapping[str, Any], text: str) -> None:
    """Writes choices and schema into the folder, or compares them with what made it.

    Raises:
      InputError: the folder began with other choices, or holds something else.
    """
    of_fit = {
        name: value
        for name, value in sorted(flags.items())
        if value not in (None, "", 0, False) and name not in ("out", "dry_run")
    }
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in of_fit.items()]
    files = {"fit.toml": "".join(lines), "schema.toml": text}
    others = {one.name for one in out.iterdir()} - {*files} if out.exists() else set()
    if not others:  # nothing was made by other choices
        out.mkdir(parents=True, exist_ok=True)
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


def _prepare(out: pathlib.Path, flags: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that turn the table into numbers."""
    return [
        "prepare",
        f"--input={flags['table']}",
        f"--schema={out}/schema.toml",
        f"--out={out}/data",
        *(f"{_flag(name)}={flags[name]}" for name in _OF_USERS if flags[name]),
    ]


def _stages(
    out: pathlib.Path, flags: Mapping[str, Any], num_rows: int, evaluation: str
) -> list[tuple[str, str | None, list[str]]]:
    """Returns title, last file and arguments of each stage behind the preparation.

    Args:
      out: The folder.
      flags: The flags of the command.
      num_rows: Number of training rows.
      evaluation: One of ``_PRIVATE``, ``_OPEN`` and ``_NONE``.
    """
    batch, epochs = sizes(num_rows)
    sampling = [
        f"--batch-size={flags['batch_size'] or batch}",
        f"--epochs={flags['epochs'] or epochs}",
    ]
    delta = _delta(flags, num_rows)
    budget = [
        f"--epsilon={flags['epsilon']!r}",
        f"--delta={delta!r}",
        *shared_options.allowance(flags),
    ]
    plan = ["plan", f"--num-examples={num_rows}", *sampling, *budget, *_unit(flags)]
    batches = [
        "batches", f"--input={out}/data/train", f"--out={out}/batches", *sampling
    ]  # fmt: skip
    train = [
        "train", f"--batches={out}/batches",
        *([f"--eval={out}/data/test"] if evaluation == _OPEN else []),
        f"--out={out}/run", *budget, *shlex.split(flags["train"]),
    ]  # fmt: skip
    evaluate = [
        "evaluate", f"{out}/run", f"--batches={out}/batches",
        f"--input={out}/data/test", *shared_options.allowance(flags),
    ]  # fmt: skip
    privately = ("evaluate with differential privacy", "run/metrics.json")
    report = ["report", f"{out}/run", f"--out={out}/report.html"]
    return [
        ("compute the noise", None, [*plan, "--sampler=truncated-poisson"]),
        ("sample the batches", "batches/manifest.json", batches),
        ("train with differential privacy", "run/run_record.json", train),
        (*privately, evaluate if evaluation == _PRIVATE else []),
        ("write the page", "report.html", report),
    ]


def _unit(flags: Mapping[str, Any]) -> list[str]:
    """Returns what `dpsgd plan` is told of users: how `train` accounts for them."""
    count = flags["max_examples_per_user"]
    if count is None:
        return []
    return [f"--max-examples-per-user={count}", f"--relation={ADD_OR_REMOVE_ONE}"]


def _is_done(path: pathlib.Path) -> bool:
    """Whether a stage is done; a run is if its record says so."""
    if not path.exists() or path.name != _RECORD:
        return path.exists()
    return bool(json.loads(path.read_bytes())["complete"])


def _num_rows(out: pathlib.Path, part: str) -> int:
    """Returns the number of rows of a part of the prepared table, which is public."""
    from pipelines.inputs.parquet_blocks import list_blocks  # after --help

    return list_blocks(f"{out}/data/{part}").num_examples


def _evaluation(out: pathlib.Path, flags: Mapping[str, Any], delta: float) -> str:
    """Returns how held-out rows are evaluated."""
    from pipelines.core.users.bounded import Bounded  # after --help
    from trainer.private_metrics.price import least_rows

    dataset = json.loads((out / "data" / "_prepared.json").read_bytes())["dataset"]
    words = shlex.split(flags["train"])
    if any(word.partition("=")[0] == "--eval" for word in words):
        return _NONE
    label = dataset["label"]
    if Bounded.of(dataset) is not None or "num_classes" not in label:
        return _OPEN
    least = least_rows(label["num_classes"], flags["epsilon"], delta)
    found = _num_rows(out, "test")
    if found >= least:
        return _PRIVATE
    click.echo(
        f"\nno evaluation: {found} held-out rows are fewer than the {least} of which "
        "noise leaves something. For unprotected metrics of them add "
        f"--train '--eval {out}/data/test'.",
        err=True,
    )
    return _NONE


def _say_result(out: pathlib.Path, *, as_json: bool) -> None:
    paths = {name: out / "run" / f"{name}.json" for name in ("metrics", "privacy")}
    read = {
        name: json.loads(path.read_bytes()) if path.exists() else {}
        for name, path in paths.items()
    }
    if as_json:
        found = {"out": str(out), **read}
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(
        f"\nmodel in {out}/run, page in {out}/report.html. For new rows:\n"
        f"$ dpsgd predict {out}/run --input NEW.csv --out scores.csv"
    )


@click.command(name="fit", cls=Grouped)
@click.argument("table", required=False)
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
    "--schema", cls=Option, group=_TABLE, help="Instead of these: see dpsgd schema."
)
@click.option(
    "--header", default="", cls=Option, group=_TABLE, help="See dpsgd schema."
)
@click.option(
    "--delimiter", default="", cls=Option, group=_TABLE, help="See dpsgd schema."
)
@_of_table(
    "--look-at-rows", type=int, default=0, metavar="N",
    help="Guess kinds from N rows, which no epsilon covers: see dpsgd schema.",
)  # fmt: skip
@_of_table(
    "--rows-are-independent", is_flag=True,
    help="Declare that no person has several rows.",
)  # fmt: skip
@shared_options.max_examples_per_user("With --user: rows kept per person.")
@_of_table(
    "--num-examples", type=int,
    help="With --user: public bound on the rows kept: see dpsgd bound.",
)  # fmt: skip
@click.option(
    "--batch-size", type=int,
    help="[default: the power of two nearest to twice the root of the training rows]",
)  # fmt: skip
@click.option("--epochs", type=int, help="[default: for 500 steps, but at most 8]")
@click.option(
    "--train", default="", metavar="FLAGS",
    help='Flags for dpsgd train, such as "--hidden 32 --ema-decay 0.99".',
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, help="End after the noise, before any sampling."
)
@click.option(
    "--out", help="New folder, or that of the same choices.  [default: TABLE-fit]"
)
@shared_options.as_json
def fit(**flags: Any) -> None:
    """Make a private model of a table, and a page about it, in one command.

    What only a person can know is asked for at once: kinds of columns, the label, and
    whether several rows are one person's.  Names and types of columns are read for it,
    and no value.  Then come the ordinary commands, each as it would be typed: prepare,
    plan, batches, train, evaluate, report.  Stopped, it goes on with the same command.

    \b
    Examples:
      dpsgd fit census.csv --label income --classes '<=50K,>50K' \\
          --numeric age --category workclass --epsilon 3
      dpsgd fit --config census-fit/fit.toml --out again
    """
    as_json = flags.pop("as_json")
    if not flags["table"] or flags["epsilon"] is None:
        missing = "--epsilon" if flags["table"] else "TABLE"
        raise InputError(f"Expected {missing}, here or in --config. Add it.")
    check_float("epsilon", flags["epsilon"], above=0)
    text = _schema_text(flags)
    _check_choices(text, flags)
    stem = pathlib.Path(flags["table"].rstrip("/*")).name.partition(".")[0]
    out = pathlib.Path(flags["out"] or f"{stem}-fit")
    _keep_choices(out, flags, text)
    if not (out / "data" / "_prepared.json").exists():
        arguments = _prepare(out, flags)
        run_stage(1, 6, "turn the table into numbers", arguments, aside=as_json)
    num_rows = _num_rows(out, "train")
    evaluation = _evaluation(out, flags, _delta(flags, num_rows))
    todo = _stages(out, flags, num_rows, evaluation)
    for number, (title, last, arguments) in enumerate(todo, start=2):
        if arguments and (last is None or not _is_done(out / last)):
            run_stage(number, 1 + len(todo), title, arguments, aside=as_json)
        if flags["dry_run"]:
            return
    _say_result(out, as_json=as_json)
