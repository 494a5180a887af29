"""Options of commands, made from declared settings: ``trainer.settings.setting``.

Formal guarantees:
  - Every declared setting has its option, in its group of the help.
  - A file of ``--config`` has the names of options; a name that the command does not
    have is refused, and what the command line says counts.
"""

from __future__ import annotations

import functools
import pathlib
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import click

from accounting.cli import paths
from accounting.cli.grouped import Option
from accounting.cli.registered import Registered
from accounting.core.validation import InputError, did_you_mean
from trainer.settings.setting import METHODS, REQUIRED, Setting, declared


class Listed(click.ParamType):
    """Values that are separated by commas.

    Args:
      kind: Type of each value.
    """

    def __init__(self, kind: click.ParamType) -> None:
        self._kind = kind
        self.name = f"{kind.name}s"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Returns the placeholder for the help: see `click.ParamType.get_metavar`."""
        one = self._kind.get_metavar(param, ctx) or self._kind.name.upper()
        return f"{one},..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Returns a tuple of values: see `click.ParamType.convert`."""
        parts = value if isinstance(value, (tuple, list)) else str(value).split(",")
        return tuple(self._kind.convert(part, param, ctx) for part in parts)


class NumberOr(click.ParamType):
    """A number, or a word.

    Args:
      word: The word.
    """

    name = "float"

    def __init__(self, word: str) -> None:
        self._word = word

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Returns the placeholder for the help: see `click.ParamType.get_metavar`."""
        return f"FLOAT|{self._word}"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Returns a number or the word: see `click.ParamType.convert`."""
        if value == self._word:
            return value
        try:
            return float(value)
        except (TypeError, ValueError):
            self.fail(f"{value!r} is neither a number nor {self._word}.", param, ctx)


def public(name: str, setting: Setting) -> str:
    """Returns the name of a setting on the command line and in files.

    Args:
      name: Name of the setting.
      setting: What is declared of it.
    """
    return setting.flag or name


@functools.cache
def option(name: str, setting: Setting, **changes: Any) -> Option:
    """Returns the option of a setting.

    Args:
      name: Name of the setting.
      setting: What is declared of it.
      **changes: Arguments of `click.Option` that replace those of the declaration.
    """
    default = setting.flag_default or setting.default
    is_path = setting.kind is pathlib.Path
    kind = click.types.convert_type(paths.PATH if is_path else setting.kind)
    kind = kind if setting.word is None else NumberOr(setting.word)
    arguments: dict[str, Any] = {
        "type": _choice(setting.choices) if setting.choices else kind,
        "metavar": setting.metavar,
        "help": setting.help,
    }
    if setting.many and setting.kind is str:  # a text may hold a comma
        arguments["multiple"] = True
    elif setting.many:
        arguments["type"] = Listed(kind)
        default = default if default is REQUIRED else ",".join(map(str, default))
    if setting.kind is bool:
        del arguments["type"]
        arguments["is_flag"] = True
    elif default is REQUIRED:
        arguments["required"] = True
    elif default not in (None, ()) and setting.group != METHODS:
        arguments |= {"default": default, "show_default": True}
    flag = public(name, setting)
    names = [f"--{flag.replace('_', '-')}", flag]
    return Option(names, group=setting.group, **{**arguments, **changes})


def _choice(choices: Sequence[str] | Callable[[], tuple[str, ...]]) -> click.ParamType:
    return Registered(choices) if callable(choices) else click.Choice(choices)


def options_of(*classes: type) -> list[Option]:
    """Returns the options of all declared settings of dataclasses."""
    return [
        option(name, found)
        for each in classes
        for name, found in declared(each).items()
    ]


def settings(cls: type) -> Callable[..., Any]:
    """Returns a decorator that adds the options of all declared settings."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        found = vars(command).setdefault("__click_params__", [])
        found += reversed(options_of(cls))
        return command

    return add


def again(cls: type, name: str, **changes: Any) -> Callable[..., Any]:
    """Returns a decorator that adds the option of a setting to another command.

    Args:
      cls: The dataclass that declares the setting.
      name: Name of the setting.
      **changes: As for `option`.
    """
    found = option(name, declared(cls)[name], show_default=True, **changes)

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        vars(command).setdefault("__click_params__", []).append(found)
        return command

    return add


def take(flags: dict[str, Any], cls: type) -> dict[str, Any]:
    """Removes the settings of a dataclass from flags; returns them by their fields.

    Args:
      flags: Values by public name.
      cls: A dataclass with declared settings.
    """
    return {
        name: flags.pop(public(name, found))
        for name, found in declared(cls).items()
        if public(name, found) in flags
    }


def _read_config(
    ctx: click.Context, parameter: click.Parameter, path: pathlib.Path | None
) -> None:
    """Takes the values of options from a file, for those that are not given."""
    del parameter  # there is one
    if path is None or ctx.resilient_parsing:
        return
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"--config {path} is not readable as TOML: {error}. Write lines such as "
            "learning_rate = 0.1."
        ) from None
    known = {one.name for one in ctx.command.get_params(ctx)} - {"config", "help"}
    values = {name.replace("-", "_"): value for name, value in given.items()}
    for name in values:
        if name not in known:
            raise InputError(
                f"--config {path} sets {name}, which this command does not have. "
                f"Remove it.{did_you_mean(name, filter(None, known))}"
            )
    ctx.default_map = {**values, **(ctx.default_map or {})}


def config() -> Callable[..., Any]:
    """Returns a decorator that adds ``--config``."""
    return click.option(
        "--config",
        type=paths.FILE,
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="TOML file of options, such as learning_rate = 0.1; those given here "
        "count.",
    )
