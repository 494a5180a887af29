"""Temporary values of variables.

Formal guarantees:
  - Afterwards the variables have their old values, bit for bit, also after an
    exception.

Public: the values, if the weights are public.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def weights_of(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """Sets variables to ``values`` within a context.

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
