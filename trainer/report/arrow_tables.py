"""Arrays as columns of an Arrow table: numbers, or fixed-size lists of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa


def as_table(arrays: Mapping[str, np.ndarray]) -> pa.Table:
    """Returns arrays (rows, ...) as columns; those of shape (rows, 1) as numbers."""
    return pa.table({name: _as_column(value) for name, value in arrays.items()})


def _as_column(values: np.ndarray) -> pa.Array:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    column = pa.array(np.ravel(values))
    for size in values.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
