"""``dpsgd synth``, ``dpsgd schema`` and ``dpsgd prepare``."""

from __future__ import annotations

from typing import Any

import click

from accounting.cli import shared_options
from pipelines.cli.byte_size import ByteSize


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
@click.option(
    "--rows-per-user",
    type=float,
    metavar="MEAN",
    help="Rows of users, a few of whom have very many: Parquet, with a column user.",
)
@shared_options.as_json
def synth(out: str, as_json: bool, **options: Any) -> None:
    """Writes text in the format of the Criteo data set, with something to learn in it.

    Every row is made up: a label, 13 integers and 26 strings of hexadecimal digits,
    with skewed frequencies and missing values.  All seeds follow one law, so that a
    model trained on one can be tested on another; a good one has an AUC near 0.82.

    With --rows-per-user the rows are as `dpsgd prepare` makes them, with the number of
    their user, of whom there are rows / MEAN.  Rows of one user have some columns in
    common, and a taste that no column tells; another --seed has other users.

    \b
    Example:
      dpsgd synth --rows 100000 --out raw
      dpsgd prepare --input raw --format criteo-tsv --out data
      dpsgd synth --rows 100000 --rows-per-user 10 --out visits
      dpsgd bound --input visits --user-column user --max-examples-per-user 5 \\
          --num-examples 50000 --out bounded
    """
    from pipelines.cli import data_work

    data_work.synth(out, options, as_json=as_json)


_KINDS = {
    "numeric": "Columns of numbers, separated by commas.",
    "category": "Columns of categories, which are hashed.",
    "text": "Columns of words.",
    "date": "Columns of days or times.",
    "boolean": "Columns of true and false.",
    "user": "Column that says whose row it is.",
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
    from pipelines.cli import data_work

    kinds = {kind: options.pop(kind) for kind in _KINDS}
    data_work.schema(table, out, kinds, as_json=as_json, **options)


#: Of a schema with a column of kind user, as `dpsgd bound` takes them.
_USER_OPTIONS = (
    shared_options.max_examples_per_user(
        "With a column of kind user: rows of a user that are kept for training at "
        "most, chosen at random."
    ),
    shared_options.num_examples(
        "With it: a public number, at least the rows that are kept for training or, "
        "with --sample users, the users.  It enters the sampling rate in place of "
        "their number."
    ),
    click.option(
        "--sample",
        "sampled",
        type=click.Choice(["rows", "users"]),
        help="With it: what an example is, as of `dpsgd bound`.  [default: rows]",
    ),
    click.option(
        "--keep-users",
        is_flag=True,
        default=None,
        help="With it, in place of these: keeps all rows and the ids, for `dpsgd "
        "compare --user-column` and `dpsgd bound`.",
    ),
    click.option(
        "--key-file",
        help="With it: chooses rows, made if missing; not that of batches.  [default: "
        "a key of this job alone]",
    ),
    click.option(
        "--memory-limit",
        type=ByteSize(),
        help="With it: of this process, or of a worker.  [default: 2GiB]",
    ),
)


def _user_options(command: Any) -> Any:
    """Adds the flags of tables with users."""
    for option in reversed(_USER_OPTIONS):
        command = option(command)
    return command


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
@_user_options
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

    A column of kind user says whose row it is.  Then the rows of a user are in one
    split, at most k of them are kept for training, as `dpsgd bound` does, and the ids
    are gone: batches, runs and privacy statements are about users.  With --keep-users
    nobody is bounded yet, and `dpsgd batches` refuses the table.

    \b
    Examples:
      dpsgd prepare --input table.parquet --schema schema.toml --out data
      dpsgd prepare --input visits.csv --schema schema.toml --out data \\
          --max-examples-per-user 5 --num-examples 1000000
      dpsgd prepare --input 'criteo/day_*.gz' --format criteo-tsv --out data
    """
    from pipelines.cli import data_work

    options = {name: value for name, value in options.items() if value is not None}
    data_work.prepare(
        source, schema_file, out, runner, ctx.args, options, as_json=as_json
    )
