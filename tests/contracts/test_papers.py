"""What the page about the papers names: commands that parse, files that exist."""

from __future__ import annotations

import shlex

import click
import pytest

from dpsgd.command_line import cli
from tests.contracts.test_readme import ROOT, blocks

PAGE = ROOT / "docs" / "papers.md"
COMMANDS = [
    line
    for block in blocks(PAGE)
    if block.language == "sh"
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.startswith("dpsgd ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_parses(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    command.make_context(name, arguments)  # raises for what the command refuses
