"""Flags of training methods, made from their settings: `trainer.settings.methods`.

Formal guarantees:
  - Every setting of every method that is registered when the command runs has its flag;
    a flag of a method that is not used is refused.
  - A flag has one meaning: a setting whose flag the command already has is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from accounting.cli.grouped import Grouped, Option
from accounting.cli.registered import Registered
from accounting.core.validation import InputError
from trainer.cli import setting_flags
from trainer.settings import methods
from trainer.settings.methods import DP_SGD
from trainer.settings.setting import TRAINING, Setting


def method(text: str, *names: str, **more: Any) -> Callable[..., Any]:
    """Returns a decorator that adds ``--method``, without settings of methods.

    Args:
      text: Help text.
      *names: Name of the parameter; ``method`` if none.
      **more: Further arguments of the declaration.
    """
    declared = {"type": Registered(methods.names), "show_default": True, **more}
    return click.option("--method", *names, help=text, **declared)


def every_option() -> list[Option]:
    """Returns ``--method`` and the options of all settings of methods."""
    return [_method_option(), *_own(methods.own_settings())]


class SettingsOfMethods(Grouped):
    """A command with the settings of every method, for several methods at once."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Returns all parameters, with those of the methods before ``--help``."""
        params = super().get_params(ctx)
        return [*params[:-1], *apart(_own(self._settings()), params), params[-1]]

    def _settings(self) -> Iterator[tuple[str, Setting]]:
        return methods.own_settings()


class AccountsForMethods(SettingsOfMethods):
    """A command with the settings of methods that have their own accounting."""

    def _settings(self) -> Iterator[tuple[str, Setting]]:
        for name in methods.names():
            method = methods.get(name)
            if method.has_theorem:
                yield from method.settings.items()


def take(flags: dict[str, Any]) -> dict[str, Any]:
    """Removes the settings of methods from ``flags``, and returns the given ones."""
    owners = methods.owners()
    found = {name: flags.pop(name) for name in list(flags) if name in owners}
    return {name: value for name, value in found.items() if value is not None}


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given settings of methods among ``flags``."""
    return take(dict(flags))


def _method_option() -> Option:
    summaries = (f"{name}: {methods.get(name).summary}" for name in methods.names())
    declared = Setting(
        help=f"{'; '.join(summaries)}.",
        group=TRAINING,
        choices=methods.names,
        default=DP_SGD,
    )
    return setting_flags.option("method", declared)


def _own(settings: Iterable[tuple[str, Setting]]) -> list[Option]:
    return [setting_flags.option(name, setting) for name, setting in settings]


def apart(own: list[Option], params: Sequence[click.Parameter]) -> list[Option]:
    """Returns the options of methods; refuses flags that another option has.

    Args:
      own: Options of methods.
      params: All other parameters of the command.

    Raises:
      InputError: a setting of a method has the name of another option.
    """
    taken = {flag: param for param in params for flag in (param.name, *param.opts)}
    for option in own:
        for flag in (option.name, *option.opts):
            if flag in taken:
                raise InputError(
                    f"Expected no setting {option.name!r} of a method: "
                    f"{option.opts[0]} means something else here. Rename the setting."
                )
    return own
