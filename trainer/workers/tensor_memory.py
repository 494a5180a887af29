"""Arrays of NumPy and tensors in the same memory.

Noise and waiting integers are as large as the model: a copy takes a third of the time
in which they are drawn.

Formal guarantees:
  - A tensor has the values of its array, in its memory only where TensorFlow can read
    it there; it writes to no array.

Sensitive: what is in the memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.tf_compat import tf
from trainer.workers.aligned_arrays import ALIGNMENT


def tensor(values: np.ndarray) -> Any:
    """Returns a tensor of an array, which may not be changed from then on."""
    flags = values.flags
    if values.ctypes.data % ALIGNMENT or not (flags.c_contiguous and flags.writeable):
        return tf.convert_to_tensor(values)
    return tf.experimental.dlpack.from_dlpack(values.__dlpack__())


def array(value: Any) -> np.ndarray:
    """Returns an array of a tensor that is not in a graph; it can only be read."""
    return np.asarray(memoryview(value))
