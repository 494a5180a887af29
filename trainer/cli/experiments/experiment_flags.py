"""Flags that experiments share, and flags of `dpsgd train` that they pass on.

Formal guarantees:
  - Every value of a list is parsed like a single value of that flag.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from accounting.cli import shared_options
from accounting.cli.grouped import PASSES_ON, Grouped
from accounting.core.validation import InputError
from trainer.cli.commands import train_request
from trainer.cli.setting_flags import Listed
from trainer.settings import methods
from trainer.settings.request import Request

#: Flags of `dpsgd train` that every experiment sets; a second value would override.
_SET_FOR_ALL = (
    "--batches", "--eval", "--out", "--method", "--epsilon", "--noise-multiplier",
    "--delta", "--init-seed",
)  # fmt: skip


def experiment(
    place: str, cls: type[click.Command] = Grouped
) -> Callable[[Callable[..., Any]], click.Command]:
    """Returns a decorator that makes the command of an experiment.

    The decorated function takes the flags of the command, and further arguments for
    `dpsgd train`, and returns the settings of the experiment.

    Args:
      place: "module:function" of the experiment; see ``experiment_body.run``.
      cls: Class of the command.
    """

    def made(settings_of: Callable[..., Any]) -> click.Command:
        @functools.wraps(settings_of)
        def command(ctx: click.Context, as_json: bool, **flags: Any) -> None:
            settings = settings_of(flags, tuple(ctx.args))
            from trainer.cli.experiments import experiment_body

            module, function = place.split(":")
            carried_out = getattr(importlib.import_module(module), function)
            experiment_body.run(carried_out, settings, as_json=as_json)

        declared = vars(command).pop("__click_params__", [])
        shared_options.as_json(command)
        vars(command)["__click_params__"] += declared
        declare = click.command(cls=cls, context_settings=PASSES_ON)
        return declare(click.pass_context(command))

    return made


def listed(kind: click.ParamType) -> dict[str, Any]:
    """Returns arguments of `click.option` for a flag that takes lists of ``kind``."""
    return {
        "type": Listed(kind),
        "multiple": True,
        "callback": lambda _, __, lists: tuple(
            dict.fromkeys(value for values in lists for value in values)
        ),
    }


def refuse(rest: Sequence[str], set_for_all: Sequence[str]) -> None:
    """Refuses flags for `dpsgd train` that a command sets for every run.

    Args:
      rest: Further arguments of the user, for `dpsgd train`.
      set_for_all: Names of the flags that the command sets.

    Raises:
      InputError: ``rest`` has one of them.
    """
    for flag in rest:
        if flag.split("=")[0] in set_for_all:
            raise InputError(f"{flag} is set for every run of this command. Omit it.")


def request(
    flags: dict[str, Any],
    set_here: Mapping[str, Any],
    rest: Sequence[str],
    *,
    also_set: Sequence[str] = (),
) -> Request:
    """Returns the request to `dpsgd train`, except for the folder of batches.

    Args:
      flags: Flags of the command, with ``eval`` and ``out``.
      set_here: Values of flags that the command sets, by parameter.
      rest: Further arguments of the user, for `dpsgd train`.
      also_set: Further flags that this command sets for every run.

    Raises:
      InputError: ``rest`` has a flag that is set for every run, or `dpsgd train` would
        refuse the flags before it reads a file.
    """
    refuse(rest, (*_SET_FOR_ALL, *also_set))
    folders = {"batches": ".", "eval": flags["eval"], "out": flags["out"]}
    return train_request(rest, **folders, **set_here)


def split(option: str, text: str) -> list[str]:
    """Returns flags that an option gives as one text.

    Args:
      option: The option, for messages.
      text: Flags in shell syntax.

    Raises:
      InputError: a quotation is open.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"Expected the flags {text!r} of {option} in shell syntax: {error}. "
            "Close the quotation."
        ) from None


def each_of_lists(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns arguments of `dpsgd train` for every combination of listed values.

    The learning rate, the clip norm and numeric settings of a method may be lists.  If
    a flag is repeated, its last list counts.

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
            kept.append(word)  # without a value: `dpsgd train` refuses it
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
    """Returns what all runs share in addition to their settings."""
    names = ("noise_key_file", "checkpoint_every")
    return {name: getattr(request, name) for name in names}
