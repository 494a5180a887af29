"""Flags of training and of experiments, each declared once; see ``shared_options``.

A command adds one with ``@run_flags.held_out(help=...)``.
"""

from __future__ import annotations

import functools

import click

from accounting.cli import paths

batches = functools.partial(
    click.option,
    "--batches",
    type=paths.FOLDER,
    required=True,
    help="Folder that `dpsgd batches` wrote.",
)
held_out = functools.partial(
    click.option,
    "--eval",
    type=paths.PATH,
    required=True,
)
data_is_public = functools.partial(click.option, "--data-is-public", is_flag=True)
