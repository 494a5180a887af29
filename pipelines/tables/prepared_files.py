"""Files of numbers: those that ``prepare`` writes, their record, and columns in memory.

    OUT/train/part-00000.parquet ...   rows
    OUT/_prepared.json                 rows and footer of every file, the schema
                                       and the settings; sensitive

Readers of a folder skip names that begin with an underscore.

    columns = columns_of({"x": x, "label": y})     # or a DataFrame, or an Arrow table
    write_columns("data.parquet", columns)

Missing values of pandas and Arrow are refused, as everywhere.  NaN is a number: a model
may replace it, and a row whose loss is not finite contributes nothing.  The type of a
column in memory, which manifests publish, depends on the type that was given and on no
value.  Floats of 64 bits become 32, as in Keras, and so do integers, which are refused
where they do not fit.  No error quotes a value.

Pages have checksums, by which a reader finds every changed byte of a value.  ``digest``
commits to names, types, shapes and all values, in order.  The footer of the file holds
it, so that the table differs from all others (see ``SourceTable``).

Public: schema, settings, names, types, shapes.  Sensitive: all else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError, header
from pipelines.core.batches.manifest import DTYPES, Column, row_bytes
from pipelines.files.outputs import Sink
from pipelines.files.storage import new_file, pretty_json, write_atomically
from pipelines.inputs import parquet_blocks
from pipelines.inputs.source_table import FOOTERS, footers_of
from pipelines.inputs.source_table import PREPARED_NAME as RECORD_NAME
from pipelines.tables.kinds import Output
from pipelines.tables.schema import Schema

#: A row group is a block of the batch job, which holds a few at a time.
DEFAULT_ROW_GROUP_ROWS = 131_072
#: Maximum bytes of a row group.
ROW_GROUP_BYTES = 64 << 20
#: About 4 million rows, 200 MB, per file of Criteo's data.
ROW_GROUPS_PER_FILE = 32


@contextlib.contextmanager
def new_table(path: pathlib.Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Yields a writer of a file that appears when the context ends well.

    Its pages have checksums, and are compressed as fast as they are read.

    Args:
      path: Path of the file.
      schema: Schema of the file.
    """
    packed = {"compression": "zstd", "compression_level": 1}
    with (
        new_file(path, mode=0o600) as write,
        pq.ParquetWriter(
            Sink(write), schema, write_page_checksum=True, **packed
        ) as writer,
    ):
        yield writer


@dataclasses.dataclass
class Pieces:
    """Files of rows in a folder: a new one begins when the last has enough row groups.

    Attributes:
      folder: The folder.
      prefix: Beginning of the names.
      schema: Schema of the files.
      num_rows: Rows of a row group.
      num_groups: Row groups of a file.
      or_empty: Whether a file is written even if there are no rows.
    """

    folder: pathlib.Path
    prefix: str
    schema: pa.Schema
    num_rows: int
    num_groups: int = ROW_GROUPS_PER_FILE
    or_empty: bool = False

    def __post_init__(self) -> None:
        self._waiting: list[pa.Table] = []
        self._opened = contextlib.ExitStack()
        self._writer: pq.ParquetWriter | None = None
        self._num_files = self._num_written = 0

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *error: Any) -> None:
        rest = pa.concat_tables([self.schema.empty_table(), *self._waiting])
        is_empty = self.or_empty and not self._num_files
        if error[0] is None and (len(rest) or is_empty):
            self._write(rest)
        self._opened.__exit__(*error)

    def write(self, table: pa.Table) -> None:
        """Writes rows, or keeps them until there is a row group of them."""
        self._waiting.append(table)
        if sum(map(len, self._waiting)) < self.num_rows:
            return
        rows = pa.concat_tables(self._waiting)
        while len(rows) >= self.num_rows:
            self._write(rows.slice(0, self.num_rows))
            rows = rows.slice(self.num_rows)
        self._waiting = [rows]

    def _write(self, rows: pa.Table) -> None:
        if self._writer is None or self._num_written == self.num_groups:
            self._opened.close()
            path = self.folder / f"{self.prefix}{self._num_files:05d}.parquet"
            self._writer = self._opened.enter_context(new_table(path, self.schema))
            self._num_files, self._num_written = self._num_files + 1, 0
        self._writer.write_table(
            rows.combine_chunks(), row_group_size=max(1, len(rows))
        )
        self._num_written += 1


