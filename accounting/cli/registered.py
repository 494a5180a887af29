"""Flags whose values are the names in a registry when the command runs.

Public: everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from accounting.core import sampler_registry


class Registered(click.ParamType):
    """A name in a registry, which users may have extended.

    Args:
      names: Returns the current names.
    """

    name = "choice"

    def __init__(self, names: Callable[[], tuple[str, ...]]) -> None:
        self._names = names

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Returns the names for the help: see `click.ParamType.get_metavar`."""
        return click.Choice(self._names()).get_metavar(param, ctx)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Returns a name that is registered: see `click.ParamType.convert`."""
        return click.Choice(self._names()).convert(value, param, ctx)


SAMPLER = Registered(sampler_registry.names)


def sampler(text: str, *names: str, **more: Any) -> Callable[..., Any]:
    """Returns a decorator that adds ``--sampler``.

    Args:
      text: Help of the flag.
      *names: Names of the parameter; ``sampler`` if none.
      **more: Further arguments of `click.option`.
    """
    return click.option("--sampler", *names, help=text, **{"type": SAMPLER, **more})
