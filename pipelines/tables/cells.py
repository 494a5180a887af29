"""Cells of a table in SQL, and one SELECT of a table that is made of them.

Programs write 5 as 5, 5.0 or 5.00, and true as True.  Here each of these has one text,
so that a table gives the same categories and users in CSV and in Parquet.  A number of
single precision or a decimal becomes the double that is nearest to its shortest text,
which is what a reader of that text gets.

    SELECT outputs, fault FROM (SELECT *, values FROM (SELECT *, ... FROM table))

An expression of a level may name those of the levels below it, so that a cell that is
used twice is computed once.  Texts of categories and words become ids outside of the
query, by our vectorised hash: that of DuckDB may change with its version.  An id
depends on the text, the name of its output and the schema alone.

How cells are read:
  - The first fault of a row, in the order of the schema, is the one that counts.
  - A value has the same number in every type that holds it, and in each text that
    pandas, polars, DuckDB, Spark and Arrow write for it.  A whole number has the same
    text, too, unless it is written with an exponent or as -0.
  - NaN is missing, and so is a value that equals a missing value.
  - A floating-point number has a text only if it is whole and its type tells it from
    its neighbours.
  - Days that no calendar has, and times outside of the years 1 to 9999, are malformed.
    A time with a zone is read in the zone of the schema.  Parts of a microsecond are
    cut off.
  - No cast is applied to a text that no pattern has matched: DuckDB's own casts take
    '1_000' for 1000, 'yes' for true, and drop '+02:00'.

Public: expressions and reasons.  Sensitive: what they compute.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.hashing import buckets_of, hash_texts, salt_of

#: What a type of DuckDB may hold; see ``family``.
TEXT, BOOLEAN, LIST, OTHER = "text", "boolean", "list", "other"
DATE, TIME, ZONED = "date", "time", "zoned time"
NUMBERS = INTEGER, FLOAT, DECIMAL = "integer", "float", "decimal"
_FAMILIES = {
    TEXT: ("VARCHAR", "BLOB", "ENUM", "UUID", "JSON"),
    BOOLEAN: ("BOOLEAN",),
    INTEGER: ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT"),
    FLOAT: ("FLOAT", "DOUBLE"),
    DECIMAL: ("DECIMAL",),
    DATE: ("DATE",),
    TIME: ("TIMESTAMP",),
    ZONED: ("TIMESTAMPTZ",),
}
_FAMILY = {name: held for held, names in _FAMILIES.items() for name in names}

#: Column of the query: 0, or the number of the first fault of the row.
FAULT = "__fault"
_NUM_LEVELS = 6

#: How cells are read.  Change it when a cell may become another number or text.
CELLS_NAME = "dpsgd-cells-v4"

#: A whole number with zeros after the point.
_WHOLE_NUMBER = r"^(-?[0-9]+)\.0+$"
#: A number with an exponent, or of more digits than floating point holds.  What may be
#: hexadecimal, such as 12e4, is none.
_ROUNDED = r"^-?[0-9]+(\.[0-9]+[eE][-+]?|[eE][-+])[0-9]{1,3}$|^-?[1-9][0-9]{15,}\.0+$"
#: Text -> the one that it is read as; None for missing.
_ONE_TEXT = {
    **dict.fromkeys(("True", "TRUE"), "true"),
    **dict.fromkeys(("False", "FALSE"), "false"),
    **dict.fromkeys(("nan", "NaN"), None),
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
    if kind == "TIMESTAMP WITH TIME ZONE":
        return ZONED
    name = re.split(r"[(_]", kind)[0]
    return _FAMILY.get(name) or _FAMILY.get(name.removeprefix("U"), OTHER)


def element(kind: str) -> str:
    """Returns the type of what lists hold, however nested; itself if it is no list."""
    return re.sub(r"(\[[0-9]*\])+$", "", kind)


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
    """Returns a clean cell as a double; null if it is missing or no number.

    Args:
      cell: Expression.
      kind: Type of DuckDB.
    """
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
    """Returns a number; null if it is NaN or equals a missing value.

    Args:
      value: Expression of a double.
      missing: Texts that stand for a missing value.
    """
    absent = [number(literal(text), "VARCHAR") for text in missing if text]
    return _unless(f"isnan({value})", absent, value)


def _unless(bad: str, absent: Sequence[str], value: str) -> str:
    """Returns a value; null if it is bad, or one of those that stand for none."""
    also = f" OR coalesce({value} IN ({', '.join(absent)}), false)" if absent else ""
    return f"CASE WHEN {bad}{also} THEN NULL ELSE {value} END"


def text(cell: str, kind: str) -> str:
    """Returns the one text of a clean cell; null if it is missing or has none.

    Args:
      cell: Expression.
      kind: Type of DuckDB.
    """
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
    """Returns whether a cell is a number with a fraction, or may have lost digits.

    Args:
      cell: Expression.
      kind: Type of DuckDB.
    """
    if family(kind) == DECIMAL:
        return f"coalesce(trunc({cell}) <> {cell}, false)"
    if family(kind) != TEXT:
        return "false"
    return f"coalesce(regexp_matches({cell}, {literal(_ROUNDED)}), false)"


def truth(cell: str, kind: str) -> str:
    """Returns 0 or 1 of a clean cell, a double; null if it is missing or neither.

    Args:
      cell: Expression.
      kind: Type of DuckDB.
    """
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
    return _unless(f"NOT {in_calendar(value)}", absent, value)


def in_calendar(value: str) -> str:
    """Returns whether a time is of the years 1 to 9999."""
    return f"coalesce(isfinite({value}) AND year({value}) BETWEEN 1 AND 9999, false)"


# --- The query ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids:
    """How texts become ids.

    Attributes:
      buckets: Number of ids of hashed texts, including 0 for missing.
      vocabulary: Texts with ids of their own, from 2; 1 is for all others.
      salt: Name of the output, which salts the hash.
      length: Length to which lists are padded with 0; None for single texts.
    """

    buckets: int
    salt: str
    vocabulary: Sequence[str] | None = None
    length: int | None = None

    def of(self, texts: pa.Array) -> np.ndarray:
        """Returns int32 ids of texts, or of lists of them; 0 for null."""
        if self.length is None:
            return self._of_texts(texts)
        offsets = texts.offsets.to_numpy()
        ids = self._of_texts(texts.values[int(offsets[0]) : int(offsets[-1])])
        counts = pc.fill_null(pc.list_value_length(texts), 0).to_numpy()
        present = np.arange(self.length) < counts[:, None]
        found = np.zeros((len(texts), self.length), np.int32)
        found[present] = ids
        return found

    def _of_texts(self, texts: pa.Array) -> np.ndarray:
        if self.vocabulary is None:
            hashes = hash_texts(texts, salt_of(self.salt))
            ids = buckets_of(hashes, self.buckets).astype(np.int32)
        else:
            index = pc.fill_null(pc.index_in(texts, pa.array(self.vocabulary)), -1)
            ids = index.to_numpy(zero_copy_only=False).astype(np.int32) + np.int32(2)
        ids[texts.is_null().to_numpy(zero_copy_only=False)] = 0
        return ids


class Select:
    """A query in the making.

    Args:
      columns: Name of a column of the table -> its name in SQL.
      missing: Texts that stand for a missing value, besides the empty one.
      carried: Columns of the table that are returned unchanged.
      decimal_comma: Whether numbers of texts are written as 1.234,5.

    Attributes:
      carried: Name of a carried column in the result -> its name in SQL.
      missing: Texts that stand for a missing value, besides the empty one.
      decimal_comma: Whether numbers of texts are written as 1.234,5.
      faults: Reasons of malformed rows, by number of the fault, from 1.
      ids: Name of an output of texts -> how they become ids.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        missing: Sequence[str] = (),
        *,
        carried: Sequence[str] = (),
        decimal_comma: bool = False,
    ) -> None:
        self.missing, self.decimal_comma = tuple(missing), decimal_comma
        self.faults: list[str] = []
        self.ids: dict[str, Ids] = {}
        self.carried = {f"k{place}": columns[n] for place, n in enumerate(carried)}
        self._columns = columns
        self._levels: list[dict[str, str]] = [{} for _ in range(_NUM_LEVELS)]
        self._conditions: list[str] = []
        self._outputs: dict[str, str] = {}

    def define(self, level: int, expression: str) -> str:
        """Returns a name for an expression of names of lower levels.

        Args:
          level: Level of the expression, from 0.
          expression: The expression, or the name of a column at level 0.
        """
        known = self._levels[level]
        return known.setdefault(expression, f"v{level}_{len(known)}")

    def fault(self, condition: str, reason: str) -> None:
        """Adds a condition under which a row is malformed.

        Args:
          condition: Expression; null is false.
          reason: Reason, for messages.
        """
        self._conditions.append(condition)
        self.faults.append(reason)

    def output(self, name: str, expression: str, ids: Ids | None = None) -> None:
        """Adds an output.

        Args:
          name: Name of the output.
          expression: Expression.
          ids: How its texts become ids; None for numbers and texts that stay.
        """
        self._outputs[name] = expression
        if ids is not None:
            self.ids[name] = ids

    def cell(self, column: str, kind: str) -> Cell:
        """Returns the cell of a column.

        Args:
          column: Name of the column in the table.
          kind: Its type in DuckDB.
        """
        return Cell(self, column, kind, self._columns[column])

    def sql(self, table: str) -> str:
        """Returns the query of a table: what follows FROM."""
        source = f"FROM {table}"
        for level, named in enumerate(self._levels):
            found = [f"{expression} AS {name}" for expression, name in named.items()]
            if level == 0:
                found += [f"{sql} AS {name}" for name, sql in self.carried.items()]
                found = found or ["0 AS nothing"]
            else:
                found = ["*", *found]
            if level == 0 or len(found) > 1:
                source = f"FROM (SELECT {', '.join(found)} {source})"
        cases = " ".join(
            f"WHEN {condition} THEN {number}"
            for number, condition in enumerate(self._conditions, start=1)
        )
        fault = f"CASE {cases} ELSE 0 END" if cases else "0"
        outputs = [
            *(f"{sql} AS {quoted(name)}" for name, sql in self._outputs.items()),
            *self.carried,
            f"CAST({fault} AS INTEGER) AS {FAULT}",
        ]
        return f"SELECT {', '.join(outputs)} {source}"


