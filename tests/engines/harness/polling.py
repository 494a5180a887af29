"""Waiting for something to be so, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from accounting.validation import InputError

_Value = TypeVar("_Value")
#: Between two looks.
_SECONDS = 0.1


def wait_for(
    what: str, condition: Callable[[], _Value | None], seconds: float = 120
) -> _Value:
    """Returns the first value of ``condition`` that is true.

    Args:
      what: What is waited for, for the error.
      condition: Looked at again and again.
      seconds: The longest wait.

    Raises:
      InputError: it did not become true.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise InputError(f"Expected {what} within {seconds:.0f} seconds.")
        time.sleep(_SECONDS)
    return value
