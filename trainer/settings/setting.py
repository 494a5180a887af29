"""A setting is declared once, and everything else about it is derived.

    Attributes:
      warmup_steps: Steps of linear warm-up of the learning rate.

    warmup_steps: int = setting(0, at_least=0, recorded=True)

From a field of a dataclass, and from its line in the docstring, follow the argument in
Python, its check (`check_declared`), its entry in the run record (`recorded`), and, in
`trainer.cli.setting_flags`, the option of a command, its key in a file of ``--config``,
and its place in the reference of the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from accounting.core.validation import check_choice, check_float, check_int
from trainer.model.user_code import check_name

#: Groups of options in ``--help``; the two first are those of all commands.
PRIVACY = "Privacy"
OUTPUT = "Output"
TRAINING = "Training"
MODEL = "Model and loss"
AVERAGES = "Averages of the iterates, at no further cost"
METHODS = "Settings of one method"
GROUPS = (PRIVACY, TRAINING, MODEL, METHODS, AVERAGES, OUTPUT)

#: The default of a setting that must be given.
REQUIRED: Any = dataclasses.MISSING

_KEY = "setting"
#: An entry under ``Attributes:``, with its continuation lines.
_ENTRY = re.compile(r"^  (\w+): (.*(?:\n    .*)*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of a setting, besides its name.

    Attributes:
      help: What it means, for the help and the documentation.
      kind: Type of a value; of a field of a dataclass, that of its annotation.
      many: Whether its value is a tuple of such values.
      group: Group of its option in the help; None for that of its name.
      flag: Name of its option, without dashes; None for that of the setting.
      metavar: Name of the value in the help; None for its type.
      choices: Accepted values, or a function that returns those of a registry; None if
        ``check`` and the bounds decide.
      at_least, above, at_most, below: Bounds of a number.
      word: What may be given instead of a number; None for nothing.
      check: (name, value) -> raises InputError if the value is refused.
      default: Value if none is given, or ``REQUIRED``.
      flag_default: Value if no option is given, where that differs.
      needed: What to give, for a method's setting without default; else None.
      recorded: Whether the record's ``optimizer`` has it.
    """

    help: str
    kind: Any = str
    many: bool = False
    group: str | None = METHODS
    flag: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    word: str | None = None
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
        choices = self.choices() if callable(self.choices) else self.choices
        for one in value if self.many else (value,):
            if self.word is not None and one == self.word:
                continue
            if choices is not None:
                check_choice(name, one, choices)
            bounds: Any = {"at_least": self.at_least, "at_most": self.at_most}
            if self.kind is int:
                check_int(name, one, **bounds)
            if self.kind is float:
                check_float(name, one, **bounds, above=self.above, below=self.below)
            self.check(name, one)


def setting(default: Any, *, group: str | None = None, **declared: Any) -> Any:
    """Returns a field of a dataclass that is a setting.

    Args:
      default: Its default; None for a setting that may be omitted, or ``REQUIRED``.
      group: Group of its option; None for that of its name.
      **declared: Further attributes of its `Setting`.
    """
    found = Setting(help="", group=group, default=default, **declared)
    return dataclasses.field(default=default, metadata={_KEY: found})


def declared(cls: Any) -> Mapping[str, Setting]:
    """Returns the settings of a dataclass by the name of their field, in order."""
    return _declared(cls)


@functools.cache
def _declared(cls: Any) -> Mapping[str, Setting]:
    hints, texts = typing.get_type_hints(cls), _described(cls)
    return {
        field.name: _completed(
            field.metadata[_KEY], hints[field.name], texts[field.name]
        )
        for field in dataclasses.fields(cls)
        if _KEY in field.metadata
    }


def _completed(found: Setting, annotation: Any, text: str) -> Setting:
    """Returns the setting with the type of its annotation, and its description."""
    if isinstance(annotation, types.UnionType):
        # Of a number or a word, the number; see ``word``.
        annotation, *_ = [one for one in annotation.__args__ if one != types.NoneType]
    many = typing.get_origin(annotation) is tuple
    kind = typing.get_args(annotation)[0] if many else annotation
    return dataclasses.replace(found, kind=kind, many=many, help=text)


def _described(cls: Any) -> dict[str, str]:
    """Returns what the docstrings of a class and its bases say of their attributes."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        _, _, text = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")
        for name, words in _ENTRY.findall(text.partition("\n\n")[0]):
            found[name] = " ".join(words.split())
    return found


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
