"""The options of ``dpsgd schema`` and ``dpsgd prepare``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from accounting.cli.options import LocalText, Size
from accounting.core.settings import RARE

#: The kinds of column that have an option.
KINDS_WITH_OPTION = ("numeric", "category", "text", "date", "boolean", "user", "drop")


OfUsers = Parameter(group="Users")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """What the options of ``dpsgd schema`` and ``fit`` say of the columns.

    Attributes:
      label: Column to predict.
      classes: Values of the label, separated by commas, class 0 first; public.
      numeric: Columns of numbers, separated by commas; between double quotes if a name
        has one.
      category: Columns of categories, which are hashed.
      text: Columns of words.
      date: Columns of days or times.
      boolean: Columns of true and false.
      user: Column of the user's id.
      drop: Columns to omit.
      ranges: Least and largest possible value of a number, or first and last date,
        known without the rows; may be repeated.  Of the label it says that a number is
        predicted.
      header: Names of all columns, separated by commas, of text without a header.
        Otherwise the first row is read as the header and published in the schema.
      delimiter: Delimiter of CSV.  [default: a comma]
    """

    label: str = ""
    classes: str = ""
    numeric: str = ""
    category: str = ""
    text: str = ""
    date: str = ""
    boolean: str = ""
    user: str = ""
    drop: str = ""
    ranges: Annotated[
        tuple[str, ...], Parameter(name="--range", metavar="NAME:LOW:HIGH")
    ] = ()
    header: Annotated[str, RARE] = ""
    delimiter: Annotated[str, RARE] = ""


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
      num_examples: A public upper bound on the rows kept for training or, with
        --sample users, on the users.  It replaces their true number in the sampling
        rate: batches are smaller by as much as it is larger.
      sampled: What an example is, a row or a user.  A user is one record of all rows
        kept; its gradient is that of their mean loss.  [default: rows]
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
    sampled: Annotated[
        Literal["rows", "users"] | None, OfUsers, Parameter(name="--sample")
    ] = None
    bound_held_out: Annotated[bool | None, OfUsers] = None
    key_file: Annotated[LocalText | None, OfUsers, RARE] = None
    memory_limit: Annotated[Size | None, OfUsers, RARE] = None
    threads: Annotated[int | None, RARE] = None

    def given(self) -> dict[str, Any]:
        """Returns the options that were given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}
