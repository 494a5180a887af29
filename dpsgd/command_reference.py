"""The reference of the command line as Markdown, made from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from accounting.cli.command import options_by_group
from dpsgd.command_line import COMMANDS, function_of


def reference() -> str:
    """Returns a section for each command: what it does, and its options by group."""
    return "\n\n".join(part for name in COMMANDS for part in _section(name))


def _section(name: str) -> Iterator[str]:
    function = function_of(name)
    yield f"## dpsgd {name}"
    text = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0]
    for paragraph in text.split("\n\n"):
        first, *lines = paragraph.split("\n")
        if first.startswith("For example"):
            yield "```text\n" + inspect.cleandoc("\n".join(["", *lines])) + "\n```"
        else:
            yield _escaped(paragraph)
    for group, options in options_by_group(function).items():
        yield f"**{group}**"
        yield "\n".join(f"- `{names}`: {_escaped(text)}" for names, text in options)


def _escaped(text: str) -> str:
    """Returns text that Markdown shows as it is, except for code."""
    return re.sub(r"(?<!`)([*_<\[\]])", r"\\\1", text)
