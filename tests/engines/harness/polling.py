"""Polls until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from accounting.core.validation import InputError

_Value = TypeVar("_Value")
#: Between two polls.
_SECONDS = 0.1


def wait_for(
    what: str, condition: Callable[[], _Value | None], seconds: float = 120
) -> _Value:
    """Returns the first true value of ``condition``.

    Args:
      what: Names the condition in the error.
      condition: Called until its value is true.
      seconds: The timeout.

    Raises:
      InputError: it was not true in time.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise InputError(f"Expected {what} within {seconds:.0f} seconds.")
        time.sleep(_SECONDS)
    return value
