"""Options in groups in ``--help``: what must be given, privacy, the rest, output.

Public: everything.
"""

from __future__ import annotations

from typing import Any

import click

REQUIRED = "Must be given"
PRIVACY = "Privacy"
OTHERS = "Options"
OUTPUT = "Output"

#: Settings of a command that hands unknown options on.
PASSES_ON = {"ignore_unknown_options": True, "allow_extra_args": True}

#: Options that many commands have.
_GROUPS = {
    PRIVACY: (
        "allow-large-delta", "canary-rows", "data-is-public", "delta", "epsilon",
        "key-file", "l2-norm-clip", "max-examples-per-user", "noise",
        "noise-key-file", "noise-multiplier", "num-users", "relation", "sample",
        "user-column",
    ),
    OUTPUT: ("force", "help", "json", "out", "plot", "title"),
}  # fmt: skip


class Option(click.Option):
    """An option that says in which group of the help it stands."""

    def __init__(self, *args: Any, group: str | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group


class Grouped(click.Command):
    """A command whose help has its options in groups."""

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Writes the options of each group: see `click.Command.format_options`."""
        for name, records in grouped(self, ctx):
            with formatter.section(name):
                formatter.write_dl(records)


def grouped(
    command: click.Command, ctx: click.Context
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns the groups of options, each option with its help.

    Args:
      command: A command.
      ctx: Its context.
    """
    groups: dict[str, list[tuple[str, str]]] = {REQUIRED: [], PRIVACY: []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record and isinstance(param, click.Option):
            groups.setdefault(_group_of(param), []).append(record)
    last = {name: groups.pop(name, []) for name in (OTHERS, OUTPUT)}
    return [(name, found) for name, found in {**groups, **last}.items() if found]


def _group_of(param: click.Parameter) -> str:
    if param.required:
        return REQUIRED
    if isinstance(param, Option) and param.group is not None:
        return param.group
    names = {name.strip("-") for name in param.opts}
    found = (group for group, known in _GROUPS.items() if names & set(known))
    return next(found, OTHERS)
