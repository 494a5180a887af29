"""Sizes in bytes, as users write them."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class ByteSize(click.ParamType):
    """A number of bytes such as 2GiB, 512MiB or 1000000."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Returns the number of bytes.

        Args:
          value: As typed, or the default.
          param: The click parameter.
          ctx: The click context, for the error.
        """
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", str(value).lower())
        if not match:
            self.fail(f"{value!r} is not a size such as 2GiB.", param, ctx)
        return int(float(match[1]) * _UNITS[match[2]])
