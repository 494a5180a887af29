"""A setting is a field of a dataclass, whose annotation says what it accepts.

The field determines the check here, the option on the command line and the key in a
file of ``--config`` (`accounting.cli.command`), and the entry in the reference.

Example:
  >>> @dataclasses.dataclass(frozen=True, kw_only=True)
  ... class Warmup(Settings):
  ...     "Attributes: warmup_steps: Steps of linear warm-up of the learning rate."
  ...     warmup_steps: Annotated[int, Field(ge=0)] = 0
  >>> Warmup(warmup_steps=-1)
  Traceback (most recent call last):
  accounting.core.validation.InputError: Expected warmup_steps=-1 >= 0.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import pydantic
from cyclopts import Group, Parameter
from pydantic import Field as Field

from accounting.core.validation import InputError, check_choice, did_you_mean

#: Marks a setting that the record of a run has.
RECORDED = "recorded"

#: Groups of options in the help, in their order.
REQUIRED = Group("Must be given", sort_key=0)
PRIVACY = Group("Privacy", sort_key=1)
OPTIONS = Group("Options", sort_key=2)
OUTPUT = Group("Output", sort_key=9)

#: The annotation of an option of that group.
OfPrivacy = Parameter(group=PRIVACY)

#: An option that is left out of the help; the reference has it.
RARE = Parameter(show=False)

_STRICT = pydantic.ConfigDict(
    strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
)


class Settings:
    """Base of frozen dataclasses that check the fields with an ``Annotated`` type.

    Raises:
      InputError: name, value, bound.
    """

    def __post_init__(self) -> None:
        check_fields(self)


def one_of(name: str, names: Callable[[], tuple[str, ...]]) -> pydantic.AfterValidator:
    """Returns the check of a name in a registry, which users may have extended.

    Args:
      name: Name of the setting.
      names: Returns the names that are registered now.  None is accepted as a value if
        the type of the setting has it.
    """

    def check(value: str | None) -> str | None:
        return value if value is None else check_choice(name, value, names())

    return pydantic.AfterValidator(check)


def choice(name: str, *names: str) -> pydantic.AfterValidator:
    """Returns the check of a setting that is one of a few names.

    Args:
      name: Name of the setting.
      *names: The names.
    """
    return one_of(name, lambda: names)


def listed(kind: Callable[[str], Any]) -> Parameter:
    """Returns the annotation of an option whose values are separated by commas.

    Args:
      kind: Makes a value of a text; raises a ValueError for a wrong text.
    """

    kinds: dict[Any, str] = {int: "integers", float: "numbers"}
    words = kinds.get(kind, "values as in the help")

    def convert(type_: Any, tokens: Sequence[Any]) -> tuple[Any, ...]:
        del type_
        last = tokens[-1]  # as of other options; a list of a file is several tokens
        given = last.value
        if last.source != "cli":
            given = ",".join(each.value for each in tokens)
        try:
            texts = given.split(",")
            return tuple(dict.fromkeys(kind(text.strip()) for text in texts))
        except InputError:
            raise
        except ValueError:
            raise InputError(
                f"Expected {last.keyword} {given} to be {words}, separated by commas."
            ) from None

    return Parameter(converter=convert, n_tokens=1, show_default=_with_commas)


def _with_commas(values: Any) -> str:
    return ",".join(map(str, values or ()))


def annotated_fields(cls: Any) -> dict[str, Any]:
    """Returns the annotation of every setting of a dataclass, by name, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(cls)
        if typing.get_origin(hints[field.name]) is Annotated
    }


@functools.cache
def _checks(cls: type) -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Returns the public name and the check of every setting."""
    return {
        name: (
            public_name(name, hint),
            pydantic.TypeAdapter(hint, config=_STRICT).validate_python,
        )
        for name, hint in annotated_fields(cls).items()
    }


def public_name(name: str, hint: Any) -> str:
    """Returns the name of a setting on the command line, with underscores.

    Args:
      name: Name of the field.
      hint: Annotation of the field, which may give the option another name.
    """
    for each in typing.get_args(hint):
        for option in getattr(each, "name", None) or ():
            return str(option).lstrip("-").replace("-", "_")
    return name


def check_fields(settings: Any) -> None:
    """Checks every setting of an instance.

    Args:
      settings: The instance of a dataclass.

    Raises:
      InputError: name, value, bound.
    """
    cls: Any = type(settings)
    for name, (public, check) in _checks(cls).items():
        checked(public, getattr(settings, name), check)


def checked(name: str, value: Any, check: Callable[[Any], Any]) -> Any:
    """Returns what a check of pydantic makes of a value.

    Args:
      name: Name of the setting.
      value: Value of the setting.
      check: ``validate_python`` of a `pydantic.TypeAdapter`.

    Raises:
      InputError: name, value, bound.
    """
    try:
        return check(value)
    except pydantic.ValidationError as error:
        raise InputError(bound_of(name, error)) from None


def bound_of(name: str, error: pydantic.ValidationError) -> str:
    """Returns the first error of pydantic as a line: name, value, bound.

    Args:
      name: Name of the setting.
      error: The error.
    """
    found = error.errors(include_url=False)[0]
    value, context = found["input"], found.get("ctx", {})
    own = context.get("error")
    if isinstance(own, InputError):
        return str(own)
    if "expected" in context:
        words = [each.strip(" '") for each in context["expected"].split(",")]
        words[-1:] = [each.strip(" '") for each in words[-1].split(" or ")]
        hint = did_you_mean(value, words) if isinstance(value, str) else ""
        return f"Expected {name}={value!r} to be one of {', '.join(words)}.{hint}"
    shown = value if {"gt", "ge", "lt", "le"} & context.keys() else repr(value)
    return f"Expected {name}={shown} {_bound(found['type'], context)}."


def _bound(kind: str, context: dict[str, Any]) -> str:
    signs = {
        "greater_than": ("> ", "gt"),
        "greater_than_equal": (">= ", "ge"),
        "less_than": ("< ", "lt"),
        "less_than_equal": ("<= ", "le"),
    }
    if kind in signs:
        sign, key = signs[kind]
        bound = context[key]
        return f"{sign}{bound}" if isinstance(bound, int) else f"{sign}{bound:g}"
    if kind == "finite_number":
        return "to be finite"
    words = {
        "int": "an integer",
        "float": "a number",
        "bool": "True or False",
        "string": "a text",
        "tuple": "a tuple",
        "path": "a path",
    }
    return f"to be {words.get(kind.split('_')[0], 'a value of the type in the docs')}"


def recorded(settings: Any) -> dict[str, Any]:
    """Returns the settings that are marked as part of the record of a run."""
    return {
        name: getattr(settings, name)
        for name, hint in annotated_fields(type(settings)).items()
        if RECORDED in typing.get_args(hint)
    }
