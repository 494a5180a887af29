"""NumPy arrays whose memory TensorFlow can read in place; see ``tensor_memory``.

Formal guarantees:
  - The values of an array begin at a multiple of ``ALIGNMENT`` bytes.

Public: shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

#: TensorFlow assumes that a tensor's values begin at a multiple of this many bytes.
ALIGNMENT = 64


def aligned(
    shape: Sequence[int], make: Callable[..., np.ndarray] = np.empty
) -> np.ndarray:
    """Returns an int64 array whose memory a tensor can share.

    Args:
      shape: Shape of the array.
      make: (number of values, dtype) -> array of one dimension, such as ``np.zeros``.
    """
    size = int(np.prod(shape, dtype=np.int64))
    values = make(size + ALIGNMENT // 8, np.int64)
    return values[-values.ctypes.data % ALIGNMENT // 8 :][:size].reshape(shape)
