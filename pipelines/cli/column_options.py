"""What ``dpsgd schema`` and ``dpsgd fit`` are told of the columns of a table."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Parameter

from accounting.core.settings import RARE

#: The kinds of column that have an option.
KINDS_WITH_OPTION = ("numeric", "category", "text", "date", "boolean", "user", "drop")


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
