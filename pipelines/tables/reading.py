"""Rows of a table as columns of numbers: one SELECT of each file, and our hash.

    reader = Reader(file, schema)
    for rows in reader: rows.arrays["age"]
    reader.refuse_malformed()

Every row of a file is in one block, in order, or is counted as malformed; a file that
is damaged is refused.  Equal rows give equal numbers, in whatever format, file or block
they are.  No message quotes a cell: DuckDB's own do, and are replaced by file, row and
reason.  Memory does not depend on the number of rows, except for the rejected rows of a
text file.

Public: schema, names, types and reasons.  Sensitive: rows, and how many are malformed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from duckdb.func import PythonUDFType

from accounting.core.validation import InputError, did_you_mean
from pipelines.core.hashing import GOLDEN, hash_texts, mix, salt_of
from pipelines.core.threads import num_cores
from pipelines.files.storage import StrPath
from pipelines.tables import cells, table_files
from pipelines.tables.cells import FAULT, Select
from pipelines.tables.kinds import USER_ID, Date, Kind, Label
from pipelines.tables.schema import HASH, RANDOM, TIME, Schema

#: Cells of a block, about, and its rows at most and at least.
_BLOCK_CELLS, _MOST_ROWS, _LEAST_ROWS = 1 << 22, 1 << 17, 1 << 11
#: Output of the text or place that decides a row's split.
_SPLIT = "__split"
_UNEVEN = "another number of cells"
_NO_SPLIT = "is missing, or no value to split by"
_OF_LISTS = (
    'a list has kind = "numeric" or "category" and length = 8, a text of several '
    'values also separator = "|", a single value neither'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Consecutive well-formed rows.  Sensitive.

    Attributes:
      arrays: Name of an output -> array of shape (rows, *shape).
      users: Texts of the ids of users; None if the schema has none.
      splits: Index in ``SPLITS`` of every row, int8; None if a split is by fraction.
      carried: Columns that are passed on unchanged.
      bytes_read: Bytes of the file that were read so far, about.
    """

    arrays: dict[str, np.ndarray] = dataclasses.field(repr=False)
    users: pa.Array | None = dataclasses.field(repr=False)
    splits: np.ndarray | None = dataclasses.field(repr=False)
    carried: pa.Table = dataclasses.field(repr=False)
    bytes_read: int


@dataclasses.dataclass
class Malformed:
    """Counts of malformed rows.  Sensitive.

    Attributes:
      num_good: Number of well-formed rows.
      reasons: Reason -> (number of rows, file and row of the first).
    """

    num_good: int = 0
    reasons: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def add(self, reason: str, count: int, place: str) -> None:
        """Adds later rows with one reason.

        Args:
          reason: The reason.
          count: Number of rows.
          place: File and row of the first.
        """
        before, first = self.reasons.get(reason, (0, place))
        self.reasons[reason] = before + count, first

    def merge(self, other: Malformed) -> None:
        """Adds the counts of later rows."""
        self.num_good += other.num_good
        for reason, (count, place) in other.reasons.items():
            self.add(reason, count, place)

    @property
    def num_bad(self) -> int:
        """Number of malformed rows."""
        return sum(count for count, _ in self.reasons.values())

    def told(self, *, counted: bool = True) -> list[str]:
        """Returns each reason, with the place of the first row, and how many it has."""
        return [
            f"{place}: {reason}{f' ({count} rows)' if counted and count > 1 else ''}"
            for reason, (count, place) in self.reasons.items()
        ]

    def refuse(self, schema: Schema, *, skip: bool | None = None) -> None:
        """Refuses malformed rows, unless they are to be left out and others stay.

        Args:
          schema: Schema of the table.
          skip: Whether malformed rows are left out; None where they cannot be.

        Raises:
          InputError: there are malformed rows.
        """
        if not self.num_bad or (skip and self.num_good):
            return
        remedy = "" if skip is None else " `--on-bad-row skip` leaves them out."
        some = f"{self.num_bad} of {self.num_bad + self.num_good}"
        raise InputError(
            f"Expected well-formed rows; {'some' if schema.user else some} are "
            f"malformed: {'; '.join(self.told(counted=not schema.user))}. Fix them or "
            f"the schema.{remedy}"
        )


