"""Arrays of NumPy that TensorFlow can read where they are; see ``tensor_memory``.

Formal guarantees:
  - The values of an array begin at a multiple of ``ALIGNMENT`` bytes.

Public: shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

#: Bytes of which TensorFlow takes the address of a tensor's values to be a multiple.
ALIGNMENT = 64


def aligned(
    shape: Sequence[int], make: Callable[..., np.ndarray] = np.empty
) -> np.ndarray:
    """Returns int64 values that a tensor can share.

    Args:
      shape: Of the values.
      make: Takes a number of values, and a type.
    """
    size = int(np.prod(shape, dtype=np.int64))
    values = make(size + ALIGNMENT // 8, np.int64)
    return values[-values.ctypes.data % ALIGNMENT // 8 :][:size].reshape(shape)
