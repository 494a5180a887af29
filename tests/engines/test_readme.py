"""What the page of the engines tells people to type is there."""

from __future__ import annotations

import pathlib
import re

from tests.engines.harness.__main__ import cli


def test_commands_of_the_page_exist(root: pathlib.Path) -> None:
    page = (root / "tests" / "engines" / "harness" / "README.md").read_text()
    commands = set(re.findall(r"python -m tests\.engines\.harness (\w+)", page))
    assert commands == set(cli.commands)
    for command, option in re.findall(
        r"tests\.engines\.harness (\w+) [^-`\n]*(--[\w-]+)", page
    ):
        options = [name for each in cli.commands[command].params for name in each.opts]
        assert option in options
    targets = re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), re.M)
    assert set(re.findall(r"^make (\S+)", page, re.M)) <= set(targets)
