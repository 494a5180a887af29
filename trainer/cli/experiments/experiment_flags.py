"""Flags of `dpsgd train` that `compare` and `simulate` hand to all of their runs.

Formal guarantees:
  - Every value of a list is parsed as the one value of that flag is.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from accounting.cli import shared_options
from accounting.validation import InputError
from trainer.cli.commands import train_request
from trainer.settings import methods
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
        help="Held-out metric; auto: AUC, accuracy or the loss, as the label asks.",
    ),
    shared_options.as_json,
)  # fmt: skip


class Listed(click.ParamType):
    """Values that are separated by commas.

    Args:
      kind: Of each value.
    """

    def __init__(self, kind: click.ParamType) -> None:
        self._kind = kind
        self.name = f"{kind.name}s"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Returns how the help writes the values: see `click.ParamType.get_metavar`."""
        one = self._kind.get_metavar(param, ctx) or self._kind.name.upper()
        return f"{one},..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Returns a tuple of values: see `click.ParamType.convert`."""
        parts = value if isinstance(value, tuple) else str(value).split(",")
        return tuple(self._kind.convert(part, param, ctx) for part in parts)


def listed(kind: click.ParamType) -> dict[str, Any]:
    """Returns what makes a flag take lists, and may be repeated.

    Args:
      kind: Of each value.
    """
    return {
        "type": Listed(kind),
        "multiple": True,
        "callback": lambda _, __, lists: tuple(
            dict.fromkeys(value for values in lists for value in values)
        ),
    }


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


def each_of_lists(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns arguments of `dpsgd train` for every combination of listed values.

    Lists may be given for the learning rate, the clip norm, and numbers that a method
    has of its own.  Of a flag that is repeated, the last list is taken.

    Args:
      arguments: Of `dpsgd train`, some of whose values are lists.

    Example:
      >>> each_of_lists(["--hidden", "4,2", "--learning-rate", "0.1,0.2"])
      [('--hidden', '4,2', '--learning-rate=0.1'), ('--hidden', '4,2', \
'--learning-rate=0.2')]
    """
    kept, lists, words = [], dict[str, list[str]](), iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in _tried():
            kept.append(word)
        elif equals or (value := next(words, "")):
            lists[flag] = value.split(",")
        else:
            kept.append(word)  # without a value, which the command will say
    return [
        (*kept, *(f"{flag}={one}" for flag, one in zip(lists, values, strict=True)))
        for values in itertools.product(*lists.values())
    ]


def _tried() -> tuple[str, ...]:
    """Returns the flags whose values may be lists."""
    own = (
        f"--{name.replace('_', '-')}"
        for name, setting in methods.own_settings()
        if setting.kind in (int, float)
    )
    return ("--learning-rate", "--l2-norm-clip", *own)


def beside(request: Request) -> dict[str, Any]:
    """Returns what all runs have in common beside their settings."""
    names = ("noise_key_file", "checkpoint_every")
    return {name: getattr(request, name) for name in names}
