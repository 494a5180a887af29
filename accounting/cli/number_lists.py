"""Flags whose value is a list of numbers, separated by commas.

Public: everything.
"""

from __future__ import annotations

from typing import Any

import click


class NumberList(click.ParamType):
    """Numbers separated by commas, as a tuple.

    Args:
      number: Type of one number: int or float.
      example: A valid text, for the error message.
    """

    name = "numbers"

    def __init__(self, number: type, *, example: str) -> None:
        self._number = number
        self._example = example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Returns the numbers: see `click.ParamType.convert`."""
        if not isinstance(value, str):
            return value
        try:
            return tuple(self._number(part) for part in value.split(","))
        except ValueError:
            kind = "integers" if self._number is int else "numbers"
            text = f"{value!r} is no list of {kind} such as {self._example}."
            self.fail(text, param, ctx)
