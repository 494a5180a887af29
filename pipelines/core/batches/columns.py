"""The columns of a record, and its length in bytes.

Formal guarantees:
  - ``check_record`` accepts no record that ``decode_batch`` could not read.

All public.

References:
  The largest message: protobuf.dev/programming-guides/proto-limits, 2 GiB.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from accounting.core.validation import InputError, check_choice

DTYPES = (
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
RESERVED_NAMES = ("weight", "step", "part")

#: The longest message that a reader of protocol buffers accepts.
MOST_RECORD_BYTES = (1 << 31) - 1
#: Upper bounds on the tags and lengths of a feature (six of at most 6 bytes), and on
#: the features step and part.
_FEATURE_BYTES, _STEP_BYTES = 40, 80
_WEIGHT_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """Name, NumPy type and per-example shape of one column.  All public.

    Raises:
      InputError: a dtype that is not in ``DTYPES``, a reserved name, or an example that
        is longer than a record.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice(f"dtype of column {self.name}", self.dtype, DTYPES)
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.name in RESERVED_NAMES:
            raise InputError(
                f"Expected column name={self.name!r} not to be one of "
                f"{', '.join(RESERVED_NAMES)}. Rename the column."
            )
        size = np.dtype(self.dtype).itemsize * math.prod(self.shape)
        if size > MOST_RECORD_BYTES:
            raise InputError(
                f"Expected column {self.name} to hold at most {MOST_RECORD_BYTES} "
                f"bytes in a row; it holds {size}. Split it, or drop it."
            )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Little-endian dtype of one example, a sub-array dtype if it has a shape."""
        scalar = np.dtype(self.dtype).newbyteorder("<")
        return np.dtype((scalar, self.shape)) if self.shape else scalar

    @property
    def num_bytes(self) -> int:
        """Bytes of one example."""
        return self.numpy_dtype.itemsize


def row_bytes(columns: Sequence[Column]) -> int:
    """Returns the bytes of one row of ``columns``."""
    return sum(column.num_bytes for column in columns)


def record_bytes(columns: Sequence[Column], physical_batch_size: int) -> int:
    """Returns a tight upper bound on the bytes of a record.

    Args:
      columns: Columns of the record.
      physical_batch_size: Number of rows of the record, real and padding.
    """
    names = [*(column.name for column in columns), "weight"]
    framing = sum(len(name.encode()) + _FEATURE_BYTES for name in names) + _STEP_BYTES
    return physical_batch_size * (row_bytes(columns) + _WEIGHT_BYTES) + framing


def check_record(columns: Sequence[Column], physical_batch_size: int) -> None:
    """Refuses records that are too long to be read; arguments as for ``record_bytes``.

    Raises:
      InputError: the largest size that would fit.
    """
    size = record_bytes(columns, physical_batch_size)
    if size <= MOST_RECORD_BYTES:
        return
    row = row_bytes(columns) + _WEIGHT_BYTES
    most = (MOST_RECORD_BYTES - record_bytes(columns, 0)) // row
    if most < 1:
        raise InputError(
            f"Expected one row, of {row} bytes, to fit into a record of at most "
            f"{MOST_RECORD_BYTES}. Drop or split columns."
        )
    raise InputError(
        f"Expected physical_batch_size={physical_batch_size} to make records of at "
        f"most {MOST_RECORD_BYTES} bytes, which can be read; at {row} bytes a row they "
        f"have {size}. Make the batches with --physical-batch-size {most} or less."
    )
