"""The rows of a data set: its files, their row groups, and the bytes of a row.

`DataSet.read` returns every row of a row group once, in order, bit for bit as stored,
or raises.  `DataSet.digest` changes with any name, number of rows or footer.  No error
holds a value.

Public: names, columns.  Sensitive: rows, footers and, if users are bounded, numbers of
rows.

References:
  Parquet's footer: parquet.apache.org/docs/file-format.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import Column
from pipelines.core.choices import BlockSpan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroup(BlockSpan):
    """A row group of a file.

    Attributes:
      path: Path of the file.
      row_group: Number of the row group.
    """

    path: str
    row_group: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """The row groups of some files.

    Attributes:
      blocks: Row groups, in the order of files and numbers.
      digest: SHA-256 over names, numbers of rows and footers.  Sensitive.
      open_file: Path -> open file.
    """

    blocks: tuple[RowGroup, ...]
    digest: str = dataclasses.field(repr=False)
    open_file: Callable[[str], Any] = dataclasses.field(repr=False)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(block.num_rows for block in self.blocks)

    def read(self, block: RowGroup, columns: Sequence[Column]) -> list[np.ndarray]:
        """Returns the bytes of the columns: uint8, shape (rows, bytes).  Sensitive.

        Args:
          block: The rows.
          columns: The columns, in the order of the result.

        Raises:
          InputError: the file is damaged, or a column has nulls or another type.
        """
        names = [column.name for column in columns]
        try:
            with self.open_file(block.path) as file:
                parquet = pq.ParquetFile(file, page_checksum_verification=True)
                table = parquet.read_row_group(block.row_group, columns=names)
            return [_bytes(table.column(each.name), each) for each in columns]
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"Expected {block.path} to hold the columns of the batches, intact and "
                f"without nulls: {type(error).__name__}. Give the input of the job."
            ) from None


def list_blocks(
    files: Sequence[tuple[str, str]], open_file: Callable[[str], Any] = pa.OSFile
) -> DataSet:
    """Returns the row groups of files.

    Args:
      files: (name relative to the input, path) of each file, in the order of names.
      open_file: Path -> open file.

    Raises:
      InputError: a name occurs twice, or a file is not Parquet.
    """
    names = [name for name, _ in files]
    if names != sorted(set(names)):
        raise InputError("Expected each file of the input once, in the order of names.")
    blocks, lines, first = list[RowGroup](), list[str](), 0
    for name, path in files:
        try:
            with open_file(path) as file:
                sizes, footer = _row_groups(file)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InputError(
                f"Expected {path} to be a Parquet file: {type(error).__name__}."
            ) from None
        for group, size in enumerate(sizes):
            label = f"{name}#{group}"
            blocks.append(
                RowGroup(label=label, num_rows=size, first_row=first, path=path,
                      row_group=group)
            )  # fmt: skip
            lines.append(f"{label} {size} {footer}\n")
            first += size
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return DataSet(blocks=tuple(blocks), digest=digest, open_file=open_file)


def _row_groups(file: Any) -> tuple[list[int], str]:
    """Returns the rows of each row group, and the SHA-256 of file size and footer."""
    size = file.seek(0, 2) or file.tell()
    file.seek(size - 8)
    length = int.from_bytes(file.read(4), "little") + 8
    file.seek(size - length)
    footer = hashlib.sha256(size.to_bytes(8, "little") + file.read(length)).hexdigest()
    file.seek(0)
    metadata = pq.ParquetFile(file).metadata
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return [group.num_rows for group in groups], footer


def _bytes(cells: pa.ChunkedArray, column: Column) -> np.ndarray:
    """Returns the little-endian bytes of a column: uint8, shape (rows, bytes)."""
    array, shape = cells.combine_chunks(), []
    num_rows = len(array)
    while not array.null_count and pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    if array.null_count or tuple(shape) != column.shape:
        raise ValueError("nulls, or another shape")
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    dtype = column.numpy_dtype.base
    values = array.to_numpy(zero_copy_only=False).astype(dtype, casting="equiv")
    return np.ascontiguousarray(values).view(np.uint8).reshape(num_rows, -1)
