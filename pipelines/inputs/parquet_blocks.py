"""Parquet row groups as blocks: listed once, read as columns.

A block is one row group of one file.  Its label, ``file#row-group`` with the file's
path relative to the input, is its identity.  The sampler's randomness depends on the
label alone, not on where or when the block is read.

Files and blocks:
  - Files are found as in ``input_files``.  Blocks are listed by name and number, in the
    same order on every machine.
  - All files have the same columns and description.  If the description says that users
    are bounded, the files must be all files of one folder, with the footers that they
    were written with, so that the bound is true of all rows together.  Tables that were
    bounded one by one are refused, and so are several that were prepared of one table,
    and what other tools made of one.
  - ``read_block`` returns exactly ``block.num_rows`` rows, bit for bit as stored, or
    raises.  It refuses a file whose footer is not the one that was listed, and a page
    that does not match its checksum, if it has one (`dpsgd prepare` writes checksums).
  - Columns that are not fixed-width numbers are refused before any work, as are nulls
    that the footer counts; other nulls are refused when the block is read.  No message
    holds a value.

Keys and digests, up to the PRF assumption on keyed BLAKE2b:
  - Every digest of the input that is sent to workers is keyed, and reveals nothing
    about the input.  A ``Block`` holds only public values.
  - ``KnownInput.is_listed`` accepts the file of a block only with the footer that was
    listed.  A worker that reads another key than the job's is refused.
  - One sampling key gives independent choices for two inputs that differ in the names,
    the rows or the footers of their files: choices derive from ``data_set_key``.
    Inputs with equal names and footers count as the same.

Public: names, types, shapes and numbers of rows.  Sensitive: rows and footers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import DTYPES, Column
from pipelines.core.keys import commitment, derive
from pipelines.core.rows import RowGroup
from pipelines.core.users import Bounded
from pipelines.files.storage import is_remote
from pipelines.inputs.input_files import find_files
from pipelines.inputs.source_table import (
    PREPARED_NAME,
    as_written,
    footer_digest_of,
    open_listed,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block(RowGroup):
    """One row group.  Public.

    Attributes:
      ordinal: Its place among all blocks.
    """

    ordinal: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return self.label.rpartition("#")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """The row groups and files of an input.

    Digests of footers are sensitive: footers hold column statistics, so a guess at a
    row could be checked against them.

    Attributes:
      blocks: Row groups, in the order of name and number.
      files: Name -> number of rows, of every file.
      footers: Name of every file with blocks -> its ``footer_digest``.  Sensitive.
      columns: Columns of every file; none of files whose columns may be of any type.
      description: The files' own description; see ``DATASET_METADATA_KEY``.
    """

    blocks: tuple[Block, ...]
    files: dict[str, int]
    footers: dict[str, str] = dataclasses.field(repr=False)
    columns: tuple[Column, ...]
    description: dict[str, Any]

    @property
    def digest(self) -> str:
        """SHA-256 over names, sizes and footers of all files.  Sensitive."""
        lines = [
            f"{block.label} {block.num_rows} {self.footers[block.name]}\n"
            for block in self.blocks
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def num_examples(self) -> int:
        """Number of slots: rows or, if users are bounded, the given public number."""
        return self.bounded.num_examples if self.bounded else self.num_rows

    @property
    def num_rows(self) -> int:
        """Number of rows in all blocks; sensitive if users are bounded."""
        return sum(block.num_rows for block in self.blocks)

    @property
    def bounded(self) -> Bounded | None:
        """The bound on the rows of each user; None if there is none."""
        return Bounded.of(self.description)

    def is_listed(self, block: Block, footer: str) -> bool:
        """Returns whether a file is the one that was listed.

        Args:
          block: A block of the file.
          footer: The current ``footer_digest`` of the file.
        """
        return self.footers.get(block.name) == footer


IsListed = Callable[[Block, str], bool]

#: Key of the Parquet schema metadata with the description of a data set: a JSON object
#: of public values.
DATASET_METADATA_KEY = b"dpsgd.dataset"


_PREPARE = (
    "`dpsgd schema TABLE` writes the schema, with which `dpsgd prepare --input TABLE "
    "--schema schema.toml --out data` turns them into numbers"
)


def with_nulls(names: Iterable[str], path: str = "") -> InputError:
    """Returns the error for columns with nulls.

    Args:
      names: Names of the columns.
      path: The file, for messages; empty for none.
    """
    where = f" of {path}" if path else ""
    return InputError(
        f"Expected column {', '.join(names)}{where} to hold no nulls, which stand for "
        f"missing values. {_PREPARE} (NaN, 0, or a column that marks them)."
    )


def numeric_columns(schema: pa.Schema) -> tuple[Column, ...]:
    """Returns the columns of batches for an Arrow schema.

    Raises:
      InputError: batches cannot hold one of the columns.
    """
    found = [column_of(field) for field in schema]
    unusable = [f for f, column in zip(schema, found, strict=True) if column is None]
    if unusable:
        told = (f"column {field.name} of type {field.type}" for field in unusable)
        raise InputError(
            f"Expected {', '.join(told)} to be a fixed-width number or a fixed-size "
            f"list of them. {_PREPARE}; or drop the column."
        )
    return tuple(column for column in found if column is not None)


#: Names of NumPy's types where Arrow has others.
_DTYPES = {
    "bool": "uint8",
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}


def column_of(field: pa.Field) -> Column | None:
    """Returns the column of batches for a field; None if batches cannot hold it."""
    kind, shape = field.type, []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    name = _DTYPES.get(str(kind), str(kind))
    if name not in DTYPES:
        return None
    return Column(name=field.name, dtype=name, shape=tuple(shape))


#: Names of a column of ids; a plain "id" is as often that of a row.
_IDS = re.compile(
    "(user|person|patient|customer|client|member|visitor)([_ -]?id)?|uid", re.IGNORECASE
)


def seems_user_column(columns: Sequence[Column]) -> str | None:
    """Returns the name of a column that seems to hold ids of users; None for none.

    Args:
      columns: Columns of a table, of which only names and types are looked at.
    """
    for column in columns:
        integer = np.issubdtype(column.dtype, np.integer) and not column.shape
        if integer and _IDS.fullmatch(column.name):
            return column.name
    return None


def description_of(schema: pa.Schema, path: str) -> dict[str, Any]:
    """Returns the description in the metadata of files; see ``DATASET_METADATA_KEY``.

    Args:
      schema: Schema of the files.
      path: Path of the files, for messages.

    Raises:
      InputError: the description is no JSON object.
    """
    text = (schema.metadata or {}).get(DATASET_METADATA_KEY, b"{}")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(
            f"Expected the {DATASET_METADATA_KEY.decode()} metadata of {path} to be a "
            "JSON object."
        )
    return value


def _check_nulls(metadata: pq.FileMetaData, path: str) -> None:
    """Refuses nulls that the footer counts."""
    names: dict[str, None] = {}
    for row_group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(row_group).column(index)
            statistics = column.statistics
            if statistics is not None and statistics.null_count:
                names[column.path_in_schema.split(".")[0]] = None
    if names:
        raise with_nulls(names, path)


def _check_one_split(pattern: str) -> None:
    """Refuses all splits together: test rows would be among the training examples."""
    if os.path.isfile(os.path.join(pattern, PREPARED_NAME)):
        raise InputError(
            f"Expected one split of {pattern}, which `dpsgd prepare` wrote. Give "
            f"--input {os.path.join(pattern, 'train')}."
        )


def list_blocks(pattern: str, *, of_numbers: bool = True) -> Dataset:
    """Returns the blocks, columns and description of the input.

    Args:
      pattern: A file, a folder or a glob; see ``input_files.find_files``.
      of_numbers: Whether batches are to be made of it; otherwise columns may be of any
        type, and no note is checked.

    Raises:
      InputError: no rows, unreadable or differing files, unusable columns, or files
        that contradict their note about bounded users.
    """
    _check_one_split(pattern)
    blocks: list[Block] = []
    schema, files, footers = None, dict[str, int](), dict[str, str]()
    for path, name in find_files(pattern):
        with open_listed(path) as file:
            footer = footer_digest_of(file, path)
            parquet = pq.ParquetFile(file)
        schema = schema or parquet.schema_arrow
        if len(set(schema.names)) < len(schema):
            raise InputError(f"Expected columns with different names in {path}.")
        if parquet.schema_arrow != schema:
            raise InputError(
                f"Expected the columns of {path} to equal those of the first file."
            )
        if description_of(parquet.schema_arrow, path) != description_of(schema, path):
            raise InputError(
                f"Expected {path} to be of one table with the first file of --input "
                f"{pattern}; what `dpsgd prepare` noted in them differs."
            )
        if of_numbers:
            _check_nulls(parquet.metadata, path)
        files[name] = parquet.metadata.num_rows
        if parquet.num_row_groups:
            footers[name] = footer
        for group in range(parquet.num_row_groups):
            last = blocks[-1] if blocks else None
            blocks.append(
                Block(
                    label=f"{name}#{group}",
                    path=path,
                    row_group=group,
                    num_rows=parquet.metadata.row_group(group).num_rows,
                    first_row=last.first_row + last.num_rows if last else 0,
                    ordinal=len(blocks),
                )
            )
    if not any(block.num_rows for block in blocks):
        raise InputError(f"Expected rows in --input {pattern}; there are none.")
    assert schema is not None
    dataset = Dataset(
        blocks=tuple(blocks),
        files=files,
        footers=footers,
        columns=numeric_columns(schema) if of_numbers else (),
        description=description_of(schema, pattern),
    )
    if of_numbers and (bounded := dataset.bounded):
        some = {each.path: footers[each.name] for each in blocks if each.num_rows}
        check_bounded(bounded, dataset.num_rows, some, f"--input {pattern}")
    return dataset


def check_bounded(
    bounded: Bounded, num_rows: int, footers: Mapping[str, str], option: str
) -> None:
    """Refuses files that may hold other rows of bounded users than were written.

    Other tools keep the note in what they make of a table; a table may be prepared
    several times, each time with the note of one `dpsgd prepare`.

    Args:
      bounded: How the users are bounded.
      num_rows: Number of rows.
      footers: Path of each file with rows -> its ``footer_digest``.
      option: Flag that gave the files, for messages.

    Raises:
      InputError: there are more rows than the public bound, or the files are of
        several folders, or not as they were written there.
    """
    if num_rows > bounded.num_examples:
        raise InputError(
            f"Expected {option} to hold at most the num_examples="
            f"{bounded.num_examples} rows of `dpsgd prepare`; it holds more."
        )
    found: dict[str, dict[str, str]] = {}
    for path, footer in footers.items():
        real = path if is_remote(path) else os.path.realpath(path)
        folder, _, name = real.rpartition("/")
        found.setdefault(folder, {})[name] = footer
    if len(found) > 1:
        raise InputError(
            "Expected --input to be one folder of rows of users whom `dpsgd prepare` "
            "bounded: rows of several may be the same."
        )
    for folder, files in found.items():
        others = sorted(dict(files.items() - as_written(folder)[0].items()))
        if others:
            raise InputError(
                f"Expected {others[0]} in {folder} to be as `dpsgd prepare` wrote it, "
                f"beside its {PREPARED_NAME}: in a copy, or in what another tool made, "
                "a user may have more rows than its note says."
            )


def values_of(array: pa.Array, column: Column, place: str = "") -> np.ndarray:
    """Returns the array of shape (rows, *column.shape) of an Arrow array.  Sensitive.

    Args:
      array: Rows of a column.
      column: The column.
      place: Where the rows are from, for messages.

    Raises:
      InputError: there are nulls.
    """
    num_rows = len(array)
    while True:
        if array.null_count:
            raise with_nulls([column.name], place)
        if not pa.types.is_fixed_size_list(array.type):
            break
        array = array.flatten()
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    values = array.to_numpy().astype(column.numpy_dtype.base, copy=False)
    return values.reshape((num_rows, *column.shape))


def table_columns(
    table: pa.Table, columns: tuple[Column, ...]
) -> dict[str, np.ndarray]:
    """Returns name -> array of shape (rows, *column.shape).  Sensitive.

    Args:
      table: Rows of a row group.
      columns: The columns to return.

    Raises:
      InputError: a column holds nulls.
    """
    arrays = {}
    for column in columns:
        chunks = table.column(column.name)
        # Of one chunk Arrow would make a copy.
        array = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
        arrays[column.name] = values_of(array, column)
    return arrays


def read_block(
    block: Block, columns: tuple[Column, ...], is_listed: IsListed
) -> dict[str, np.ndarray]:
    """Returns the columns of ``block``, as ``table_columns`` does.  Sensitive.

    Args:
      block: The row group.
      columns: The columns to read.
      is_listed: (block, footer digest) -> whether the file is the one that was listed:
        ``Dataset.is_listed`` or, in a worker, ``KnownInput.is_listed``.

    Raises:
      InputError: the file is missing, damaged, or not the one that was listed, or a
        column holds nulls.
    """
    names = [column.name for column in columns]
    return table_columns(read_table(block, names, is_listed), columns)


def read_table(block: Block, names: Sequence[str], is_listed: IsListed) -> pa.Table:
    """Returns columns of ``block``, of any type, as stored.  Sensitive.

    Args:
      block: The row group.
      names: Names of the columns to read.
      is_listed: As in ``read_block``.

    Raises:
      InputError: the file is missing, damaged, or not the one that was listed.
    """
    with open_listed(block.path) as file:
        if not is_listed(block, footer_digest_of(file, block.path)):
            raise InputError(
                f"Expected input file {block.path} not to change during the job."
            )
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        return parquet.read_row_group(block.row_group, columns=list(names))


#: Another file passes with probability 2**-128.
_TAG_BYTES = 16


@dataclasses.dataclass(frozen=True)
class KnownInput:
    """The digests that are sent to the workers.  Public.

    Attributes:
      input_id: Commitment to the sampling key and the digest of the input.
      tags: Keyed digests: first one that identifies the key; then, for each block,
        that of the footer of its file.
    """

    input_id: str
    tags: bytes = dataclasses.field(repr=False)

    def data_set_key(self, sampling_key: bytes) -> bytes:
        """Returns the key from which all choices for this data set derive.  Secret.

        Raises:
          InputError: the sampling key is not that of the job.
        """
        key = derive(sampling_key, "data set", self.input_id)
        if self.tags[:_TAG_BYTES] != _tag(key, "key"):
            raise InputError(
                "Expected the key file of this worker to hold the key of this job."
            )
        return key

    def is_listed(self, data_set_key: bytes, block: Block, footer: str) -> bool:
        """Returns whether the file of a block is the one that was listed.

        Args:
          data_set_key: From ``KnownInput.data_set_key``.
          block: Block of the data set.
          footer: Current ``footer_digest`` of its file.
        """
        start = (1 + block.ordinal) * _TAG_BYTES
        listed = self.tags[start : start + _TAG_BYTES]
        return listed == _footer_tag(data_set_key, block, footer)


def know_input(sampling_key: bytes, dataset: Dataset) -> KnownInput:
    """Returns the keyed digests that workers need of a data set.

    Args:
      sampling_key: Secret, 32 bytes.
      dataset: From ``list_blocks``.
    """
    input_id = commitment(sampling_key, "input", dataset.digest)
    key = derive(sampling_key, "data set", input_id)
    footers = dataset.footers
    listed = (_footer_tag(key, block, footers[block.name]) for block in dataset.blocks)
    return KnownInput(input_id, b"".join([_tag(key, "key"), *listed]))


def _tag(data_set_key: bytes, *labels: str | int) -> bytes:
    return derive(data_set_key, "tag", *labels)[:_TAG_BYTES]


def _footer_tag(data_set_key: bytes, block: Block, footer: str) -> bytes:
    return _tag(data_set_key, "footer", block.ordinal, footer)
