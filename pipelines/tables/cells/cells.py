"""Cells of one column of a block, without the encodings of its file.

Arrow parses numbers and dates; a block that it refuses is halved until the malformed
cells are found.  Spaces around a text are ignored in every format, as files of text
need it.

Sensitive: everything but names and reasons.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accounting.core.validation import InputError
from pipelines.inputs.type_kinds import is_list, is_text


class Cells:
    """One column of a block.

    Args:
      name: Name of the column.
      array: Values as in the file.
      missing_values: Texts that stand for null.
      faults: (whether each row is malformed, reason), to which faults are appended.
    """

    def __init__(
        self,
        name: str,
        array: pa.Array,
        missing_values: Sequence[str],
        faults: list[tuple[np.ndarray, str]],
    ) -> None:
        self.name, self._faults = name, faults
        self.missing_values = tuple(missing_values)
        self.array = self._plain(array)

    def _plain(self, array: pa.Array) -> pa.Array:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        kind = array.type
        if not is_text(kind):
            return array
        if kind != pa.large_string():
            array = array.cast(pa.large_string())
        array = pc.ascii_trim_whitespace(array)
        listed = pa.array(self.missing_values, pa.large_string())
        missing = pc.is_in(array, value_set=listed)
        return pc.if_else(missing, pa.scalar(None, array.type), array)

    def of(self, array: pa.Array) -> Cells:
        """Returns other cells of the same column, such as those of its lists."""
        return Cells(self.name, array, self.missing_values, self._faults)

    def __len__(self) -> int:
        return len(self.array)

    @functools.cached_property
    def missing(self) -> np.ndarray:
        """Which cells are null."""
        return nulls(self.array)

    def fault(self, rows: np.ndarray, reason: str) -> None:
        """Reports malformed rows.

        Args:
          rows: Whether each row is malformed, bool of shape (rows,).
          reason: Predicate of the cell, for messages.
        """
        if rows.any():
            self._faults.append((rows, f"{self.name} {reason}"))


def nulls(array: pa.Array) -> np.ndarray:
    """Returns which values are null."""
    found: np.ndarray = array.is_null().to_numpy(zero_copy_only=False)
    return found


def cast(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, np.ndarray]:
    """Returns values as ``kind``, null where they are malformed, and which are.

    Args:
      array: Cells.
      kind: Type of the result.
    """
    try:
        return array.cast(kind), np.zeros(len(array), bool)
    except pa.ArrowException:  # its message quotes a cell
        pass
    if len(array) == 1:
        return pa.nulls(1, kind), np.ones(1, bool)
    middle = len(array) // 2
    parts = [cast(array[:middle], kind), cast(array[middle:], kind)]
    values = pa.concat_arrays([part[0] for part in parts])
    return values, np.concatenate([part[1] for part in parts])


@contextlib.contextmanager
def plain_errors(
    name: str, remedy: str = 'kind = "drop" in the schema'
) -> Iterator[None]:
    """Raises Arrow's errors without their text, which may quote a cell.

    Args:
      name: Name of the column.
      remedy: What to write where the file is right.
    """
    try:
        yield
    except pa.ArrowException as error:
        raise InputError(
            f"Expected the cells of column {name} to be of the type that their file "
            f"says, and texts to be UTF-8: {type(error).__name__}. Write it again, or "
            f"{remedy}."
        ) from None


def elements(
    cells: Cells, separator: str
) -> tuple[Cells, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the elements of lists, and where those of each row start and end.

    Args:
      cells: Lists, also nested, or texts.
      separator: Separator of the elements of a text.

    Returns:
      The elements of all rows; the offsets of the first and after the last element of
      each row, int64 of shape (rows,); and which rows are missing.
    """
    array, absent = cells.array, cells.missing
    if is_text(array.type):
        array = pc.split_pattern(pc.fill_null(array, ""), separator)
    starts = np.arange(len(array), dtype=np.int64)
    ends = starts + 1
    while is_list(array.type):
        inner = _offsets(array)
        starts, ends = inner[starts], inner[ends]
        array = array.flatten()
    return cells.of(array), starts, ends, absent


def _offsets(lists: pa.Array) -> np.ndarray:
    """Returns the offsets of lists among the elements of ``flatten``, and the end."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    return np.concatenate(
        [[0], np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)]
    )


def any_of_row(bad: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns which rows have a bad element.

    Args:
      bad: Whether each element is bad.
      starts, ends: From ``elements``.
    """
    total = np.concatenate([[0], np.cumsum(bad)])
    rows: np.ndarray = total[ends] > total[starts]
    return rows


def padded(
    values: np.ndarray, starts: np.ndarray, ends: np.ndarray, length: int
) -> np.ndarray:
    """Returns lists truncated or padded with 0, of shape (rows, length).

    Args:
      values: Value of each element.
      starts, ends: From ``elements``.
      length: Number of elements per row.
    """
    place = np.arange(length)
    present = place < (ends - starts)[:, None]
    found = np.zeros((len(starts), length), values.dtype)
    found[present] = values[(starts[:, None] + place)[present]]
    return found
