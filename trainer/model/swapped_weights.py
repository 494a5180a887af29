"""Other weights in a model for a while, as those of an average.

Formal guarantees:
  - After ``weights_of`` the variables have their old values, bit for bit, also after an
    exception.
  - ``unchanged`` raises if a variable changed, and then restores all.

Public: the values, if the weights are public.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from accounting.core.validation import InputError


@contextlib.contextmanager
def unchanged(variables: Sequence[Any], what: str) -> Iterator[None]:
    """Checks that no state changes within a context; otherwise restores variables.

    Args:
      variables: TensorFlow variables.
      what: What runs in the context, in words.

    Raises:
      InputError: a variable changed.
    """

    before = [variable.numpy() for variable in variables]
    yield
    after = [variable.numpy() for variable in variables]
    if any(a.tobytes() != b.tobytes() for a, b in zip(before, after, strict=True)):
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        raise InputError(
            f"Expected {what} to change no variable of the model: it would hold values "
            "of rows without noise. Remove the assignment."
        )


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
