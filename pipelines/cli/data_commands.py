"""``dpsgd synth``, ``dpsgd schema`` and ``dpsgd prepare``."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import click

from accounting.cli import shared_options
from accounting.validation import InputError
from pipelines.cli.console import show
from pipelines.files.progress_bars import Bars
from pipelines.job.quiet_beam import quiet_beam


def _integers(name: str, text: str) -> tuple[int, ...]:
    """Returns the integers of a comma-separated list."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"Expected {name}={text!r} to be integers, separated by commas."
        ) from None


@click.command()
@click.option("--rows", type=int, required=True, help="Rows of all files together.")
@click.option("--out", required=True, help="New or empty folder.")
@click.option("--files", type=int, default=1, show_default=True, help="Files.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Which rows.  It may have a default, since there is nobody to protect.",
)
@shared_options.as_json
def synth(rows: int, out: str, files: int, seed: int, as_json: bool) -> None:
    """Writes text in the format of the Criteo data set, with something to learn in it.

    Every row is made up: a label, 13 integers and 26 strings of hexadecimal digits,
    with skewed frequencies and missing values.  All seeds follow one law, so that a
    model trained on one can be tested on another; a good one has an AUC near 0.82.

    \b
    Example:
      dpsgd synth --rows 100000 --out raw
      dpsgd prepare --input raw --format criteo-tsv --out data
    """
    from pipelines.tables.synthetic import SynthOptions, write_synth

    options = SynthOptions(num_rows=rows, num_files=files, seed=seed)
    began = time.perf_counter()
    with Bars(["write"]) as bars:
        paths = write_synth(
            out,
            options,
            on_progress=lambda done, total: bars.update("write", done, total),
        )
    summary = {
        "out": out,
        "rows": rows,
        "files": files,
        "seed": seed,
        "bytes_written": sum(path.stat().st_size for path in paths),
        "seconds": round(time.perf_counter() - began, 2),
    }
    show("Synthetic Criteo text", summary, as_json)


