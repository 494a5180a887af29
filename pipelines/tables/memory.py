"""Columns in memory, and the Parquet file of which batches are sampled.

    columns = columns_of({"x": x, "label": y})     # or a DataFrame, or an Arrow table
    write_columns("data.parquet", columns)

Missing values of pandas and Arrow are refused, as everywhere.  NaN is a number: a model
may replace it, and a row whose loss is not finite contributes nothing.

Formal guarantees:
  - The type of a column, which manifests publish, depends on the type that was given
    and on no value.  Floats of 64 bits become 32, as in Keras, and so do integers,
    which are refused where they do not fit.
  - ``digest`` commits to names, types, shapes and all values, in order.  It is in the
    footer of the file, and so tells the table from all others (see ``SourceTable``).
  - No error quotes a value.

Public: names, types and shapes.  Sensitive: values and digests.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from accounting.core.validation import InputError
from pipelines.core.batches.columns import DTYPES, Column, row_bytes
from pipelines.inputs.parquet_blocks import (
    Block,
    Dataset,
    column_of,
    table_columns,
    with_nulls,
)
from pipelines.tables.prepared_files import (
    DEFAULT_ROW_GROUP_ROWS,
    ROW_GROUP_BYTES,
    arrow_field,
    arrow_table,
    new_table,
)

#: Key of the Parquet schema metadata with the ``digest``.  Sensitive.
_DIGEST_KEY = b"dpsgd.columns"
_STORED_AS = {
    "bool": "uint8",
    "float64": "float32",
    "int64": "int32",
    "uint64": "int32",
}


def columns_of(data: Any) -> dict[str, np.ndarray]:
    """Returns name -> array of shape (rows, ...), of the types that batches get.

    Args:
      data: A pandas DataFrame, whose index is ignored, a pyarrow Table, or a dict of
        arrays.

    Raises:
      InputError: something else, a column that does not hold numbers, missing values,
        columns of different lengths, or no rows.
    """
    if isinstance(data, pa.Table):
        named = list(zip(data.column_names, data.columns, strict=True))
    elif isinstance(data, Mapping) or _is_of_pandas(data, "DataFrame"):
        named = list(data.items())
    else:
        raise InputError(
            "Expected data to be a pandas DataFrame, a pyarrow Table, a dict of arrays "
            f"by name, or the path of Parquet files; got {type(data).__qualname__}."
        )
    names = [name for name, _ in named]
    if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise InputError(
            "Expected columns of data to have different names that are texts; they are "
            f"{names}. Rename them, as by data.rename(columns=str)."
        )
    columns = {name: _stored(name, _array(name, values)) for name, values in named}
    lengths = {name: len(values) for name, values in columns.items()}
    if len({*lengths.values()}) > 1:
        raise InputError(f"Expected columns of data of one length; got {lengths}.")
    if not any(lengths.values()):
        raise InputError("Expected rows in data; there are none.")
    return columns


def _is_of_pandas(value: Any, name: str) -> bool:
    """Whether a value is of a class of pandas, which need not be installed."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, getattr(pandas, name))


def _array(name: str, values: Any) -> np.ndarray:
    """Returns the values of a column, of the type that was given."""
    arrow = pa.Array | pa.ChunkedArray
    try:
        if _is_of_pandas(values, "Series") and not isinstance(values.dtype, np.dtype):
            values = pa.array(values)
        elif not isinstance(values, arrow):
            values = np.ma.asanyarray(values)
    except (ValueError, TypeError, pa.ArrowException):  # whose text may quote a value
        raise _not_numbers(name, type(values).__qualname__) from None
    if isinstance(values, arrow):
        column = column_of(pa.field(name, values.type))
        if column is None:
            raise _not_numbers(name, values.type)
        return table_columns(pa.table({name: values}), (column,))[name]
    if np.ma.is_masked(values):
        raise with_nulls([name])
    return np.asarray(values)


def _stored(name: str, values: np.ndarray) -> np.ndarray:
    """Returns the values of a column, of the type that batches get."""
    given = values.dtype.name
    wanted = _STORED_AS.get(given, given)
    if wanted not in DTYPES:
        raise _not_numbers(name, values.dtype.type.__name__)
    if not values.ndim or not all(values.shape[1:]):
        raise _not_numbers(name, f"an array of shape {values.shape}")
    Column(name=name, dtype=wanted, shape=values.shape[1:])  # refuses reserved names
    if wanted == "int32" and values.size:
        most = np.iinfo(wanted)
        if values.min() < most.min or values.max() > most.max:
            raise InputError(
                f"Expected column {name} of data to fit into int32; it holds larger "
                "numbers. Give it as floats, as ids below 2**31, or in a Parquet file, "
                "whose types are kept."
            )
    with np.errstate(over="ignore"):  # a warning would tell of a value
        return np.ascontiguousarray(values, np.dtype(wanted))


def _not_numbers(name: str, kind: object) -> InputError:
    return InputError(
        f"Expected column {name} of data to hold one number, or numbers of one shape, "
        f"for each row; it holds {kind}. `dpsgd fit` takes texts, categories and "
        "dates. Or drop the column, or give codes of a public list of categories."
    )


def digest(columns: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of columns from ``columns_of``.  Sensitive."""
    total = hashlib.sha256()
    for name, values in columns.items():
        total.update(repr((name, values.dtype.name, values.shape)).encode())
        total.update(values.ravel().view(np.uint8).data)
    return total.hexdigest()


def described(columns: Mapping[str, np.ndarray], path: str) -> Dataset:
    """Returns columns as a data set of one block, before they are written.

    Args:
      columns: From ``columns_of``.
      path: Path of the file.
    """
    num_rows = len(next(iter(columns.values())))
    name = pathlib.PurePath(path).name
    block = Block(
        path=path, name=name, row_group=0, num_rows=num_rows, first_row=0, ordinal=0
    )
    return Dataset(
        columns=tuple(
            Column(name=name, dtype=values.dtype.name, shape=values.shape[1:])
            for name, values in columns.items()
        ),
        description={},
        blocks=(block,),
        files={name: num_rows},
        hidden=(),
        footers={},
    )


def write_columns(path: pathlib.Path, columns: Mapping[str, np.ndarray]) -> None:
    """Writes a Parquet file, for its owner alone.

    Args:
      path: New file.
      columns: From ``columns_of``.
    """
    found = described(columns, str(path)).columns
    schema = pa.schema(
        [arrow_field(column, *column.shape) for column in found],
        metadata={_DIGEST_KEY: digest(columns)},
    )
    table = arrow_table(columns.values(), schema)
    most = min(DEFAULT_ROW_GROUP_ROWS, ROW_GROUP_BYTES // row_bytes(found))
    with new_table(path, schema) as writer:
        writer.write_table(table, row_group_size=max(1, most))