def check_columns(
    file: table_files.TableFile, schema: Schema, *, inputs_only: bool = False
) -> dict[str, str]:
    """Returns name -> type of a file's columns, after checking those that are needed.

    Args:
      file: File of a table.
      schema: Schema of the table.
      inputs_only: Whether neither label nor split is needed.

    Raises:
      InputError: a column is missing, or of a type that its kind does not accept.
    """
    found = table_files.columns_of(file, schema.input, schema.label_name)
    needed = schema.inputs if inputs_only else schema.needed
    table_files.refuse_missing(needed, list(found), file, schema.input)
    wrong = {}
    for name in needed:
        kind = schema.columns.get(name)
        remedy = refusal(kind, found[name]) if kind else None
        if remedy is None and name == schema.split.column and not inputs_only:
            remedy = _split_refusal(schema, found[name])
        if remedy is not None:
            wrong[name] = remedy
    if wrong:
        told = ", ".join(f"{n} of type {found[n]} ({why})" for n, why in wrong.items())
        raise InputError(
            f"Expected columns of {file.shown} to be of the kinds that the schema "
            f"gives them; these are not: {told}."
        )
    return found


def refusal(kind: Kind, found: str) -> str | None:
    """Returns the remedy for cells of a type that a kind does not accept; else None.

    Args:
      kind: Kind of the column in the schema.
      found: Type of the column in DuckDB.
    """
    base = cells.element(found)
    held = cells.family(base)
    if kind.kind == "drop" or base in ("NULL", '"NULL"'):
        return None  # without values it can be of any kind
    is_split = held == cells.TEXT and bool(getattr(kind, "separator", ""))
    if found != "JSON" and (base != found or is_split) != kind.is_list:
        return _OF_LISTS
    if held == cells.TEXT:
        return None
    if found == "INTERVAL":
        return 'a duration has no unit here: write its seconds, or kind = "drop"'
    if held not in kind.takes:
        takes = ", ".join((cells.TEXT, *kind.takes))
        return f'{kind.kind} takes {takes}: write kind = "{kind_of_type(found)}"'
    if isinstance(kind, Label) and held == cells.BOOLEAN:
        counted = kind.task == "regression" or isinstance(kind.classes, int)
        return 'write task = "binary"' if counted else None
    return None


def kind_of_type(found: str) -> str:
    """Returns the kind of a first schema: numeric, boolean, category, date or drop.

    Example:
      >>> kind_of_type("VARCHAR"), kind_of_type("FLOAT[]"), kind_of_type("TIME")
      ('category', 'numeric', 'drop')
    """
    return {
        **dict.fromkeys(cells.NUMBERS, "numeric"),
        **dict.fromkeys(Date.takes, "date"),
        cells.BOOLEAN: "boolean",
        cells.TEXT: "category",
    }.get(cells.family(cells.element(found)), "drop")


def _split_refusal(schema: Schema, found: str) -> str | None:
    """Returns why a type cannot split rows as the schema says; None if it can."""
    by = schema.split.by
    good = (cells.TEXT, *Date.takes)
    if by == HASH:  # a time has many texts
        good = (cells.TEXT, cells.DATE, cells.BOOLEAN, *cells.NUMBERS)
    if cells.family(found) in good:
        return None
    return f"a split by {by} takes {', '.join(good)}"


