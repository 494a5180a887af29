"""One SELECT of a table: expressions by level, faults of rows, and its outputs.

    SELECT outputs, fault FROM (SELECT *, values FROM (SELECT *, ... FROM table))

An expression of a level may name those of the levels below it, so that a cell that is
used twice is computed once.  Texts of categories and words become ids outside of the
query, by our vectorised hash: that of DuckDB may change with its version.

Formal guarantees:
  - The first fault of a row, in the order of the schema, is the one that counts.
  - An id depends on the text, the name of its output and the schema alone.

Public: expressions and reasons.  Sensitive: what the query returns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.users.hashing import AFTER, buckets_of, hash_fields, words_of
from pipelines.tables import cells

#: Column of the query: 0, or the number of the first fault of the row.
FAULT = "__fault"
_NUM_LEVELS = 6


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
      decimal_comma: Whether numbers of texts are written as 1.234,5.

    Attributes:
      missing: Texts that stand for a missing value, besides the empty one.
      faults: Reasons of malformed rows, by number of the fault, from 1.
      ids: Name of an output of texts -> how they become ids.
    """

    def __init__(
        self,
        columns: Mapping[str, str],
        missing: Sequence[str] = (),
        *,
        decimal_comma: bool = False,
    ) -> None:
        self.missing = tuple(missing)
        self._columns, self._decimal_comma = columns, decimal_comma
        self.faults: list[str] = []
        self.ids: dict[str, Ids] = {}
        self._levels: list[dict[str, str]] = [{} for _ in range(_NUM_LEVELS)]
        self._conditions: list[str] = []
        self._outputs: dict[str, str] = {}

    def define(self, level: int, expression: str) -> str:
        """Returns a name for an expression of names of lower levels.

        Args:
          level: Its level, from 0.
          expression: The expression, or the name of a column at level 0.
        """
        known = self._levels[level]
        if expression not in known:
            known[expression] = f"v{level}_{len(known)}"
        return known[expression]

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
          name: Its name.
          expression: Expression.
          ids: How its texts become ids; None for numbers and texts that stay.
        """
        self._outputs[name] = expression
        if ids is not None:
            self.ids[name] = ids

    # Cells of columns, by their names in the table.

    def cell(self, column: str, kind: str) -> str:
        """Returns a cell without spaces around it, null if it is missing."""
        trimmed = self.define(0, cells.trimmed(self._columns[column], kind))
        if kind == "BLOB":
            raw = self.define(0, self._columns[column])
            self.fault(
                f"{raw} IS NOT NULL AND {trimmed} IS NULL", f"{column} is not UTF-8"
            )
        return self.define(1, cells.present(trimmed, kind, self.missing))

    def text(self, column: str, kind: str, reason: str) -> str:
        """Returns the one text of a cell; what has none is a fault."""
        cell = self.cell(column, kind)
        text = self.define(2, cells.text(cell, kind))
        if cells.family(kind) == cells.FLOAT:
            bad = f"{cell} IS NOT NULL AND NOT isnan({cell}) AND {text} IS NULL"
            self.fault(bad, f"{column} {reason}")
        return self.define(3, self.known(text))

    def known(self, text: str) -> str:
        """Returns the one text of a cell; null if it equals that of a missing value."""
        if not self.missing:
            return text
        return cells.present(text, "VARCHAR", map(cells.one_word, self.missing))

    def number(self, column: str, kind: str) -> tuple[str, str]:
        """Returns the number of a cell, and whether the cell is none.

        The number is null if it is missing or none; it may be NaN or a missing value.
        """
        cell = self.cell(column, kind)
        number = self.define(2, self.parsed(cell, kind))
        return number, f"{cell} IS NOT NULL AND {number} IS NULL"

    def parsed(self, cell: str, kind: str) -> str:
        """Returns a clean cell as a double, null if it is missing or no number."""
        if self._decimal_comma and cells.family(kind) == cells.TEXT:
            cell = cells.point_for_comma(cell)
        return cells.number(cell, kind)

    def user_id(self, column: str, kind: str) -> str:
        """Returns the one text of a user's id; what is none is a fault."""
        if cells.family(kind) == cells.TEXT:
            # nfkc is our function (see `reading`), for the few texts that need it.
            cell = self.define(0, cells.trimmed(self._columns[column], kind))
            is_ascii = f"strlen({cell}) = length({cell})"
            compatible = f"CASE WHEN {is_ascii} THEN {cell} ELSE nfkc({cell}) END"
            compatible = self.define(1, compatible)
            cell = self.define(2, cells.present(compatible, "VARCHAR", self.missing))
            kind = "VARCHAR"
        else:
            cell = self.cell(column, kind)
        text = self.define(3, cells.text(cell, kind))
        text = self.define(4, cells.present(text, "VARCHAR", self.missing))
        self.fault(
            f"{text} IS NULL", f"{column} is missing, or no whole number or text"
        )
        self.fault(
            cells.rounded(cell, kind),
            f"{column} is a number that floating point rounds; write ids as integers "
            "or texts",
        )
        return text

    def time(self, column: str, kind: str, form: str, zone: str, reason: str) -> str:
        """Returns the time of a cell; what is none is a fault.

        Args:
          column: Name of the column.
          kind: Its type.
          form: As for `cells.time`.
          zone: As for `cells.time`.
          reason: Predicate of a cell that is no time.
        """
        cell = self.cell(column, kind)
        time = self.define(2, cells.time(cell, kind, form, zone))
        bad = f"{cell} IS NOT NULL AND NOT {cells.in_calendar(time)}"
        self.fault(bad, f"{column} {reason}")
        return self.define(3, cells.known_time(time, self.missing, form, zone))

    def elements(self, column: str, kind: str, separator: str) -> tuple[str, str]:
        """Returns the elements of a list as one list of cells, and their type.

        Args:
          column: Name of the column.
          kind: Its type: a list, also nested, or a text.
          separator: Separator of the elements of a text.
        """
        if cells.family(kind) == cells.TEXT:
            split = (
                f"string_split({self.cell(column, kind)}, {cells.literal(separator)})"
            )
            found, kind = self.define(2, split), "VARCHAR"
        else:
            listed, nested = self._columns[column], 0
            while cells.family(kind) == cells.LIST:
                kind, nested = cells.element(kind), nested + 1
            listed = f"CAST({listed} AS {kind}{'[]' * nested})"  # also an ARRAY
            for _ in range(nested - 1):
                listed = f"flatten({listed})"
            found = self.define(0, listed)
        trimmed = f"list_transform({found}, lambda e: {cells.trimmed('e', kind)})"
        kind = "VARCHAR" if cells.family(kind) == cells.TEXT else kind
        present = cells.present("e", kind, self.missing)
        return self.define(3, f"list_transform({trimmed}, lambda e: {present})"), kind

    def sql(self, table: str, carried: Sequence[str] = ()) -> str:
        """Returns the query of a table.

        Args:
          table: What follows FROM.
          carried: Columns that are returned unchanged, as k0, k1, ...
        """
        passed = {name: f"k{number}" for number, name in enumerate(carried)}
        source = f"FROM {table}"
        for level, named in enumerate(self._levels):
            found = [f"{expression} AS {name}" for expression, name in named.items()]
            if level == 0:
                found += [f"{self._columns[n]} AS {k}" for n, k in passed.items()]
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
            *(f"{sql} AS {cells.quoted(name)}" for name, sql in self._outputs.items()),
            *passed.values(),
            f"CAST({fault} AS INTEGER) AS {FAULT}",
        ]
        return f"SELECT {', '.join(outputs)} {source}"


@functools.cache
def salt_of(name: str) -> np.uint64:
    """Returns the salt of the hash of a column or split."""
    data = name.encode()
    at = np.array([0, len(data)], np.int64)
    return np.uint64(
        hash_fields(words_of(data + AFTER), at[:1], at[1:], np.uint64(0))[0]
    )


def hash_texts(texts: pa.Array, salt: np.uint64) -> np.ndarray:
    """Returns uint64 hashes; null has the hash of the empty text.

    Args:
      texts: Texts.
      salt: From ``salt_of``.
    """
    if not len(texts):
        return np.empty(0, np.uint64)
    if texts.type != pa.large_string():
        texts = texts.cast(pa.large_string())
    _, offsets, data = texts.buffers()
    first, count = texts.offset, len(texts)
    at = np.frombuffer(offsets, np.int64)[first : first + count + 1]
    text = b"" if data is None else memoryview(data)[at[0] : at[-1]]
    at = at - at[0]
    return hash_fields(words_of(b"".join((text, AFTER))), at[:-1], at[1:], salt)