def prepared_schema(schema: Schema, numbers: Sequence[Column] = ()) -> pa.Schema:
    """Returns the Arrow schema of the prepared data, with its description.

    Args:
      schema: Schema of the table.
      numbers: Columns of a table without a schema.
    """
    if numbers:
        return pa.schema([arrow_field(each, *each.shape) for each in numbers])
    fields = [arrow_field(output, *output.shape) for output in schema.outputs]
    description = json.dumps(schema.description)
    return pa.schema(
        fields, metadata={parquet_blocks.DATASET_METADATA_KEY: description.encode()}
    )


def arrow_field(column: Column | Output, *shape: int) -> pa.Field:
    """Returns a field without nulls.

    Args:
      column: Name and type of a column.
      *shape: Shape of its rows.
    """
    kind = pa.from_numpy_dtype(np.dtype(column.dtype))
    for size in reversed(shape):
        kind = pa.list_(pa.field("item", kind, nullable=False), size)
    return pa.field(column.name, kind, nullable=False)


def arrow_table(columns: Iterable[Any], schema: pa.Schema) -> pa.Table:
    """Returns columns of shape (rows, ...) as a table, without copies if possible.

    Args:
      columns: An array for each field, in order.
      schema: Fields of numbers, or of lists of fixed sizes of them; or of texts.
    """
    found = zip(columns, schema, strict=True)
    return pa.table([_as_array(values, field.type) for values, field in found], schema)


def _as_array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values, kind)
    inner = _as_array(values.reshape(-1, *values.shape[2:]), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(inner, type=kind)


def write_record(
    folder: pathlib.Path, schema: pa.Schema, settings: Mapping[str, Any]
) -> None:
    """Writes the record, by which ``SourceTable`` knows the table of the rows.

    Args:
      folder: Folder of the prepared data.
      schema: Schema of the files.
      settings: Settings of the conversion, JSON-serialisable.
    """
    paths = {str(p.relative_to(folder)): p for p in sorted(folder.glob("*/*.parquet"))}
    sizes = {name: pq.read_metadata(path).num_rows for name, path in paths.items()}
    record = {
        **header(2, "dpsgd-prepared"),
        "dataset": parquet_blocks.description_of(schema, RECORD_NAME),
        "settings": dict(settings),
        "files": {name: {"num_rows": size} for name, size in sizes.items()},
        FOOTERS: footers_of(folder, paths),
    }
    write_atomically(folder / RECORD_NAME, pretty_json(record), mode=0o600)


# --- Columns in memory --------------------------------------------------------------

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
      InputError: the data is something else, a column does not hold numbers or has
        missing values, columns differ in length, or there are no rows.
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
            f"{names}."
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
        column = parquet_blocks.column_of(pa.field(name, values.type))
        if column is None:
            raise _not_numbers(name, values.type)
        return parquet_blocks.table_columns(pa.table({name: values}), (column,))[name]
    if np.ma.is_masked(values):
        raise parquet_blocks.with_nulls([name])
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
                f"Expected column {name} of data to fit into int32. Give floats, ids "
                "below 2**31, or a Parquet file, whose types are kept."
            )
    with np.errstate(over="ignore"):  # a warning would tell of a value
        return np.ascontiguousarray(values, np.dtype(wanted))


def _not_numbers(name: str, kind: object) -> InputError:
    return InputError(
        f"Expected column {name} of data to hold one number, or numbers of one shape, "
        f"for each row; it holds {kind}. `dpsgd fit` takes texts, categories and "
        "dates; or make the column dense (.toarray(), .to_tensor()), or give codes of "
        "a public list of categories."
    )


def digest(columns: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of columns from ``columns_of``.  Sensitive."""
    total = hashlib.sha256()
    for name, values in columns.items():
        total.update(repr((name, values.dtype.name, values.shape)).encode())
        total.update(values.ravel().view(np.uint8).data)
    return total.hexdigest()


def described(columns: Mapping[str, np.ndarray], path: str) -> parquet_blocks.Dataset:
    """Returns columns as a data set of one block, before they are written.

    Args:
      columns: From ``columns_of``.
      path: Path of the file.
    """
    num_rows = len(next(iter(columns.values())))
    name = pathlib.PurePath(path).name
    block = parquet_blocks.Block(
        path=path, label=f"{name}#0", row_group=0, num_rows=num_rows, first_row=0,
        ordinal=0,
    )  # fmt: skip
    return parquet_blocks.Dataset(
        columns=tuple(
            Column(name=name, dtype=values.dtype.name, shape=values.shape[1:])
            for name, values in columns.items()
        ),
        description={},
        blocks=(block,),
        files={name: num_rows},
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