@dataclasses.dataclass
class Reader:
    """The rows of a file.

    Attributes:
      file: File of a table.
      schema: Schema of the table.
      ordinal: Place of the file in the table, which a random split depends on.
      inputs_only: Whether to omit label and split, for predictions.
      carried: Columns that are passed on unchanged.
      num_threads: Threads of DuckDB.
      memory_limit: Memory of DuckDB, in bytes.
      malformed: What is known of malformed rows when all were read.
    """

    file: table_files.TableFile
    schema: Schema
    ordinal: int = 0
    inputs_only: bool = False
    carried: Sequence[str] = ()
    num_threads: int = 1
    memory_limit: int = 1 << 30
    malformed: Malformed = dataclasses.field(default_factory=Malformed, init=False)

    def __iter__(self) -> Iterator[Rows]:
        """Yields blocks of rows in order.

        Raises:
          InputError: the file is damaged.
        """
        with (
            table_files.plain_errors(self.file),
            table_files.connect(
                num_threads=self.num_threads, memory_limit=self.memory_limit
            ) as database,
        ):
            database.create_function(
                "nfkc", _nfkc, ["VARCHAR"], "VARCHAR", type=PythonUDFType.ARROW
            )
            relation = table_files.relation_of(self.file, self.schema, database)
            select = self._select(relation)
            query = select.sql(relation.sql)
            size = _BLOCK_CELLS // max(1, len(relation.columns))
            size = min(_MOST_ROWS, max(_LEAST_ROWS, size))
            found = database.sql(query).to_arrow_reader(size)
            bad: dict[str, tuple[int, int]] = {}
            num_read = 0
            for block in found:
                if not len(block):
                    continue
                yield from self._rows(block, select, num_read, bad)
                num_read += len(block)
            is_text = self.file.format in (table_files.TEXT, table_files.JSON)
            rejected = _rejected(database, self.file) if is_text else []
        self._place(bad, rejected, relation.first_row)

    def _select(self, relation: table_files.Relation) -> Select:
        """Returns the query of the schema."""
        schema = self.schema
        options = schema.input
        is_text = self.file.format == table_files.TEXT
        select = Select(
            relation.columns,
            options.missing_values,
            carried=self.carried,
            decimal_comma=options.decimal_comma and is_text,
        )
        for condition, reason in relation.faults:
            select.fault(select.define(0, condition), reason)
        names = schema.inputs if self.inputs_only else schema.kept
        for name in names:
            kind, found = schema.columns[name], relation.types[name]
            outputs = [output.name for output in schema.outputs_of(name)]
            kind.select(select.cell(name, found), outputs)
        if schema.split.column and not self.inputs_only:
            self._select_split(select, relation.types[schema.split.column])
        return select

    def _select_split(self, select: Select, kind: str) -> None:
        """Adds what decides a row's split, by the split column of the schema."""
        split = self.schema.split
        cell = select.cell(split.column, kind)
        if split.by == HASH:
            # A user's rows are in one split.
            is_user = split.column == self.schema.user
            text = cell.user_id() if is_user else cell.text(_NO_SPLIT)
            cell.fault(f"{text} IS NULL", _NO_SPLIT)
            select.output(_SPLIT, text)
        if split.by == TIME:
            known = self.schema.columns.get(split.column)
            date = known if isinstance(known, Date) else Date()
            missing = "is missing, or no date to split by"
            time = cell.time(date.format, date.zone, missing)
            cell.fault(f"{time} IS NULL", missing)
            starts = [
                f"TIMESTAMP {cells.literal(str(each))}"
                for each in (split.test_from, split.val_from)
            ]
            select.output(
                _SPLIT,
                f"CASE WHEN {time} >= {starts[0]} THEN 2::TINYINT "
                f"WHEN {time} >= {starts[1]} THEN 1::TINYINT ELSE 0::TINYINT END",
            )

    def _rows(
        self,
        block: pa.RecordBatch,
        select: Select,
        first: int,
        bad: dict[str, tuple[int, int]],
    ) -> Iterator[Rows]:
        """Yields the well-formed rows of a block; notes the others in ``bad``."""
        faults = block.column(FAULT).to_numpy()
        places = np.arange(first, first + len(block))
        if faults.any():
            for fault in np.unique(faults[faults > 0]).tolist():
                rows, reason = np.flatnonzero(faults == fault), select.faults[fault - 1]
                count, row = bad.get(reason, (0, first + int(rows[0])))
                bad[reason] = count + len(rows), row
            good = faults == 0
            block, places = block.filter(pa.array(good)), places[good]
        if not len(block):
            return
        names, row_bytes = block.schema.names, self.file.row_bytes
        found: dict[str, np.ndarray] = {}
        users = None
        for name, array in zip(names, block.columns, strict=True):
            if name in (FAULT, _SPLIT, *select.carried):
                continue
            if name in select.ids:
                found[name] = select.ids[name].of(array)
            elif name == USER_ID:
                users = array.cast(pa.large_string())
            else:
                found[name] = _numbers(array)
        for name, members in self.schema.stacks.items():
            found[name] = np.stack([found.pop(each.name) for each in members], axis=1)
        yield Rows(
            arrays=found,
            users=users,
            splits=self._splits(block, places),
            carried=pa.table(
                [block.column(name) for name in select.carried],
                names=list(self.carried),
            ),
            bytes_read=min(self.file.size, int((first + len(block)) * row_bytes)),
        )
        self.malformed.num_good += len(block)

    def _splits(self, block: pa.RecordBatch, places: np.ndarray) -> np.ndarray | None:
        """Returns the split of every row, int8; None if it is by fraction."""
        split = self.schema.split
        if self.inputs_only or split.by not in (RANDOM, HASH, TIME):
            return None
        if split.by == TIME:
            return np.asarray(block.column(_SPLIT).to_numpy())
        salt = salt_of(f"split {split.salt}")
        if split.by == HASH:
            hashes = hash_texts(block.column(_SPLIT), salt)
        else:
            hashes = _hash_places(self.ordinal, places, salt)
        unit = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53
        bounds = np.cumsum(split.shares)[:2] / sum(split.shares)
        return np.searchsorted(bounds, unit, side="right").astype(np.int8)

    def _place(
        self, bad: dict[str, tuple[int, int]], rejected: list[int], first: int
    ) -> None:
        """Notes the first malformed rows, also those that DuckDB left out."""
        found = [(rejected[0], _UNEVEN, len(rejected))] if rejected else []
        for reason, (count, place) in bad.items():
            row = place + first
            for line in rejected:
                if line > row:
                    break
                row += 1
            found.append((row, reason, count))
        for row, reason, count in sorted(found):
            self.malformed.add(reason, count, f"{self.file.shown}:{row}")


