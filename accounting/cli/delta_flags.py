"""``--delta`` of every command that takes one, and what is said of a large one.

Formal guarantees:
  - A delta out of range is refused while flags are parsed, before any work.
  - A warning goes to standard error, so that a pipe gets results alone.

Public: everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from accounting import deltas

_ALLOW = "allow_large_delta"


def options(
    *, text: str, required: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds ``--delta`` and the flag that allows a large one.

    Args:
      text: Help of ``--delta``.
      required: Whether the command needs it.
    """
    delta = click.option(
        "--delta", type=float, required=required, callback=_check, help=text
    )
    allow = click.option(
        "--allow-large-delta",
        _ALLOW,
        is_flag=True,
        is_eager=True,  # parsed before --delta, wherever it stands
        help=f"Accept a delta of {deltas.LARGEST_DELTA} or more, which protects next "
        "to nothing.",
    )
    return lambda command: delta(allow(command))


def arguments(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the arguments that hand the delta of a command on to another one."""
    if flags["delta"] is None:
        return ()
    return (f"--delta={flags['delta']!r}", *allowance(flags))


def allowance(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the flag that allows a large delta, if the user gave it."""
    return ("--allow-large-delta",) if flags[_ALLOW] else ()


def warn(delta: float | None, num_examples: int) -> None:
    """Prints a line where a claim at ``delta`` protects next to nothing.

    Args:
      delta: Of the claim; None if the user gave none.
      num_examples: Slots of the data set.
    """
    if line := deltas.warning(delta, num_examples):
        click.echo(line, err=True)


def _check(
    ctx: click.Context, parameter: click.Parameter, value: float | None
) -> float | None:
    del parameter  # there is one
    if value is not None:
        deltas.check(value, allow_large=ctx.params[_ALLOW])
    return value
