"""The files that ``prepare`` writes, and the record by which they are verified.

    OUT/train/part-00000.parquet ...   rows
    OUT/_prepared.json                 rows and digest of every file, the schema
                                       and the settings; sensitive

Readers of a folder skip names that begin with an underscore.

Formal guarantees, if ``verify_prepared`` returns no findings:
  - every file is there, byte for byte as it was written, and there is no other file;
  - the record was not edited, unless its fingerprint was computed anew.

Public: schema, settings and findings, which name files.  Sensitive: all else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError, header, read_fields
from pipelines.core.batches.columns import Column
from pipelines.core.files.local_files import digest_of
from pipelines.core.threads import in_order, num_cores
from pipelines.core.users.bounded import BOUNDED
from pipelines.files.outputs import Sink
from pipelines.files.storage import new_file, pretty_json, read_json, write_atomically
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    description_of,
)
from pipelines.inputs.source_table import FOOTERS, footers_of
from pipelines.inputs.source_table import PREPARED_NAME as RECORD_NAME
from pipelines.tables.kinds import Output
from pipelines.tables.schema import Schema

_HEADER: Any = {"format_name": "dpsgd-prepared", "version": 1}
_FIELDS = ("dataset", "settings", "files", FOOTERS, "fingerprint")

#: A row group is a block of the batch job, which holds a few at a time.
DEFAULT_ROW_GROUP_ROWS = 131_072
#: Maximum bytes of a row group.
ROW_GROUP_BYTES = 64 << 20


def open_writer(where: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Returns a writer of pages with checksums, compressed as fast as they are read.

    Args:
      where: A path, or a file that is open for writing.
      schema: Schema of the file.
    """
    return pq.ParquetWriter(
        where,
        schema,
        compression="zstd",
        compression_level=1,
        write_page_checksum=True,
    )


@contextlib.contextmanager
def new_table(path: pathlib.Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Yields a writer of a file that appears when the context ends well.

    Args:
      path: Path of the file.
      schema: Schema of the file.
    """
    with (
        new_file(path, mode=0o600) as write,
        open_writer(Sink(write), schema) as writer,
    ):
        yield writer


class Pieces:
    """Files of rows in a folder: a new one begins when the last has enough row groups.

    Args:
      folder: The folder.
      prefix: Of their names.
      schema: Schema of the files.
      num_rows: Rows of a row group.
      num_groups: Row groups of a file.
      or_empty: Whether there is a file also of no rows.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        prefix: str,
        schema: pa.Schema,
        num_rows: int,
        num_groups: int,
        *,
        or_empty: bool = False,
    ) -> None:
        self._folder, self._prefix, self._schema = folder, prefix, schema
        self._num_rows, self._num_groups = num_rows, num_groups
        self._or_empty = or_empty
        self._waiting: list[pa.Table] = []
        self._opened = contextlib.ExitStack()
        self._writer: pq.ParquetWriter | None = None
        self._num_files = self._num_written = 0

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *error: Any) -> None:
        rest = pa.concat_tables([self._schema.empty_table(), *self._waiting])
        is_empty = self._or_empty and not self._num_files
        if error[0] is None and (len(rest) or is_empty):
            self._write(rest)
        self._opened.__exit__(*error)

    def write(self, table: pa.Table) -> None:
        """Writes rows, or keeps them until there is a row group of them."""
        self._waiting.append(table)
        if sum(map(len, self._waiting)) < self._num_rows:
            return
        rows = pa.concat_tables(self._waiting)
        while len(rows) >= self._num_rows:
            self._write(rows.slice(0, self._num_rows))
            rows = rows.slice(self._num_rows)
        self._waiting = [rows]

    def _write(self, rows: pa.Table) -> None:
        if self._writer is None or self._num_written == self._num_groups:
            self._opened.close()
            path = self._folder / f"{self._prefix}{self._num_files:05d}.parquet"
            self._writer = self._opened.enter_context(new_table(path, self._schema))
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
    return pa.schema(fields, metadata={DATASET_METADATA_KEY: description.encode()})


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
    folder: pathlib.Path,
    schema: pa.Schema,
    settings: Mapping[str, Any],
) -> None:
    """Writes the record for ``verify_prepared``.

    Args:
      folder: Folder of the prepared data.
      schema: Schema of the files.
      settings: Settings of the conversion, JSON-serialisable.
    """
    paths = {str(p.relative_to(folder)): p for p in sorted(folder.glob("*/*.parquet"))}
    files = {
        name: {
            "num_rows": pq.read_metadata(paths[name]).num_rows,
            "sha256": digest_of(paths[name]),
        }
        for name in paths
    }
    record = {
        "dataset": description_of(schema, RECORD_NAME),
        "settings": dict(settings),
        "files": files,
        FOOTERS: footers_of(folder, files),
    }
    fields = {**header(**_HEADER), **record, "fingerprint": fingerprint(record)}
    write_atomically(folder / RECORD_NAME, pretty_json(fields), mode=0o600)


# --- Verification -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedVerification:
    """What was checked.  Public.

    Attributes:
      num_files: Number of files in the record.
      num_rows: Number of rows in the record; None if users are bounded: it depends on
        how many rows each has.
      findings: What is wrong, as one line each.
    """

    num_files: int
    num_rows: int | None
    findings: tuple[str, ...]


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has a record of ``prepare``."""
    return pathlib.Path(folder, RECORD_NAME).is_file()


def verify_prepared(
    folder: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> PreparedVerification:
    """Checks every byte of prepared data, and reports all findings.

    Args:
      folder: Folder that ``dpsgd prepare`` wrote.
      progress: Called with the number of files checked so far, and in all.

    Raises:
      InputError: the record cannot be read.
    """
    root = pathlib.Path(folder)
    files, num_rows = _read_record(root / RECORD_NAME)
    there = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    findings = [
        f"Expected no file {name}: prepare did not write it."
        for name in sorted(there - {*files, RECORD_NAME})
    ]

    def check(name: str) -> list[str]:
        try:
            if digest_of(root / name) == files[name]:
                return []
            return [f"Expected {name} to be byte for byte as it was written."]
        except OSError as error:
            return [f"Expected {name} to be readable: {error.strerror}."]

    with ThreadPoolExecutor(num_cores()) as pool:
        checked = in_order(pool, check, sorted(files), 2 * num_cores())
        with contextlib.closing(checked):
            for count, found in enumerate(checked, start=1):
                findings += found
                progress(count, len(files))
    return PreparedVerification(
        num_files=len(files), num_rows=num_rows, findings=tuple(findings)
    )


def _read_record(path: pathlib.Path) -> tuple[dict[str, str], int | None]:
    """Returns name -> SHA-256 of the files, and their rows unless users are bounded."""
    fields = read_fields(
        read_json(path, remedy="Name a folder that `dpsgd prepare` wrote."),
        _FIELDS,
        kind="record of prepared data",
        **_HEADER,
    )
    told = fields.pop("fingerprint")
    try:
        files = {name: each["sha256"] for name, each in fields["files"].items()}
        num_rows = sum(each["num_rows"] for each in fields["files"].values())
        has_users = "max_examples_per_user" in fields["settings"]
        has_users = has_users or BOUNDED in fields["dataset"]
        inside = all(re.fullmatch(r"\w+/[\w-][\w.-]*", name) for name in files)
    except (AttributeError, TypeError, KeyError):
        inside = False
    if fingerprint(fields) != told or not inside:
        raise InputError(
            f"Expected {path} to be as it was written; it was edited. Restore it, or "
            "prepare the table again."
        )
    return files, None if has_users else num_rows
