"""``dpsgd synth``, ``dpsgd schema`` and ``dpsgd prepare``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from accounting.cli.command import PassedOn, names_of, of_fields
from accounting.cli.options import Json, LocalText, Size
from accounting.core.settings import RARE, REQUIRED
from pipelines.cli.column_options import ColumnOptions

OfUsers = Parameter(group="Users")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of ``dpsgd prepare`` that have defaults.

    Attributes:
      on_bad_row: What to do on a malformed row.  [default: fail]
      row_group_rows: Rows per row group, the block that the batch job samples at once.
        [default: 131072, fewer if rows are large]
      user: Column of the users' ids, as of kind user in the schema.
      max_examples_per_user: Maximum number of rows kept per user for training, at
        random.
      num_examples: A public upper bound on the rows kept for training.  It replaces
        their true number in the sampling rate: batches are smaller by as much as it is
        larger.
      bound_held_out: Bounds held-out rows, too, for `dpsgd statistics` and `dpsgd
        evaluate`.  [default: all of them are kept]
      key_file: Secret key that chooses rows of users, made if missing; not the one of
        the batches.  [default: a temporary key]
      memory_limit: Memory for the choice of rows.  [default: 2GiB]
      threads: Threads of this process.  [default: all cores]
    """

    on_bad_row: Literal["fail", "skip"] | None = None
    row_group_rows: Annotated[int | None, RARE] = None
    user: Annotated[str | None, OfUsers] = None
    max_examples_per_user: Annotated[int | None, OfUsers] = None
    num_examples: Annotated[int | None, OfUsers] = None
    bound_held_out: Annotated[bool | None, OfUsers] = None
    key_file: Annotated[LocalText | None, OfUsers, RARE] = None
    memory_limit: Annotated[Size | None, OfUsers, RARE] = None
    threads: Annotated[int | None, RARE] = None

    def given(self) -> dict[str, Any]:
        """Returns the options that were given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def synth(
    *,
    rows: Annotated[int, Parameter(group=REQUIRED)],
    out: Annotated[LocalText, Parameter(group=REQUIRED)],
    seed: int = 0,
    rows_per_user: Annotated[float | None, Parameter(metavar="MEAN")] = None,
    as_json: Json = False,
) -> None:
    """Writes synthetic click logs in the format of the Criteo data set.

    Every row is random: a label, 13 integers and 26 strings of hexadecimal digits, with
    skewed frequencies and missing values.  All seeds share one distribution, so a model
    trained on one seed can be tested on another; a good model has an AUC near 0.82.

    With --rows-per-user each row also has the number of its user, of rows / MEAN users.
    Rows of one user share some columns and a latent preference; another --seed has
    other users.

    For example:
      dpsgd synth --rows 100000 --out raw
      dpsgd synth --rows 100000 --rows-per-user 10 --out visits

    Args:
      rows: Number of rows.
      out: New or empty folder.
      seed: Seed of the rows.
      rows_per_user: Write rows of users, MEAN per user, with a header and a column
        user.  A few users have very many rows.
    """
    from pipelines.cli import data_body

    data_body.synth(out, rows, seed, rows_per_user, as_json=as_json)


def schema(
    table: str,
    /,
    *,
    columns: Annotated[ColumnOptions, of_fields] = ColumnOptions(),
    out: LocalText = "schema.toml",
    as_json: Json = False,
) -> None:
    """Writes a first schema of a table, for `dpsgd prepare --schema`.

    Only the names of the columns are read, and for Parquet their types, but no values.
    Complete the file before you use it: it marks what is left to choose.

    For example:
      dpsgd schema adult.csv --label income --classes '<=50K,>50K' \\
          --numeric age,hours-per-week --category workclass,occupation
      dpsgd prepare --input adult.csv --schema schema.toml --out data

    Args:
      table: CSV, TSV, JSON lines or Parquet: a file, a folder or a quoted glob.
      out: New file.
    """
    from pipelines.cli import data_body

    data_body.schema(table, out, columns, as_json=as_json)


def prepare(
    *others: PassedOn,
    source: Annotated[str, Parameter(name="--input", group=REQUIRED)],
    out: Annotated[LocalText, Parameter(group=REQUIRED)],
    schema: LocalText | None = None,
    options: Annotated[PrepareOptions, of_fields] = PrepareOptions(),
    runner: str | None = None,
    as_json: Json = False,
) -> None:
    """Turns a raw table into numeric Parquet, split into train, val and test.

    `dpsgd schema TABLE` writes a first schema.  Rows keep their order within a part;
    several files are read in the natural order of their names.  OUT appears when every
    row was checked.  Categories are hashed; a vocabulary has to be public.

    With users, all rows of a user are in one part, at most k of them are kept for
    training, chosen by a secret key at random, and the ids are removed.  The privacy
    unit of batches, runs and statements is then a user.  Neither the number of users
    nor that of rows is published.

    For example:
      dpsgd prepare --input table.parquet --schema schema.toml --out data
      dpsgd prepare --input 'criteo/day_*.gz' --schema criteo --out data
      dpsgd prepare --input visits.csv --schema schema.toml --out data --user visitor \\
          --max-examples-per-user 5 --num-examples 40000

    Args:
      others: Options of Beam.
      source: CSV, TSV, JSON lines (also .gz, .zst) or Parquet, here or in a store: a
        file, a folder or a quoted glob.
      schema: Describes the columns: see dpsgd schema; or criteo, for Criteo's click
        logs.  Parquet of numbers needs none beside --user.
      out: New or empty folder.
      runner: Apache Beam runner, to which all other options go; it writes the same
        bytes.  Its workers must reach input, output and key under the same paths.
        [default: this process]
    """
    from pipelines.cli import data_body

    data_body.prepare(
        source,
        schema,
        out,
        runner,
        [*others],
        options.given(),
        as_json=as_json,
        names=names_of(prepare),
    )