class Cell:
    """A cell of a column in a query, by what it holds.

    Args:
      select: The query.
      column: Name of the column, for messages.
      kind: Its type in DuckDB.
      raw: Its name in SQL.
    """

    def __init__(self, select: Select, column: str, kind: str, raw: str) -> None:
        self.select, self.column, self.kind, self._raw = select, column, kind, raw
        self.family = family(kind)

    def fault(self, condition: str, reason: str) -> None:
        """Adds a condition under which a row is malformed, as `Select.fault` does.

        Args:
          condition: Expression; null is false.
          reason: What the column is then.
        """
        self.select.fault(condition, f"{self.column} {reason}")

    @functools.cached_property
    def known(self) -> str:
        """The cell without spaces around it, null if it is missing."""
        define = self.select.define
        found = define(0, trimmed(self._raw, self.kind))
        if self.kind == "BLOB":
            raw = define(0, self._raw)
            self.fault(f"{raw} IS NOT NULL AND {found} IS NULL", "is not UTF-8")
        return define(1, present(found, self.kind, self.select.missing))

    def is_nan(self) -> str:
        """Returns whether the cell is NaN, which is missing."""
        if self.family == FLOAT:
            return f"coalesce(isnan({self.known}), false)"
        if self.family == TEXT:
            return f"coalesce({self.known} IN ('nan', 'NaN'), false)"
        return "false"

    def text(self, reason: str) -> str:
        """Returns the one text; a cell that has none is a fault.

        Args:
          reason: What the column is then.
        """
        cell = self.known
        found = self.select.define(2, text(cell, self.kind))
        if self.family == FLOAT:
            bad = f"{cell} IS NOT NULL AND NOT isnan({cell}) AND {found} IS NULL"
            self.fault(bad, reason)
        return self.select.define(3, self.known_text(found))

    def known_text(self, found: str) -> str:
        """Returns the one text of a value; null if it equals that of a missing one."""
        missing = self.select.missing
        return present(found, "VARCHAR", map(one_word, missing)) if missing else found

    def parsed(self, cell: str, kind: str = "") -> str:
        """Returns a clean cell as a double, null if it is missing or no number.

        Args:
          cell: Expression.
          kind: Its type; empty for that of this cell.
        """
        if self.select.decimal_comma and family(kind or self.kind) == TEXT:
            cell = point_for_comma(cell)
        return number(cell, kind or self.kind)

    def number(self, reason: str = "") -> str:
        """Returns the number, null if it is missing or none.

        Args:
          reason: What the column is if it is none; empty for no fault.
        """
        cell = self.known
        found = self.select.define(2, self.parsed(cell))
        if reason:
            self.fault(f"{cell} IS NOT NULL AND {found} IS NULL", reason)
        return self.select.define(3, known_number(found, self.select.missing))

    def user_id(self) -> str:
        """Returns the one text of a user's id; a cell without an id is a fault."""
        define, missing, kind = self.select.define, self.select.missing, self.kind
        if self.family == TEXT:
            # nfkc is our function (see `reading`), for the few texts that need it.
            cell = define(0, trimmed(self._raw, kind))
            is_ascii = f"strlen({cell}) = length({cell})"
            cell = define(1, f"CASE WHEN {is_ascii} THEN {cell} ELSE nfkc({cell}) END")
            cell, kind = define(2, present(cell, "VARCHAR", missing)), "VARCHAR"
        else:
            cell = self.known
        found = define(4, present(define(3, text(cell, kind)), "VARCHAR", missing))
        self.fault(f"{found} IS NULL", "is missing, or no whole number or text")
        self.fault(
            rounded(cell, kind),
            "is a number that floating point rounds; write ids as integers or texts",
        )
        return found

    def time(self, form: str, zone: str, reason: str) -> str:
        """Returns the time; a cell that is no time is a fault.

        Args:
          form: As for `time`.
          zone: As for `time`.
          reason: What the column is then.
        """
        cell = self.known
        found = self.select.define(2, time(cell, self.kind, form, zone))
        self.fault(f"{cell} IS NOT NULL AND NOT {in_calendar(found)}", reason)
        known = known_time(found, self.select.missing, form, zone)
        return self.select.define(3, known)

    def elements(self, separator: str) -> tuple[str, str]:
        """Returns the elements of a list as one list of cells, and their type.

        Args:
          separator: Separator of the elements of a text.
        """
        kind, define = self.kind, self.select.define
        if self.family == TEXT:
            split = f"string_split({self.known}, {literal(separator)})"
            found, kind = define(2, split), "VARCHAR"
        else:
            kind = element(kind)
            nested = self.kind.removeprefix(kind).count("[")
            listed = f"CAST({self._raw} AS {kind}{'[]' * nested})"  # also an ARRAY
            for _ in range(nested - 1):
                listed = f"flatten({listed})"
            found = define(0, listed)
        found = f"list_transform({found}, lambda e: {trimmed('e', kind)})"
        kind = "VARCHAR" if family(kind) == TEXT else kind
        each = present("e", kind, self.select.missing)
        return define(3, f"list_transform({found}, lambda e: {each})"), kind
