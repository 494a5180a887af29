"""Variables with other values for a while.

Formal guarantees:
  - Afterwards the variables are bit for bit what they were, also after an exception.

Public: everything here, of weights that are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def weights_of(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """Puts ``values`` in the place of the variables for a while.

    Args:
      variables: TensorFlow variables.
      values: An array or tensor of the shape of each.
    """
    saved = [variable.numpy() for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        yield
    finally:
        for variable, value in zip(variables, saved, strict=True):
            variable.assign(value)
