"""Tells of a budget of the rows of which a command releases something without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from pipelines.inputs.source_table import SourceTable


def say(given: Path | None, out: Path, table: Callable[[], SourceTable]) -> None:
    """Says to standard error that a release adds to a budget, if one is near.

    Args:
      given: Value of --budget; with one nothing is said.
      out: Results of the command.  A budget beside them, or in the current folder, is
        near.
      table: Returns the table of the rows; called without a budget alone.
    """
    from trainer.run import budget  # after --help: the accountant

    if given is None and (found := budget.near(out.parent, [table()])):
        text = (
            f"note: {found[0]} is a budget of these rows, in which this has no place: "
            "its epsilon and delta add to those of the budget. --budget gives it one."
        )
        click.echo(text, err=True)
