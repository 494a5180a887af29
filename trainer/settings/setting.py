"""A setting is declared once, and everything else about it is derived.

    class TrainSettings:
        warmup_steps: int = setting(0, "Steps of linear warm-up.", at_least=0)

From such a field of a dataclass follow the argument in Python, its check
(`check_declared`), its description in the docstring (`documented`), its entry in the
run record (`recorded`), and, in `trainer.cli.setting_flags`, the option of a command,
its key in a file of ``--config``, and its line in the reference of the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from accounting.validation import check_choice, check_float, check_int
from trainer.model.user_code import check_name

#: Groups of options in ``--help``.
PRIVACY = "Privacy"
TRAINING = "Training"
MODEL = "Model and loss"
AVERAGES = "Averages of the iterates, at no further cost"
METHODS = "Settings of one method"
OUTPUT = "Output"

_KEY = "setting"
_Class = TypeVar("_Class", bound=type)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of a setting, besides its name.

    Attributes:
      help: What it means, for the help and the documentation.
      kind: Type of a value; of a field of a dataclass, that of its annotation.
      many: Whether its value is a tuple of such values.
      group: Group of its option in the help.
      flag: Name of its option, without dashes; None for that of the setting.
      metavar: Name of the value in the help; None for its type.
      choices: Accepted values; None if ``check`` and the bounds decide.
      at_least, above, at_most, below: Bounds of a number.
      check: (name, value) -> raises InputError if the value is refused.
      default: Value if none is given.
      flag_default: Value if no option is given, where that differs.
      needed: What to give, for a method's setting without default; else None.
      recorded: Whether the record's ``optimizer`` has it.
    """

    help: str
    kind: Any = str
    many: bool = False
    group: str = METHODS
    flag: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    check: Callable[[str, Any], object] = lambda name, value: None
    default: Any = None
    flag_default: Any = None
    needed: str | None = None
    recorded: bool = False

    def accept(self, name: str, value: Any) -> None:
        """Checks a value.

        Args:
          name: Name of the setting.
          value: Its value.

        Raises:
          InputError: name, value, bound.
        """
        for one in value if self.many else (value,):
            if self.choices is not None:
                check_choice(name, one, self.choices)
            bounds: Any = {"at_least": self.at_least, "at_most": self.at_most}
            if self.kind is int:
                check_int(name, one, **bounds)
            if self.kind is float:
                check_float(name, one, **bounds, above=self.above, below=self.below)
            self.check(name, one)


def setting(default: Any, text: str, *, group: str = TRAINING, **declared: Any) -> Any:
    """Returns a field of a dataclass that is a setting.

    Args:
      default: Its default; None for a setting that may be omitted.
      text: What it means.
      group: Group of its option.
      **declared: Further attributes of its `Setting`.
    """
    found = Setting(help=text, group=group, default=default, **declared)
    return dataclasses.field(default=default, metadata={_KEY: found})


def declared(cls: Any) -> Mapping[str, Setting]:
    """Returns the settings of a dataclass by the name of their field, in order."""
    return _declared(cls)


@functools.cache
def _declared(cls: Any) -> Mapping[str, Setting]:
    hints = typing.get_type_hints(cls)
    return {
        field.name: _with_kind(field.metadata[_KEY], hints[field.name])
        for field in dataclasses.fields(cls)
        if _KEY in field.metadata
    }


def _with_kind(found: Setting, annotation: Any) -> Setting:
    """Returns the setting with the type that its annotation names."""
    if isinstance(annotation, types.UnionType):
        [annotation] = [one for one in annotation.__args__ if one is not types.NoneType]
    many = typing.get_origin(annotation) is tuple
    kind = typing.get_args(annotation)[0] if many else annotation
    return dataclasses.replace(found, kind=kind, many=many)


def check_code(name: str, value: str) -> None:
    """Refuses what is not ``module:function``; arguments as for `check_int`."""
    check_name(value, name)


def named_or_code(*names: str) -> Callable[[str, str], None]:
    """Returns a check that accepts these names, and ``module:function``."""

    def check(name: str, value: str) -> None:
        if ":" not in value:
            check_choice(name, value, names)

    return check


def check_declared(settings: Any) -> None:
    """Checks every declared setting of a dataclass; None is the default of some.

    Args:
      settings: An instance.

    Raises:
      InputError: name, value, bound.
    """
    for name, found in declared(type(settings)).items():
        value = getattr(settings, name)
        if value is not None or found.default is not None:
            found.accept(found.flag or name, value)


def recorded(settings: Any) -> dict[str, Any]:
    """Returns the settings that are declared as part of the record."""
    every = declared(type(settings)).items()
    return {name: getattr(settings, name) for name, found in every if found.recorded}


def documented(cls: _Class) -> _Class:
    """Adds the declared settings to the docstring of a dataclass."""
    lines = (
        textwrap.fill(
            f"{name}: {found.help}", 88, initial_indent=" " * 6,
            subsequent_indent=" " * 8,
        )
        for name, found in declared(cls).items()
    )  # fmt: skip
    cls.__doc__ = "\n".join([cls.__doc__ or "", "    Settings:", *lines])
    return cls
