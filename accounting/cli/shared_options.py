"""Flags that several commands share, each declared once.

A command gives a flag its help; name and type are the same everywhere.  The flags that
all commands of many runs share are in ``trainer.cli.experiments.experiment_flags``.

Formal guarantees:
  - A delta out of range is refused while flags are parsed, before any work.
  - A warning goes to standard error, so that a pipe gets only results.

Public: everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from accounting.cli import paths
from accounting.cli.byte_size import ByteSize
from accounting.core import deltas, neighboring_relation
from accounting.core.plan import AUTO_BANDS
from accounting.core.validation import InputError

_ALLOW = "allow_large_delta"

#: Adds a flag to a command.
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _declared(flag: str, **declaration: Any) -> Callable[..., Decorator]:
    """Returns a function that declares a flag with a command's help and additions."""

    def option(text: str, *names: str, **more: Any) -> Decorator:
        return click.option(flag, *names, help=text, **{**declaration, **more})

    return option


def together(*options: Decorator) -> Decorator:
    """Returns a decorator that adds several flags, in their order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _cap(ctx: click.Context, parameter: click.Parameter, text: str) -> int | None:
    """Returns the cap on the examples of a step; None for "auto"."""
    del ctx
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise InputError(
            f"Expected {parameter.name}={text!r} to be 'auto' or an integer. Use "
            "auto for the least cap of negligible privacy cost."
        ) from None


def _bands(
    ctx: click.Context, parameter: click.Parameter, text: str | None
) -> int | str | None:
    """Returns a number of bands, "auto" or None."""
    del ctx
    try:
        return text if text in (None, AUTO_BANDS) else int(text)
    except ValueError:
        raise InputError(
            f"Expected {parameter.name}={text!r} to be 'auto' or an integer. Use "
            "auto for the number by the rule, or 1 for independent noise."
        ) from None


num_examples = _declared("--num-examples", type=int)
batch_size = _declared("--batch-size", type=int)
epochs = _declared("--epochs", type=int)
num_steps = _declared("--num-steps", type=int)
truncated_batch_size = _declared(
    "--truncated-batch-size", default="auto", show_default=True, callback=_cap
)
bands = _declared("--bands", type=int)
bands_or_auto = _declared("--bands", metavar="K|auto", callback=_bands)
epsilon = _declared("--epsilon", type=float)
noise_multiplier = _declared("--noise-multiplier", type=float)
l2_norm_clip = _declared("--l2-norm-clip", type=float)
of_runs = _declared("--of-runs", type=int, default=1, show_default=True)
relation = _declared(
    "--relation",
    type=click.Choice(neighboring_relation.RELATIONS, case_sensitive=False),
)
max_examples_per_user = _declared("--max-examples-per-user", type=int)
user_column = _declared("--user-column")
sampled = _declared("--sample", type=click.Choice(["rows", "users"]))
key_file = _declared("--key-file", type=paths.TEXT)
memory_limit = _declared("--memory-limit", type=ByteSize())
threads = click.option(
    "--threads", type=int, help="Threads of this process.  [default: all cores]"
)
runner = click.option(
    "--runner",
    help="Apache Beam runner, to which all other options go; it writes the same "
    "bytes.  Its workers must reach input, output and key under the same paths.  "
    "[default: this process]",
)
plot = _declared("--plot", type=paths.PATH)
as_json = click.option(
    "--json", "as_json", is_flag=True, help="JSON on standard output."
)


def delta(text: str, *, required: bool = False) -> Decorator:
    """Returns a decorator that adds ``--delta`` and ``--allow-large-delta``.

    Args:
      text: Help of ``--delta``.
      required: Whether the command requires ``--delta``.
    """
    option = click.option(
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
    return lambda command: option(allow(command))


def arguments(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the arguments that pass a command's delta on to another command."""
    if flags["delta"] is None:
        return ()
    return (f"--delta={flags['delta']!r}", *allowance(flags))


def allowance(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the flag that allows a large delta, if the user gave it."""
    return ("--allow-large-delta",) if flags[_ALLOW] else ()


def warn(delta: float | None, num_examples: int) -> None:
    """Prints a warning if ``delta`` is at least ``1 / num_examples``.

    Args:
      delta: The delta of the claim; None if the user gave none.
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
