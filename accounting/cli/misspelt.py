"""Options that a command does not know, and which of its own was meant."""

from __future__ import annotations

from collections.abc import Sequence

import click

from accounting.validation import did_you_mean, nearest


def meant(name: str, context: click.Context | None = None) -> str:
    """Returns a question for the option that was meant; empty if none is similar.

    Args:
      name: Option as typed, perhaps with an equals sign and a value.
      context: Context of the command; None for the running one.
    """
    context = context or click.get_current_context(silent=True)
    bare = name.partition("=")[0]
    return did_you_mean(bare, _options(context)) if context else ""


def instead_of(
    names: Sequence[str], given: Sequence[str], context: click.Context
) -> str:
    """Returns the unknown option that was given for a missing one; empty if none was.

    Commands that hand options to Beam keep those that they do not know.

    Args:
      names: Names of the missing option.
      given: All words of the command line.
      context: Context of the command.
    """
    known = _options(context)
    words = [word.partition("=")[0] for word in given if word.startswith("--")]
    unknown = [word for word in words if word not in known]
    return next((word for word in unknown if nearest(word, known) in names), "")


def _options(context: click.Context) -> list[str]:
    names = [name for each in context.command.params for name in each.opts]
    return [name for name in names if name.startswith("--")]