def _words(text: str) -> list[str]:
    """Returns the words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


_KINDS = {
    "numeric": "Columns of numbers, separated by commas.",
    "category": "Columns of categories, which are hashed.",
    "text": "Columns of words.",
    "date": "Columns of days or times.",
    "boolean": "Columns of true and false.",
    "drop": "Columns that are left out.",
}


def _kind_options(command: Any) -> Any:
    """Adds a flag for each kind of column."""
    for kind, text in reversed(_KINDS.items()):
        command = click.option(f"--{kind}", default="", help=text)(command)
    return command


@click.command()
@click.argument("table")
@click.option("--label", default="", help="Column that is predicted.")
@click.option(
    "--classes",
    default="",
    help="Values of the label, separated by commas, that of class 0 first; public.",
)
@_kind_options
@click.option(
    "--header",
    default="",
    help="Names of all columns, separated by commas, of text without a header: else "
    "its first row is taken for one, and stands in the schema, which is public.",
)
@click.option("--delimiter", default="", help="Of CSV.  [default: a comma]")
@click.option(
    "--look-at-rows",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Guess kinds and classes from the values of the first N rows.  No epsilon "
    "covers what the schema then tells of them: for rows that are nobody's, or for "
    "a guess that you would publish anyway.",
)
@click.option("--out", default="schema.toml", show_default=True, help="New file.")
@shared_options.as_json
def schema(table: str, out: str, as_json: bool, **options: Any) -> None:
    """Writes a first schema of a table, for `dpsgd prepare --schema`.

    TABLE is CSV, TSV or Parquet: a file, a folder or a quoted glob.  Of Parquet the
    names and types of columns are read, of text the names alone: no value.  What is
    left to be chosen is said in the file, which is for you to complete.

    \b
    Example:
      dpsgd schema adult.csv --label income --classes '<=50K,>50K' \\
          --numeric age,hours-per-week --category workclass,occupation
      dpsgd prepare --input adult.csv --schema schema.toml --out data
    """
    from pipelines.tables.first_schema import first_schema
    from pipelines.tables.schema import InputOptions
    from pipelines.tables.schema_fields import Fields

    told = {
        "delimiter": options["delimiter"].replace("\\t", "\t"),
        **({"header": _words(options["header"])} if options["header"] else {}),
    }
    kinds = {name: kind for kind in _KINDS for name in _words(options.pop(kind))}
    check_new(out)
    text = first_schema(
        table,
        label=options["label"],
        classes=_words(options["classes"]),
        kinds=kinds,
        look_at_rows=options["look_at_rows"],
        options=InputOptions.read(Fields(told, "the flags of dpsgd schema")),
    )
    pathlib.Path(out).write_text(text, encoding="utf-8")
    show("First schema", _first_schema(out, text, options["look_at_rows"]), as_json)


def check_new(out: str) -> None:
    """Refuses a file that is there, or whose folder is not.

    Raises:
      InputError: it cannot be written.
    """
    path = pathlib.Path(out)
    if path.exists() or not path.parent.is_dir():
        raise InputError(
            f"Expected --out {out} to be a new file in a folder that exists. Choose "
            "another, or remove it."
        )


def _first_schema(out: str, text: str, num_rows: int) -> dict[str, Any]:
    from pipelines.tables.schema import UNCHOSEN

    to_be_chosen = text.count(f'kind = "{UNCHOSEN}"') + text.count(" = []  # to be")
    looked = f"values of the first {num_rows} rows: no epsilon covers what it says"
    return {
        "out": out,
        "columns": text.count("\n[columns."),
        "to_be_chosen": to_be_chosen,
        "looked_at": looked if num_rows else "names and types, no value",
        "next": f"read and complete {out}; dpsgd prepare --input TABLE --schema {out} "
        "--out data",
    }


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
@click.option(
    "--input",
    "source",
    required=True,
    help="File, folder or quoted glob.  With --schema CSV, TSV or Parquet, also packed "
    "text (.gz, .zst, .bz2) and partition folders such as day=3; else Criteo's text.",
)
@click.option("--schema", "schema_file", help="What the columns are: see dpsgd schema.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["criteo-tsv"]),
    help="In place of --schema: label, 13 integers and 26 strings; tab-separated, "
    "without a header.  [default without --schema]",
)
@click.option("--out", required=True, help="New or empty folder.")
@click.option(
    "--buckets",
    help="Values of each category of Criteo after hashing, 0 for missing among them: "
    "one number, or 26 separated by commas.  [default: 1024]",
)
@click.option(
    "--vocabulary",
    help='JSON file such as {"C1": ["68fd1e64"], ...}: strings of Criteo that get a '
    "value of their own; other columns are hashed.  It must be public.",
)
@click.option(
    "--split",
    help="Shares of train, val and test, first to last.  [default: 80,10,10, or what "
    "the schema says]",
)
@click.option(
    "--on-bad-row",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What a malformed row does.",
)
@click.option(
    "--row-group-rows",
    type=int,
    help="Rows of a row group, the block that the batch job samples at once.  "
    "[default: 131072, fewer where rows are large]",
)
@click.option("--threads", type=int, help="Threads that parse.  [default: all cores]")
@click.option(
    "--runner",
    help="Engine of Apache Beam, which takes all other options; it writes the same "
    "bytes.  Its workers must see input and output under the same paths.  [default: "
    "this process]",
)
@shared_options.as_json
@click.pass_context
def prepare(
    ctx: click.Context,
    source: str,
    schema_file: str | None,
    out: str,
    runner: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Turns a raw table into numeric Parquet, split into train, val and test.

    With --schema it is any table: CSV, TSV or Parquet.  `dpsgd schema TABLE` writes a
    first schema.  Without, it is text in Criteo's format: label, 13 integers (NaN where
    missing) and 26 categories (0 where missing).  Rows keep their order; several files
    are read in the order of their names, with numbers by value.  Every row is checked
    before anything is written.

    Categories are hashed, each column in its own way, so that a value depends on no
    other row.  A vocabulary counted from the training data would itself tell about
    every row, and no epsilon of DP-SGD covers that: only public ones are taken.

    \b
    Examples:
      dpsgd prepare --input table.parquet --schema schema.toml --out data
      dpsgd prepare --input 'criteo/day_*.gz' --format criteo-tsv --out data
    """
    if ctx.args and runner is None:
        raise InputError(
            f"Expected no {ctx.args[0]!r}: it is no option of dpsgd prepare, and those "
            "of Beam go with --runner. See `dpsgd prepare --help`."
        )
    options = {name: value for name, value in options.items() if value is not None}
    num_threads = options.pop("threads", None)
    if schema_file is not None:
        prepared = _table_options(schema_file, options)
    else:
        if "kind" not in options:
            _refuse_tables(source)
        prepared = _criteo_options(options)
    began = time.perf_counter()
    if runner is not None:
        if num_threads is not None:
            raise InputError("Expected no --threads beside --runner. Leave it out.")
        summary = _prepare_on(runner, source, out, prepared, ctx.args)
    else:
        summary = _prepare_here(source, out, prepared, num_threads)
    seconds = time.perf_counter() - began
    show("Prepared data", _prepared(out, summary, seconds), as_json)


