"""``dpsgd synth``, ``dpsgd schema`` and ``dpsgd prepare``."""

from __future__ import annotations

from typing import Any

import click

from accounting.cli import paths, shared_options
from accounting.cli.grouped import PASSES_ON, Grouped


@click.command(cls=Grouped)
@click.option("--rows", type=int, required=True, help="Number of rows.")
@click.option("--out", type=paths.TEXT, required=True, help="New or empty folder.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the rows.",
)
@click.option(
    "--rows-per-user",
    type=float,
    metavar="MEAN",
    help="Write rows of users instead, MEAN per user: Parquet with a column user.  A "
    "few users have very many rows.",
)
@shared_options.as_json
def synth(out: str, as_json: bool, **options: Any) -> None:
    """Writes synthetic click logs in the format of the Criteo data set.

    Every row is random: a label, 13 integers and 26 strings of hexadecimal digits, with
    skewed frequencies and missing values.  All seeds share one distribution, so a model
    trained on one seed can be tested on another; a good model has an AUC near 0.82.

    With --rows-per-user the rows have the format of `dpsgd prepare`, plus the number of
    their user, of rows / MEAN users.  Rows of one user share some columns and a latent
    preference; another --seed has other users.

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
    "numeric": "Columns of numbers, separated by commas; between double quotes if a "
    "name has one.",
    "category": "Columns of categories, which are hashed.",
    "text": "Columns of words.",
    "date": "Columns of days or times.",
    "boolean": "Columns of true and false.",
    "user": "Column of the user's id.",
    "drop": "Columns to omit.",
}


#: Adds one flag per kind of column, and one for ranges.
kind_options = shared_options.together(
    *(
        click.option(f"--{kind}", default="", help=text)
        for kind, text in _KINDS.items()
    ),
    click.option(
        "--range",
        "ranges",
        multiple=True,
        metavar="NAME:LOW:HIGH",
        help="Least and largest possible value of a number, or first and last date, "
        "known without the rows; may be repeated.  Of the label it says that a number "
        "is predicted.",
    ),
)


@click.command(cls=Grouped)
@click.argument("table", type=paths.TEXT)
@click.option("--label", default="", help="Column to predict.")
@click.option(
    "--classes",
    default="",
    help="Values of the label, separated by commas, class 0 first; public.",
)
@kind_options
@click.option(
    "--header",
    default="",
    help="Names of all columns, separated by commas, of text without a header.  "
    "Otherwise the first row is read as the header and published in the schema.",
)
@click.option("--delimiter", default="", help="Delimiter of CSV.  [default: a comma]")
@click.option(
    "--out",
    type=paths.TEXT,
    default="schema.toml",
    show_default=True,
    help="New file.",
)
@shared_options.as_json
def schema(table: str, out: str, as_json: bool, **options: Any) -> None:
    """Writes a first schema of a table, for `dpsgd prepare --schema`.

    TABLE is CSV, TSV or Parquet: a file, a folder or a quoted glob.  Only the names of
    the columns are read, and for Parquet their types, but no values.  Complete the file
    before you use it: it marks what is left to choose.

    \b
    Example:
      dpsgd schema adult.csv --label income --classes '<=50K,>50K' \\
          --numeric age,hours-per-week --category workclass,occupation
      dpsgd prepare --input adult.csv --schema schema.toml --out data
    """
    from pipelines.cli import data_work

    kinds = {kind: options.pop(kind) for kind in _KINDS}
    data_work.schema(table, out, kinds, as_json=as_json, **options)


#: Flags of `dpsgd bound`, for a schema with a column of kind user.
_user_options = shared_options.together(
    shared_options.max_examples_per_user(
        "With a column of kind user: maximum number of rows kept per user for "
        "training, chosen at random."
    ),
    shared_options.num_examples(
        "With a column of kind user: a public upper bound on the rows kept for "
        "training or, with --sample users, on the users.  It replaces their true "
        "number in the sampling rate: batches are smaller by as much as it is larger."
    ),
    shared_options.sampled(
        "With a column of kind user: what an example is; see `dpsgd bound`.  "
        "[default: rows]",
        "sampled",
    ),
    click.option(
        "--bound-held-out",
        is_flag=True,
        default=None,
        help="With a column of kind user: bounds held-out rows, too, for `dpsgd "
        "statistics` and `dpsgd evaluate`.  [default: all of them are kept]",
    ),
    click.option(
        "--keep-users",
        is_flag=True,
        default=None,
        help="With a column of kind user, in place of these: keeps all rows and the "
        "ids, for `dpsgd compare --user-column` and `dpsgd bound`.",
    ),
    shared_options.key_file(
        "With a column of kind user: secret key that chooses rows, made if missing; "
        "not the one of the batches.  [default: a temporary key]"
    ),
    shared_options.memory_limit(
        "With a column of kind user: memory for the threads that bound users, 256 MiB "
        "for each.  [default: 2GiB]"
    ),
)


@click.command(cls=Grouped, context_settings=PASSES_ON)
@click.option(
    "--input",
    "source",
    type=paths.TEXT,
    required=True,
    help="File, folder or quoted glob.  With --schema: CSV, TSV (also .gz, .zst, .bz2) "
    "or Parquet, also in partition folders such as day=3; else Criteo's text.",
)
@click.option(
    "--schema",
    "schema_file",
    type=paths.TEXT,
    help="Describes the columns: see dpsgd schema.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["criteo-tsv"]),
    help="Instead of --schema: label, 13 integers and 26 strings, tab-separated, "
    "without a header.  [default without --schema]",
)
@click.option("--out", type=paths.TEXT, required=True, help="New or empty folder.")
@click.option(
    "--buckets",
    help="Number of values of each Criteo category after hashing, including 0 for "
    "missing: one number, or 26 separated by commas.  [default: 1024]",
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
    help="What to do on a malformed row.",
)
@click.option(
    "--row-group-rows",
    type=int,
    help="Rows per row group, the block that the batch job samples at once.  "
    "[default: 131072, fewer if rows are large]",
)
@_user_options
@click.option(
    "--keep-values",
    is_flag=True,
    default=None,
    help="With --schema: keep the values of categories without a vocabulary, in place "
    "of hashing them, for `dpsgd statistics`.",
)
@shared_options.threads
@shared_options.runner
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

    With --schema the table is any CSV, TSV or Parquet; `dpsgd schema TABLE` writes a
    first schema.  Without --schema it is text in Criteo's format: label, 13 integers
    (NaN if missing) and 26 categories (0 if missing).  Rows keep their order; several
    files are read in the natural order of their names.  Every row is checked before
    anything is written.

    Each column of categories is hashed on its own, so that a value depends on no other
    row.  A vocabulary counted from the training data would reveal something about every
    row that no epsilon of DP-SGD covers: write a public one into the schema, or let
    `dpsgd statistics` find one, from rows that train nothing and with --keep-values.

    A column of kind user holds the user's id.  All rows of a user are then in one
    split, at most k of them are kept for training, as by `dpsgd bound`, and the ids are
    removed.  The privacy unit of batches, runs and statements is then a user.  With
    --keep-users nobody is bounded yet, and `dpsgd batches` refuses the table.

    \b
    Examples:
      dpsgd prepare --input table.parquet --schema schema.toml --out data
      dpsgd prepare --input visits.csv --schema schema.toml --out data \\
          --max-examples-per-user 5 --num-examples 40000
      dpsgd prepare --input 'criteo/day_*.gz' --format criteo-tsv --out data
    """
    from pipelines.cli import data_work

    options = {name: value for name, value in options.items() if value is not None}
    data_work.prepare(
        source, schema_file, out, runner, ctx.args, options, as_json=as_json
    )
