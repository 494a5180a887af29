"""Fills the page of the command line when the site is built: see mkdocs.yml."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from dpsgd.command_reference import reference

MARK = "<!-- the commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the commands in place of the mark."""
    return markdown.replace(MARK, reference()) if MARK in markdown else markdown
