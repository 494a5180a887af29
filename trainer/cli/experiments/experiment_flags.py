"""Flags that experiments share, and flags of `dpsgd train` that they pass on.

Formal guarantees:
  - Every value of a list is parsed like a single value of that flag.
"""

from __future__ import annotations

import itertools
import shlex
import typing
from collections.abc import Sequence
from typing import Any

from accounting.core.validation import InputError
from trainer.cli.commands import train_request
from trainer.settings import methods
from trainer.settings.requests import Request

#: Flags of `dpsgd train` that every experiment sets; a second value would override.
_SET_FOR_ALL = (
    "--batches", "--eval", "--out", "--method", "--epsilon", "--noise-multiplier",
    "--delta", "--of-runs", "--init-seed",
)  # fmt: skip


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


def request(rest: Sequence[str], *tokens: str, **set_here: Any) -> Request:
    """Returns the request to `dpsgd train`, except for its folders.

    Args:
      rest: Further arguments of the user, for `dpsgd train`.
      *tokens: Arguments that the command adds.
      **set_here: Settings that the command sets.

    Raises:
      InputError: ``rest`` has an option that is set for every run, or `dpsgd train`
        would refuse the options before it reads a file.
    """
    refuse(rest, _SET_FOR_ALL)
    return train_request([*rest, *tokens], **set_here)


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
        for method in methods.names()
        for name, hint in methods.settings_of(methods.get(method)).items()
        if typing.get_args(hint)[0] in (int, float)
    )
    return ("--learning-rate", "--l2-norm-clip", *own)
