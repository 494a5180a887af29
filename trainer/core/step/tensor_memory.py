"""NumPy arrays and tensors that share memory.

Noise and sums that wait in lazy tables are as large as the model; copying them takes a
third of the time of drawing the noise.

Formal guarantees:
  - A tensor has the values of its array, and shares its memory only if TensorFlow can
    read it in place; it never writes to the array.

Sensitive: the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.core.step.aligned_arrays import ALIGNMENT
from trainer.core.tf_compat import tf


def tensor(values: np.ndarray) -> Any:
    """Returns a tensor with the values of an array, which must not change any more."""
    flags = values.flags
    if values.ctypes.data % ALIGNMENT or not (flags.c_contiguous and flags.writeable):
        return tf.convert_to_tensor(values)
    return tf.experimental.dlpack.from_dlpack(values.__dlpack__())


def array(value: Any) -> np.ndarray:
    """Returns a read-only array that shares the memory of an eager tensor."""
    return np.asarray(memoryview(value))
