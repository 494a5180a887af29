"""Makes parts of pages from the code when the site is built: see mkdocs.yml."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import dpsgd
from dpsgd.command_line import reference

COMMANDS = "<!-- the commands -->"
NAMES = re.compile("<!-- names of (.+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the commands, and the public names of a package, in place of their marks."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, reference())

    def names(mark: re.Match[str]) -> str:
        of_package = (
            f"::: dpsgd.{name}"
            for name, home in dpsgd._HOMES.items()
            if home.split(".")[0] == mark[1] and f"::: dpsgd.{name}\n" not in markdown
        )
        return "\n\n".join(of_package)

    return NAMES.sub(names, markdown)
