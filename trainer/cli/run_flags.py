"""Flags of training and of experiments, each declared once; see ``shared_options``.

A command adds one with ``@run_flags.held_out(help=...)``.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import click

from pipelines.files.paths import is_remote


class Place(click.Path):
    """A path on this machine, or the URL of a folder in an object store."""

    def convert(self, value: Any, *given: Any) -> Any:
        """Returns a path, or the URL as it is."""
        return value if is_remote(value) else super().convert(value, *given)


PLACE = Place(file_okay=False, path_type=pathlib.Path)
#: The argument RUN of a command.
RUN = click.Path(path_type=pathlib.Path)
_FOLDER = click.Path(file_okay=False, path_type=pathlib.Path)

batches = functools.partial(
    click.option,
    "--batches",
    type=_FOLDER,
    required=True,
    help="Folder that `dpsgd batches` wrote.",
)
held_out = functools.partial(
    click.option,
    "--eval",
    type=click.Path(path_type=pathlib.Path),
    required=True,
)
#: The file of a budget; each command says what it does with it.
budget = functools.partial(
    click.option, "--budget", type=click.Path(dir_okay=False, path_type=pathlib.Path)
)
data_is_public = functools.partial(click.option, "--data-is-public", is_flag=True)
