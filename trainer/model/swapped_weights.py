"""Temporary values of variables.

Formal guarantees:
  - After ``weights_of`` the variables have their old values, bit for bit, also after an
    exception.
  - ``unchanged`` raises if a variable or a table changed, and then restores variables.

Public: the values, if the weights are public.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from accounting.core.validation import InputError


@contextlib.contextmanager
def unchanged(variables: Sequence[Any], captured: Any, what: str) -> Iterator[None]:
    """Checks that no state changes within a context; otherwise restores variables.

    Args:
      variables: TensorFlow variables.
      captured: ``CapturedState`` of a step, whose lookup tables count, too.
      what: What runs in the context, in words.

    Raises:
      InputError: a variable or a table changed.
    """

    def found() -> list[Any]:
        values = [variable.numpy() for variable in variables]
        return [*(value.tobytes() for value in values), captured.tables(), values]

    *state, before = found()
    yield
    *after, _ = found()
    if state != after:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        raise InputError(
            f"Expected {what} to change no variable of the model, and no lookup table "
            "that a step reads: it would hold values of rows without noise. Remove the "
            "assignment."
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
