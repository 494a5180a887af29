"""Flags whose values are what is registered when the command runs.

Public: everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from accounting import sampler_registry


class Registered(click.ParamType):
    """One of the names in a registry, those from outside included.

    Args:
      names: Returns the names, at any time.
    """

    name = "choice"

    def __init__(self, names: Callable[[], tuple[str, ...]]) -> None:
        self._names = names

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Returns the names as the help shows them."""
        return click.Choice(self._names()).get_metavar(param, ctx)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Returns a name that is registered, or ends with click's error."""
        return click.Choice(self._names()).convert(value, param, ctx)


SAMPLER = Registered(sampler_registry.names)
