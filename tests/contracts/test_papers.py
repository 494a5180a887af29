"""What the page about the papers names: commands that parse, files that exist."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from dpsgd.command_line import cli
from tests.contracts.test_readme import ROOT, blocks

PAGE = ROOT / "docs" / "papers.md"
TEXT = PAGE.read_text()
COMMANDS = [
    line
    for block in blocks(PAGE)
    if block.language == "sh"
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.startswith("dpsgd ")
]
#: In the running text: `dpsgd train --method bam`.
SHORT = sorted(set(re.findall(r"`(dpsgd [a-z][^`]*)`", TEXT)))


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_parses(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    command.make_context(name, arguments)  # raises for what the command refuses


@pytest.mark.parametrize("line", SHORT)
def test_a_command_in_the_text_has_its_flags(line: str) -> None:
    _, name, *flags = line.split()
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    params = command.get_params(click.Context(command))
    known = {option for each in params for option in each.opts}
    assert {flag for flag in flags if flag.startswith("--")} <= known


def test_every_file_exists() -> None:
    named = re.findall(
        r"`((?:accounting|pipelines|trainer|tests|examples)/[^` ]+)`", TEXT
    )
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_there_are_commands_for_every_paper() -> None:
    assert len(re.findall(r"^## ", TEXT, re.M)) == 5
    assert len(COMMANDS) >= 10
