"""The one text of a category or class, in a schema as in cells.  Public."""

from __future__ import annotations

import decimal
import re

#: How cells are read.  Change it when a cell may become another number or text.
CELLS_NAME = "dpsgd-cells-v3"

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


def one_word(value: str | int) -> str:
    """Returns the one text of a category or class, as `cells.text` reads it from cells.

    Example:
      >>> one_word(" 5.00 "), one_word(True), one_word("2.50"), one_word("1.5E+1")
      ('5', 'true', '2.50', '15')
    """
    text = re.sub(WHOLE_NUMBER, r"\1", str(value).strip(_SPACES))
    if re.search(EXPONENT, text):
        number = decimal.Decimal(text)
        if abs(number) < MOST_EXACT and number == number.to_integral_value():
            text = str(int(number))
    return ONE_TEXT.get(text) or text
