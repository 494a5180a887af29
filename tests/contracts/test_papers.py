"""What the page about the papers names: commands that parse, files that exist."""

from __future__ import annotations

import shlex

import pytest

from accounting.cli.command import parse
from dpsgd.command_line import function_of
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
    parse(function_of(name), arguments)  # raises for what the command refuses