def _prepare_here(source: str, out: str, prepared: Any, num_threads: Any) -> Any:
    from pipelines.tables import convert

    with Bars(["check", "write"]) as bars:
        return convert.prepare(
            source, out, prepared, num_threads=num_threads, on_progress=bars.update
        )


def _prepare_on(
    runner: str, source: str, out: str, prepared: Any, others: list[str]
) -> Any:
    """Prepares on an engine of Beam, with what is left of the command line."""
    quiet_beam()
    from pipelines.cli.batch_job import beam_options
    from pipelines.job.poisson_batching import runner_of
    from pipelines.tables.prepare_job import prepare_on

    options = beam_options([f"--runner={runner}", *others])
    runner_of(options)  # refuses what loses elements
    return prepare_on(source, out, prepared, options)


def _refuse_tables(source: str) -> None:
    """Refuses files that are no text of Criteo's, by their names, before they are read.

    Raises:
      InputError: CSV or Parquet.
    """
    from pipelines.tables.raw_files import list_files
    from pipelines.tables.table_files import TSV, kind_of_file

    for file in list_files(source, partitions=True):
        if kind_of_file(file.path) not in (None, TSV):
            raise InputError(
                f"Expected --schema for {file.shown}, a table. `dpsgd schema {source}` "
                "writes a first one, schema.toml."
            )


def _criteo_options(options: dict[str, Any]) -> Any:
    from pipelines.tables import criteo

    options.pop("kind", None)  # there is one
    buckets = _integers("--buckets", options.pop("buckets", "1024"))
    if "vocabulary" in options:
        options["vocabulary"] = criteo.read_vocabulary(options["vocabulary"])
    return criteo.PrepareOptions(
        num_buckets=buckets * criteo.NUM_CATEGORIES if len(buckets) == 1 else buckets,
        split=_integers("--split", options.pop("split", "80,10,10")),
        **options,
    )


def _table_options(schema_file: str, options: dict[str, Any]) -> Any:
    from pipelines.tables.schema import Schema
    from pipelines.tables.table_format import TableOptions, row_group_rows

    for flag in ("kind", "buckets", "vocabulary", "split"):
        if flag in options:
            name = "format" if flag == "kind" else flag
            raise InputError(
                f"Expected no --{name} beside --schema, which says it. Leave it out, "
                f"and write it into {schema_file}."
            )
    schema = Schema.read(schema_file)
    options.setdefault("row_group_rows", row_group_rows(schema))
    return TableOptions(schema=schema, **options)


def _prepared(out: str, summary: Any, seconds: float) -> dict[str, Any]:
    fields = {
        "out": out,
        "rows": summary.num_rows,
        "input_files": summary.num_files,
        "malformed_lines": summary.num_bad_lines,
        "bytes_read": summary.bytes_read,
        "bytes_written": summary.bytes_written,
        "seconds": round(seconds, 2),
        "rows_per_second": round(sum(summary.num_rows.values()) / seconds),
    }
    if summary.left_out:
        fields["columns_left_out"] = list(summary.left_out)
    if summary.num_bad_lines:
        fields["first_malformed_lines"] = list(summary.bad_lines)
    return fields
