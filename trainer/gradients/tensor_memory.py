"""Arrays of NumPy and tensors in the same memory.

Noise and waiting integers are as large as the model: a copy takes a third of the time
in which they are drawn.

Formal guarantees:
  - A tensor has the values of its array, in its memory only where TensorFlow can read
    it there; it writes to no array.

Sensitive: what is in the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainer.tf_compat import tf

#: Bytes of which TensorFlow takes the address of a tensor's values to be a multiple.
_ALIGNMENT = 64


def aligned(
    shape: Sequence[int], make: Callable[..., np.ndarray] = np.empty
) -> np.ndarray:
    """Returns int64 values that ``tensor`` need not copy.

    Args:
      shape: Of the values.
      make: Takes a number of values, and a type.
    """
    size = int(np.prod(shape, dtype=np.int64))
    values = make(size + _ALIGNMENT // 8, np.int64)
    return values[-values.ctypes.data % _ALIGNMENT // 8 :][:size].reshape(shape)


def tensor(values: np.ndarray) -> Any:
    """Returns a tensor of an array, which may not be changed from then on."""
    flags = values.flags
    if values.ctypes.data % _ALIGNMENT or not (flags.c_contiguous and flags.writeable):
        return tf.convert_to_tensor(values)
    return tf.experimental.dlpack.from_dlpack(values.__dlpack__())


def array(value: Any) -> np.ndarray:
    """Returns an array of a tensor that is not in a graph; it can only be read."""
    return np.asarray(memoryview(value))