def _numbers(array: pa.Array) -> np.ndarray:
    """Returns an array of shape (rows, ...)."""
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        return np.asarray(array.flatten().to_numpy()).reshape(-1, size)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _nfkc(texts: pa.Array) -> pa.Array:
    return pc.utf8_trim_whitespace(pc.utf8_normalize(texts, form="NFKC"))


def _hash_places(ordinal: int, places: np.ndarray, salt: np.uint64) -> np.ndarray:
    """Returns uint64 hashes of places of rows in a file of a table."""
    state = mix(np.array([ordinal], np.uint64) * np.uint64(GOLDEN) ^ salt)
    return mix(places.astype(np.uint64) * np.uint64(GOLDEN) ^ state)


def _rejected(database: object, file: table_files.TableFile) -> list[int]:
    """Returns the rows that DuckDB left out of a text, in order.

    Its table of them holds whole rows: only line and type are read, and the database
    is closed.

    Raises:
      InputError: a text that is not of its encoding, or with an open quotation.
    """
    query = "SELECT DISTINCT line, CAST(error_type AS VARCHAR) FROM reject_errors"
    query = f"{query} ORDER BY 1"
    found = database.execute(query).fetchall()  # type: ignore[attr-defined]
    for line, kind in found:
        if kind == "INVALID ENCODING":
            told = f"Expected line {line} of {file.shown} to be text."
            raise InputError(f"{told} {table_files.NOT_UTF8}")
        if kind not in ("MISSING COLUMNS", "TOO MANY COLUMNS"):
            raise InputError(
                f"Expected line {line} of {file.shown} to have at most 2 MB, and a "
                'quotation mark (") at the end of each cell that begins with one. If '
                "no cell is quoted, write quotes = false below [input] of the schema."
            )
    return list(dict.fromkeys(line for line, _ in found))


# --- Inputs of a model --------------------------------------------------------------

#: Inputs of some rows, their carried columns, and the number of bytes read so far.
Part = tuple[dict[str, np.ndarray], pa.Table, int]


class RawInputs:
    """The rows of a table, without labels.

    Args:
      data: A file, a folder or a glob.
      schema: Schema of the training examples, from the manifest of their batches.
      carried: Columns that are passed on unchanged, such as an id.

    Attributes:
      num_bytes: Bytes of all files.

    A row becomes the inputs that ``prepare`` makes of it; neither label nor split is
    needed.  All rows come in order: a malformed one is an error.

    Raises:
      InputError: there is no table, or its columns do not fit the schema.
    """

    def __init__(
        self, data: StrPath, schema: Schema, carried: Sequence[str] = ()
    ) -> None:
        self._files = table_files.list_table(data)
        self._schema, self._carried = schema, tuple(carried)
        self.num_bytes = sum(file.size for file in self._files)
        first: dict[str, str] = {}
        for file in self._files:
            found = check_columns(file, schema, inputs_only=True)
            for name in self._carried:
                if name not in found:
                    raise InputError(
                        f"Expected column {name}, which is to be carried, in "
                        f"{file.shown}.{did_you_mean(name, list(found))}"
                    )
                if first.setdefault(name, found[name]) != found[name]:
                    raise InputError(
                        f"Expected column {name}, which is to be carried, to be of one "
                        f"type in all files, not {first[name]} and {found[name]}."
                    )

    def parts(self, num_rows: int) -> Iterator[Part]:
        """Yields all rows in order, at least ``num_rows`` at a time except at the end.

        Raises:
          InputError: a malformed row, or a damaged file.
        """
        waiting: list[Part] = []
        count, any_rows = 0, False
        for part in self._blocks():
            any_rows = True
            waiting.append(part)
            count += len(next(iter(part[0].values())))
            if count >= num_rows:
                yield _joined(waiting)
                waiting, count = [], 0
        if waiting:
            yield (*_joined(waiting)[:2], self.num_bytes)
        elif not any_rows:
            raise InputError(f"Expected rows in {self._files[0].shown}; it has none.")

    def _blocks(self) -> Iterator[Part]:
        before = 0
        how: Any = {"inputs_only": True, "num_threads": num_cores()}
        for file in self._files:
            reader = Reader(file, self._schema, carried=self._carried, **how)
            for rows in reader:
                if reader.malformed.num_bad:
                    continue  # what would be yielded is of no use
                yield rows.arrays, rows.carried, before + rows.bytes_read
            before += file.size
            reader.malformed.refuse(self._schema)


def _joined(parts: Sequence[Part]) -> Part:
    names = parts[0][0]
    inputs = {n: np.concatenate([each[n] for each, _, _ in parts]) for n in names}
    return inputs, pa.concat_tables([each for _, each, _ in parts]), parts[-1][2]
