"""Fields of a schema file, each checked when it is read.

Everything here is public, so that messages may quote it.
"""

from __future__ import annotations

import datetime
import decimal
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from accounting.core.validation import InputError, did_you_mean

_WORDS = {int: "an integer", str: "a text", bool: "true or false"}

#: How cells are read.  Change it when a cell may become another number or text.
CELLS_NAME = "dpsgd-cells-v2"

#: A whole number with zeros after the point, and a number with an exponent.  What may
#: be hexadecimal, such as 12e4, is neither.
WHOLE_NUMBER = r"^(-?[0-9]+)\.0+$"
EXPONENT = r"^-?[0-9]+(\.[0-9]+[eE][-+]?|[eE][-+])[0-9]{1,3}$"
#: Text -> the one that it is read as; None for missing.
ONE_TEXT = {
    "True": "true",
    "False": "false",
    "TRUE": "true",
    "FALSE": "false",
    "-0": "0",
    "nan": None,
    "NaN": None,
}
#: From here on, floating-point numbers have neighbours that are not written.
MOST_EXACT = 2**53
_SPACES = " \t\n\v\f\r"


class Fields:
    """The fields of one table of a schema file, such as ``[columns.age]``.

    Args:
      values: Name of a field -> value, from TOML or JSON.
      place: File and table, for messages.
    """

    def __init__(self, values: Any, place: str) -> None:
        self.place = place
        if not isinstance(values, Mapping):
            raise InputError(f"Expected {place} to be a table, not {values!r}.")
        self._values = dict(values)

    def names(self) -> list[str]:
        """Returns the names of the fields."""
        return list(self._values)

    def only(self, *names: str) -> None:
        """Refuses fields with other names, by an InputError."""
        for name in self._values:
            if name not in names:
                raise InputError(
                    f"Expected no {name} in {self.place}; it may hold "
                    f"{', '.join(sorted(names))}.{did_you_mean(name, names)}"
                )

    def wrong(self, name: str, wanted: str, example: str) -> InputError:
        """Returns the error for a field.

        Args:
          name: Name of the field.
          wanted: Its correct values, after "to be".
          example: A correct line.
        """
        if name not in self._values:
            return InputError(
                f"Expected {name} in {self.place}, {wanted}. Write {example}."
            )
        value = self._values[name]
        shown = str(value) if isinstance(value, datetime.date) else repr(value)
        return InputError(
            f"Expected {name} = {shown} of {self.place} to be {wanted}. Write "
            f"{example}."
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the unchecked value of a field.

        Args:
          name: Name of the field.
          default: Value if it is missing.
        """
        return self._values.get(name, default)

    def _typed(self, name: str, kind: type, default: Any, example: str) -> Any:
        value = self.get(name, default)
        if value is None or type(value) is not kind:
            raise self.wrong(name, _WORDS[kind], example)
        return value

    def text(self, name: str, default: str | None = None, *, example: str = "") -> str:
        """Returns a text.

        Args:
          name: Name of the field.
          default: Value if it is missing; None if the field is required.
          example: A correct line.
        """
        value: str = self._typed(name, str, default, example or f'{name} = "..."')
        return value

    def flag(self, name: str) -> bool:
        """Returns true or false; false if it is missing."""
        value: bool = self._typed(name, bool, False, f"{name} = true")
        return value

    def choice(self, name: str, choices: Collection[str], default: str = "") -> str:
        """Returns one of ``choices``.

        Other arguments as for ``Fields.text``; an empty ``default`` means required.
        """
        example = f'{name} = "{next(iter(choices))}"'
        value = self.get(name, default)
        if value not in choices:
            wanted = f"one of {', '.join(choices)}"
            hint = did_you_mean(value, choices) if isinstance(value, str) else ""
            raise InputError(str(self.wrong(name, wanted, example)) + hint)
        return str(value)

    def integer(
        self, name: str, default: int | None, *, at_least: int, at_most: int
    ) -> int:
        """Returns an integer in [``at_least``, ``at_most``].

        Other arguments as for ``Fields.text``.
        """
        value = self.get(name, default)
        if type(value) is not int or not at_least <= value <= at_most:
            wanted = f"an integer from {at_least} to {at_most}"
            raise self.wrong(name, wanted, f"{name} = {default or at_least}")
        return value

    def number(self, name: str, *, above: float = -math.inf) -> float | None:
        """Returns a finite number; None if it is missing.

        Args:
          name: Name of the field.
          above: Exclusive lower bound.
        """
        if name not in self._values:
            return None
        value = self._values[name]
        if not _is_number(value) or not value > above:
            bound = "" if above == -math.inf else f" above {above:g}"
            raise self.wrong(name, f"a number{bound}", f"{name} = 1.0")
        return float(value)

    def range(self, name: str) -> tuple[float, float] | None:
        """Returns two numbers, the smaller first; None if they are missing."""
        if name not in self._values:
            return None
        value = self._values[name]
        pair = isinstance(value, list | tuple) and len(value) == 2
        if not pair or not all(map(_is_number, value)) or not value[0] < value[1]:
            raise self.wrong(
                name, "two numbers, the smaller first", f"{name} = [0, 100]"
            )
        return float(value[0]), float(value[1])

    def texts(self, name: str, example: str) -> tuple[str, ...] | None:
        """Returns different texts, integers or booleans, as texts; None if missing.

        Arguments as for ``Fields.text``.
        """
        if name not in self._values:
            return None
        value = self._values[name]
        if not isinstance(value, list | tuple) or not value:
            raise self.wrong(name, "a list with a value or more", example)
        if not all(isinstance(each, str | int) for each in value):
            raise self.wrong(name, "a list of texts or integers", example)
        words = tuple(one_word(each) for each in value)
        if len(set(words)) < len(words):
            raise self.wrong(name, "a list of different values", example)
        return words

    def moment(self, name: str) -> datetime.datetime | None:
        """Returns a date or a time without a zone; None if it is missing."""
        if name not in self._values:
            return None
        found = to_moment(self._values[name])
        if found is None:
            wanted = "a date, or a time without a zone"
            raise self.wrong(name, wanted, f"{name} = 2024-01-31")
        return found


def to_moment(value: Any) -> datetime.datetime | None:
    """Returns the time of a date, time or ISO text without a zone; None for others."""
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            return None
    if type(value) is datetime.date:
        value = datetime.datetime.combine(value, datetime.time())
    if isinstance(value, datetime.datetime) and value.tzinfo is None:
        return value
    return None


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def digits_of(text: str) -> str:
    """Returns a number with an exponent as digits; itself if it is not whole and exact.

    Example:
      >>> digits_of("1.2345678E7"), digits_of("5e-1"), digits_of("0E-10")
      ('12345678', '5e-1', '0')
    """
    value = decimal.Decimal(text)
    exact = abs(value) < MOST_EXACT and value == value.to_integral_value()
    return str(int(value)) if exact else text


def one_word(value: str | int) -> str:
    """Returns the one text of a category or class, as ``values`` reads it from cells.

    Example:
      >>> one_word(" 5.00 "), one_word(True), one_word("2.50")
      ('5', 'true', '2.50')
    """
    text = re.sub(WHOLE_NUMBER, r"\1", str(value).strip(_SPACES))
    if re.search(EXPONENT, text):
        text = digits_of(text)
    return ONE_TEXT.get(text) or text
