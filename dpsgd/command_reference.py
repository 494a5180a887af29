"""The reference of the command line as Markdown, made from what ``--help`` says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

from accounting.cli.grouped import grouped
from dpsgd.command_line import cli


def reference() -> str:
    """Returns a section for each command: what it does, and its options by group."""
    with click.Context(cli, info_name="dpsgd") as ctx:
        return "\n\n".join(
            part
            for name in cli.list_commands(ctx)
            if (command := cli.get_command(ctx, name)) is not None
            for part in _section(name, command, ctx)
        )


def _section(name: str, command: click.Command, parent: click.Context) -> Iterator[str]:
    ctx = click.Context(command, info_name=name, parent=parent)
    yield f"## dpsgd {name}"
    yield f"`{' '.join([ctx.command_path, *command.collect_usage_pieces(ctx)])}`"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        kept = paragraph.removeprefix("\b\n")
        yield f"```text\n{kept}\n```" if kept != paragraph else _escaped(paragraph)
    for group, records in grouped(command, ctx):
        yield f"**{group}**"
        yield "\n".join(f"- `{flag}`: {_escaped(text)}" for flag, text in records)


def _escaped(text: str) -> str:
    """Returns text that Markdown shows as it is, except for code."""
    return re.sub(r"(?<!`)([*_<\[\]])", r"\\\1", text)
