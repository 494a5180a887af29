"""Kinds of columns by their Arrow types.  Public: names and types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from pipelines.core.batches.columns import Column

_PREPARE = (
    "`dpsgd schema TABLE` writes the schema, with which `dpsgd prepare --input TABLE "
    "--schema schema.toml --out data` turns them into numbers"
)

DROP = "drop"

#: Names of a column of ids; a plain "id" is as often that of a row.
_NAMES = re.compile(
    "(user|person|patient|customer|client|member|visitor)([_ -]?id)?|uid", re.IGNORECASE
)


def kind_of_type(kind: pa.DataType) -> str:
    """Returns the kind of a first schema: numeric, boolean, category, date or drop.

    Example:
      >>> kind_of_type(pa.string()), kind_of_type(pa.list_(pa.float32()))
      ('category', 'numeric')
    """
    if isinstance(kind, pa.BaseExtensionType):
        return kind_of_type(kind.storage_type)
    types = pa.types
    if types.is_dictionary(kind) or is_list(kind):
        return kind_of_type(kind.value_type)
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "numeric"
    if types.is_timestamp(kind) or types.is_date(kind):
        return "date"
    return "category" if is_text(kind) else DROP


def seems_user_column(columns: Sequence[Column]) -> str | None:
    """Returns the name of a column that seems to hold ids of users; None for none.

    Args:
      columns: Columns of a table, of which only names and types are looked at.
    """
    for column in columns:
        integer = np.issubdtype(column.dtype, np.integer) and not column.shape
        if integer and _NAMES.fullmatch(column.name):
            return column.name
    return None


def not_numbers(fields: Iterable[pa.Field]) -> str:
    """Returns the error text for columns that batches cannot hold."""
    told = [
        f"column {field.name} of type {field.type} "
        f'([columns.{field.name}] kind = "{kind_of_type(field.type)}")'
        for field in fields
    ]
    return (
        f"Expected {', '.join(told)} to be a fixed-width number or a fixed-size list "
        f"of them. {_PREPARE}, with the line in brackets; or drop the column."
    )


def with_nulls(names: Iterable[str], path: str) -> str:
    """Returns the error text for columns with missing values.

    Args:
      names: Names of the columns.
      path: Path of the file; empty if unknown.
    """
    where = f" of {path}" if path else ""
    return (
        f"Expected column {', '.join(names)}{where} to hold no nulls, which stand for "
        f"missing values. {_PREPARE} (NaN, 0, or a column that marks them)."
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether cells are texts or bytes of any length."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether cells are lists."""
    fixed = pa.types.is_fixed_size_list(kind)
    return bool(fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind))
