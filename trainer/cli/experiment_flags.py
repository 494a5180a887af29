"""Flags of `dpsgd train` that `compare` and `simulate` hand to all of their runs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from accounting.cli import shared_options
from accounting.validation import InputError
from trainer.cli.commands import train_request
from trainer.settings.comparison_settings import Experiment
from trainer.settings.request import Request

#: Flags of `dpsgd train` that are set for every run; a second value would win.
_SET_FOR_ALL = (
    "--batches", "--eval", "--out", "--method", "--epsilon", "--noise-multiplier",
    "--delta", "--init-seed", "--simulates", "--csv", "--tensorboard",
)  # fmt: skip

_FOLDER = click.Path(file_okay=False, path_type=pathlib.Path)
_OPTIONS = (
    click.option(
        "--input", "source", required=True, help="Folder of training Parquet."
    ),
    click.option(
        "--eval", "held_out", type=click.Path(path_type=pathlib.Path), required=True,
        help="Held-out Parquet: a folder, a file or a quoted glob, as the test split.",
    ),
    click.option(
        "--out", type=_FOLDER, required=True, help="New, or of what was stopped."
    ),
    click.option(
        "--seeds", type=int, default=Experiment.seeds, show_default=True,
        help="Repetitions.",
    ),
    click.option(
        "--metric", default=Experiment.metric, show_default=True,
        help="Held-out metric.",
    ),
    shared_options.as_json,
)  # fmt: skip


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds data, folders and what else every run of an experiment has in common."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def request(
    flags: dict[str, Any],
    set_here: Mapping[str, Any],
    rest: Sequence[str],
    *,
    also_set: Sequence[str] = (),
) -> Request:
    """Returns what `dpsgd train` is asked to do, except for the folder of batches.

    Args:
      flags: Of the command, with ``held_out`` and ``out``.
      set_here: Values of flags that the command sets, by parameter.
      rest: What the user adds.
      also_set: Names that this command sets for every run, too.

    Raises:
      InputError: a flag in ``rest`` that is set for every run, or what `dpsgd train`
        would refuse before it reads a file.
    """
    for flag in rest:
        if flag.split("=")[0] in (*_SET_FOR_ALL, *also_set):
            raise InputError(
                f"Expected no {flag} for `dpsgd train`: it is set for every run. Omit "
                "it."
            )
    folders = {"batches": ".", "held_out": flags["held_out"], "run": flags["out"]}
    return train_request(rest, **folders, **set_here)


def beside(request: Request) -> dict[str, Any]:
    """Returns what all runs have in common beside their settings."""
    names = ("noise_key_file", "checkpoint_every")
    return {name: getattr(request, name) for name in names}
