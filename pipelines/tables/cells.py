"""Cells of a table in SQL: one number, one text and one time for each value.

Programs write 5 as 5, 5.0 or 5.00, and true as True.  Here each of these has one text,
so that a table gives the same categories and users in CSV and in Parquet.  A number of
single precision or a decimal becomes the double that is nearest to its shortest text,
which is what a reader of that text gets.

Formal guarantees:
  - A value has the same number in every type that holds it, and in each text that
    pandas, polars, DuckDB, Spark and Arrow write for it.  A whole number has the same
    text, too, unless it is written with an exponent or as -0.
  - NaN is missing, and so is a value that equals a missing value.
  - A floating-point number has a text only if it is whole and its type tells it from
    its neighbours.
  - Days that no calendar has, and times outside of the years 1 to 9999, are malformed.
    A time with a zone is read in the zone of the schema.  Parts of a microsecond are
    cut off.
  - No cast is applied to a text before a pattern has held it: DuckDB's own casts take
    '1_000' for 1000, 'yes' for true, and drop '+02:00'.

Public: everything here.  Sensitive: what the expressions compute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

TEXT, BOOLEAN, INTEGER, FLOAT, DECIMAL = (
    "text",
    "boolean",
    "integer",
    "float",
    "decimal",
)
DATE, TIME, ZONED, LIST, OTHER = "date", "time", "zoned time", "list", "other"

NUMBERS = (INTEGER, FLOAT, DECIMAL)

#: How cells are read.  Change it when a cell may become another number or text.
CELLS_NAME = "dpsgd-cells-v4"

#: A whole number with zeros after the point.
_WHOLE_NUMBER = r"^(-?[0-9]+)\.0+$"
#: A number with an exponent, or of more digits than floating point holds.  What may be
#: hexadecimal, such as 12e4, is none.
_ROUNDED = r"^-?[0-9]+(\.[0-9]+[eE][-+]?|[eE][-+])[0-9]{1,3}$|^-?[1-9][0-9]{15,}\.0+$"
#: Text -> the one that it is read as; None for missing.
_ONE_TEXT = {
    "True": "true",
    "False": "false",
    "TRUE": "true",
    "FALSE": "false",
    "nan": None,
    "NaN": None,
}
#: From here on, floating-point numbers have neighbours that are not written.
MOST_EXACT = 2**53

_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
_SPACES = " \t\n\v\f\r"
_ISO = (
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"([Tt ]([01][0-9]|2[0-3]):[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?)?"
)
_ZONE = r"([Zz]|[+-][0-9]{2}(:?[0-9]{2})?)"


def literal(text: str) -> str:
    """Returns a text in SQL."""
    return "'" + text.replace("'", "''") + "'"


def listed(texts: Iterable[str]) -> str:
    """Returns texts in SQL, separated by commas."""
    return ", ".join(map(literal, texts))


def quoted(name: str) -> str:
    """Returns the name of a column in SQL."""
    return '"' + name.replace('"', '""') + '"'


def family(kind: str) -> str:
    """Returns what a type of DuckDB holds: one of the constants of this module.

    Example:
      >>> family("DECIMAL(10,2)"), family("VARCHAR[]"), family("TIMESTAMP_NS")
      ('decimal', 'list', 'time')
    """
    if kind.endswith("]"):
        return LIST
    name = re.split(r"[(_]", kind)[0]
    if kind == "TIMESTAMP WITH TIME ZONE" or name == "TIMESTAMPTZ":
        return ZONED
    if name.lstrip("U") in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT"):
        return INTEGER
    return {
        "VARCHAR": TEXT,
        "BLOB": TEXT,
        "ENUM": TEXT,
        "UUID": TEXT,
        "JSON": TEXT,
        "BOOLEAN": BOOLEAN,
        "FLOAT": FLOAT,
        "DOUBLE": FLOAT,
        "DECIMAL": DECIMAL,
        "DATE": DATE,
        "TIMESTAMP": TIME,
    }.get(name, OTHER)


def element(kind: str) -> str:
    """Returns the type of the elements of a list; itself if it is none."""
    return re.sub(r"\[[0-9]*\]$", "", kind)


def trimmed(cell: str, kind: str) -> str:
    """Returns a cell without the spaces around it, and a text as VARCHAR.

    Args:
      cell: Expression.
      kind: Type of DuckDB.
    """
    if family(kind) != TEXT:
        return cell
    if kind == "BLOB":
        cell = f"try(decode({cell}))"
    elif kind != "VARCHAR":
        cell = f"CAST({cell} AS VARCHAR)"
    # Cells rarely have spaces at an end, for which this looks first: trim is slow.
    return (
        f"CASE WHEN {cell} < '!' OR reverse({cell}) < '!' "
        f"THEN trim({cell}, {literal(_SPACES)}) ELSE {cell} END"
    )


def present(cell: str, kind: str, missing: Iterable[str]) -> str:
    """Returns a trimmed cell; null if it is missing.

    Args:
      cell: Expression.
      kind: Type of DuckDB.
      missing: Texts that stand for a missing value, besides the empty one.
    """
    if family(kind) != TEXT:
        return cell
    absent = listed(dict.fromkeys(("", *missing)))
    return f"CASE WHEN {cell} IN ({absent}) THEN NULL ELSE {cell} END"


def number(cell: str, kind: str) -> str:
    """Returns a clean cell as a double; null if it is missing or no number."""
    if family(kind) == TEXT:
        return (
            f"CASE WHEN NOT contains({cell}, '_') THEN TRY_CAST({cell} AS DOUBLE) END"
        )
    if kind == "FLOAT" or family(kind) == DECIMAL:
        return f"CAST(CAST({cell} AS VARCHAR) AS DOUBLE)"
    return f"CAST({cell} AS DOUBLE)"


def point_for_comma(text: str) -> str:
    """Returns a number that is written as 1.234,5 with a point; null for another."""
    pattern = r"-?([0-9]+|[0-9]{1,3}(\.[0-9]{3})+)(,[0-9]+)?"
    return (
        f"CASE WHEN regexp_full_match({text}, {literal(pattern)}) "
        f"THEN replace(replace({text}, '.', ''), ',', '.') END"
    )


def known_number(value: str, missing: Iterable[str]) -> str:
    """Returns a number; null if it is NaN or equals a missing value."""
    absent = ", ".join(number(literal(text), "VARCHAR") for text in missing if text)
    also = f" OR coalesce({value} IN ({absent}), false)" if absent else ""
    return f"CASE WHEN isnan({value}){also} THEN NULL ELSE {value} END"


def text(cell: str, kind: str) -> str:
    """Returns the one text of a clean cell; null if it is missing or has none."""
    held = family(kind)
    if held == FLOAT:
        most = 2**24 if kind == "FLOAT" else MOST_EXACT
        return (
            f"CASE WHEN floor({cell}) = {cell} AND abs({cell}) < {most} "
            f"THEN CAST(TRY_CAST({cell} AS BIGINT) AS VARCHAR) END"
        )
    if held == DECIMAL:
        cell = f"CAST({cell} AS VARCHAR)"
        return f"regexp_replace({cell}, {literal(_WHOLE_NUMBER)}, '\\1')"
    if held != TEXT:
        return f"CAST({cell} AS VARCHAR)"
    meant = " ".join(
        f"WHEN {literal(word)} THEN {literal(text) if text else 'NULL'}"
        for word, text in _ONE_TEXT.items()
    )
    # What begins with a digit or a minus may be a number; others are looked up.
    return (
        f"CASE WHEN {cell} < ':' THEN CASE WHEN contains({cell}, '.') "
        f"THEN regexp_replace({cell}, {literal(_WHOLE_NUMBER)}, '\\1') "
        f"ELSE {cell} END WHEN strlen({cell}) < 6 AND {cell} IN ({listed(_ONE_TEXT)}) "
        f"THEN CASE {cell} {meant} END ELSE {cell} END"
    )


def one_word(value: str | int) -> str:
    """Returns the one text of a category or class, as `text` reads it from cells.

    Example:
      >>> one_word(" 5.00 "), one_word(True), one_word("2.50")
      ('5', 'true', '2.50')
    """
    text = re.sub(_WHOLE_NUMBER, r"\1", str(value).strip(_SPACES))
    return _ONE_TEXT.get(text) or text


def rounded(cell: str, kind: str) -> str:
    """Returns whether a cell is a number with a fraction, or may have lost digits."""
    if family(kind) == DECIMAL:
        return f"coalesce(trunc({cell}) <> {cell}, false)"
    if family(kind) != TEXT:
        return "false"
    return f"coalesce(regexp_matches({cell}, {literal(_ROUNDED)}), false)"


def truth(cell: str, kind: str) -> str:
    """Returns 0 or 1 of a clean cell, a double; null if it is missing or neither."""
    if family(kind) in (TEXT, BOOLEAN):
        word = f"lower({text(cell, kind)})"
        return (
            f"CASE WHEN {word} IN ({listed(_TRUE)}) THEN 1.0::DOUBLE "
            f"WHEN {word} IN ({listed(_FALSE)}) THEN 0.0::DOUBLE END"
        )
    value = number(cell, kind)
    return f"CASE WHEN {value} IN (0, 1) THEN {value} END"


def time(cell: str, kind: str, form: str, zone: str) -> str:
    """Returns the local time of a clean cell; null if it is missing or malformed.

    Args:
      cell: Expression.
      kind: Type of DuckDB.
      form: Format of texts for strptime; empty for ISO 8601.
      zone: Time zone to which times with a zone are converted.
    """
    there = f"timezone({literal(zone)}, {{}})"
    if kind in ("TIMESTAMP_NS", "TIMESTAMPTZ_NS"):  # a cast would round
        nanoseconds = f"epoch_ns({cell})"
        borrowed = f"CASE WHEN {nanoseconds} % 1000 < 0 THEN 1 ELSE 0 END"
        found = f"make_timestamp({nanoseconds} // 1000 - {borrowed})"
        if family(kind) == ZONED:
            found = there.format(f"timezone('UTC', {found})")
    elif family(kind) == ZONED:
        found = there.format(cell)
    elif family(kind) != TEXT:
        found = f"TRY_CAST({cell} AS TIMESTAMP)"
    elif form.endswith("%z"):
        with_zone = f"regexp_replace({cell}, '[Zz]$', '+0000')"
        found = there.format(f"try_strptime({with_zone}, {literal(form)})")
    elif form:
        parsed = f"try_strptime({cell}, {literal(form)})"
        found = there.format(parsed) if "%z" in form else parsed
    else:
        zoned = f"TRY_CAST({cell} AS TIMESTAMP WITH TIME ZONE)"
        found = (
            f"CASE WHEN regexp_full_match({cell}, {literal(_ISO)}) "
            f"THEN TRY_CAST({cell} AS TIMESTAMP) "
            f"WHEN regexp_full_match({cell}, {literal(_ISO + _ZONE)}) "
            f"THEN {there.format(zoned)} END"
        )
    return found


def known_time(value: str, missing: Iterable[str], form: str, zone: str) -> str:
    """Returns a time; null if it equals a missing value, or is of no possible year.

    Args:
      value: Expression of a time.
      missing: Texts that stand for a missing value.
      form: As for ``time``.
      zone: As for ``time``.
    """
    absent = [time(literal(text), "VARCHAR", form, zone) for text in missing if text]
    also = f" OR coalesce({value} IN ({', '.join(absent)}), false)" if absent else ""
    return f"CASE WHEN NOT {in_calendar(value)}{also} THEN NULL ELSE {value} END"


def in_calendar(value: str) -> str:
    """Returns whether a time is of the years 1 to 9999."""
    return f"coalesce(isfinite({value}) AND year({value}) BETWEEN 1 AND 9999, false)"
