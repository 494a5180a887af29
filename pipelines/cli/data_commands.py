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
    help="Write rows of users, MEAN per user, with a header and a column user.  A few "
    "users have very many rows.",
)
@shared_options.as_json
def synth(out: str, as_json: bool, **options: Any) -> None:
    """Writes synthetic click logs in the format of the Criteo data set.

    Every row is random: a label, 13 integers and 26 strings of hexadecimal digits, with
    skewed frequencies and missing values.  All seeds share one distribution, so a model
    trained on one seed can be tested on another; a good model has an AUC near 0.82.

    With --rows-per-user each row also has the number of its user, of rows / MEAN users.
    Rows of one user share some columns and a latent preference; another --seed has
    other users.

    \b
    Example:
      dpsgd synth --rows 100000 --out raw
      dpsgd prepare --input raw --schema criteo --out data
      dpsgd synth --rows 100000 --rows-per-user 10 --out visits
      dpsgd prepare --input visits --schema criteo --user user \\
          --max-examples-per-user 5 --num-examples 50000 --out bounded
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
@click.argument("table", type=paths.TEXT_OR_URL)
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

    TABLE is CSV, TSV, JSON lines or Parquet: a file, a folder or a quoted glob.  Only
    the names of the columns are read, and for Parquet their types, but no values.
    Complete the file before you use it: it marks what is left to choose.

    \b
    Example:
      dpsgd schema adult.csv --label income --classes '<=50K,>50K' \\
          --numeric age,hours-per-week --category workclass,occupation
      dpsgd prepare --input adult.csv --schema schema.toml --out data
    """
    from pipelines.cli import data_work

    kinds = {kind: options.pop(kind) for kind in _KINDS}
    data_work.schema(table, out, kinds, as_json=as_json, **options)


#: Flags about users.
_user_options = shared_options.together(
    click.option(
        "--user",
        default="",
        help="Column of the users' ids, as of kind user in the schema.",
    ),
    shared_options.max_examples_per_user(
        "Of users: maximum number of rows kept per user for training, at random."
    ),
    shared_options.num_examples(
        "Of users: a public upper bound on the rows kept for training or, with "
        "--sample users, on the users.  It replaces their true number in the sampling "
        "rate: batches are smaller by as much as it is larger."
    ),
    shared_options.sampled(
        "Of users: what an example is, a row or a user.  A user is one record of all "
        "rows kept; its gradient is that of their mean loss.  [default: rows]",
        "sampled",
    ),
    click.option(
        "--bound-held-out",
        is_flag=True,
        default=None,
        help="Of users: bounds held-out rows, too, for `dpsgd statistics` and `dpsgd "
        "evaluate`.  [default: all of them are kept]",
    ),
    shared_options.key_file(
        "Of users: secret key that chooses rows, made if missing; not the one of the "
        "batches.  [default: a temporary key]"
    ),
    shared_options.memory_limit(
        "Of users: memory for the choice of rows.  [default: 2GiB]"
    ),
)


@click.command(cls=Grouped, context_settings=PASSES_ON)
@click.option(
    "--input",
    "source",
    type=paths.TEXT_OR_URL,
    required=True,
    help="CSV, TSV, JSON lines (also .gz, .zst) or Parquet, here or in a store: a "
    "file, a folder, also of partitions such as day=3, or a quoted glob.",
)
@click.option(
    "--schema",
    "schema_file",
    type=paths.TEXT,
    help="Describes the columns: see dpsgd schema; or criteo, for Criteo's click logs. "
    "Parquet of numbers needs none beside --user.",
)
@click.option("--out", type=paths.TEXT, required=True, help="New or empty folder.")
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
    help="Keep the values of categories without a vocabulary, in place of hashing "
    "them, for `dpsgd statistics`.",
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

    `dpsgd schema TABLE` writes a first schema.  Rows keep their order within a part;
    several files are read in the natural order of their names.  OUT appears when every
    row was checked.

    Each column of categories is hashed on its own, so that a value depends on no other
    row.  A vocabulary counted from the training data would reveal something about every
    row that no epsilon of DP-SGD covers: write a public one into the schema, or let
    `dpsgd statistics` find one, from rows that train nothing and with --keep-values.

    With users, all rows of a user are in one part, at most k of them are kept for
    training, chosen by a secret key at random, and the ids are removed.  The privacy
    unit of batches, runs and statements is then a user.  Neither the number of users
    nor that of rows is published.

    \b
    Examples:
      dpsgd prepare --input table.parquet --schema schema.toml --out data
      dpsgd prepare --input visits.csv --schema schema.toml --out data --user visitor \\
          --max-examples-per-user 5 --num-examples 40000
      dpsgd prepare --input 'criteo/day_*.gz' --schema criteo --out data
    """
    from pipelines.cli import data_work

    options = {name: value for name, value in options.items() if value is not None}
    data_work.prepare(
        source, schema_file, out, runner, ctx.args, options, as_json=as_json
    )
