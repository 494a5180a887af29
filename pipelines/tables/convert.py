"""What every format of a raw table has in common: blocks, counts, splits, refusals.

A ``Format`` (Criteo's lines, or any table with a schema) reads files in blocks and
converts and counts their rows; ``prepare_job`` writes them.

Formal guarantees:
  - ``split_counts`` ends each split at ``round_half_up(rows * cumulative share)``.
  - No message holds content of a row.

Public: options and schema.  Sensitive: rows, and the number of malformed ones.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from accounting.core.validation import InputError, check_choice, check_int
from pipelines.tables.raw_files import InputFile
from pipelines.tables.schema.column_kinds import NO_CLASS

SPLITS = ("train", "val", "test")
ON_BAD_ROW = ("fail", "skip")
#: A row group is a block of the batch job, which holds a few at a time.
DEFAULT_ROW_GROUP_ROWS = 131_072
#: About 4 million rows, 200 MB, per file of Criteo's data.
ROW_GROUPS_PER_FILE = 32

_REPORTED_ROWS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedBlock:
    """A parsed block of rows.  Sensitive.

    Attributes:
      num_rows: Number of rows, good and bad.
      reasons: Index of each malformed row -> reason, without its content.
      splits: Index in ``SPLITS`` of every good row, int8; None if shares decide.
      table: The good rows in order.
      classes: Indices of the classes that the label of a good row has.
    """

    num_rows: int
    reasons: Mapping[int, str]
    table: pa.Table = dataclasses.field(repr=False)
    splits: np.ndarray | None = None
    classes: Sequence[int] = ()

    def by_split(self) -> list[pa.Table]:
        """Returns the rows of each split; all rows in one table if shares decide."""
        if self.splits is None:
            return [self.table]
        return [
            self.table.filter(pa.array(self.splits == split))
            for split in range(len(SPLITS))
        ]


def arrow_table(columns: Iterable[np.ndarray], schema: pa.Schema) -> pa.Table:
    """Returns columns of shape (rows, ...) as a table, without copies if possible.

    Args:
      columns: A column for each field, in order.
      schema: Fields of numbers, or of lists of fixed sizes of them.
    """
    found = zip(columns, schema, strict=True)
    return pa.table([as_array(values, field.type) for values, field in found], schema)


def as_array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Returns values of shape (rows, ...) as a column.

    Args:
      values: Numbers of the type of the column.
      kind: Their type, in a list of a fixed size for each further axis.
    """
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values, kind)
    inner = as_array(values.reshape(-1, *values.shape[2:]), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(inner, type=kind)


class Format:
    """How files become blocks, and blocks become columns.

    Attributes:
      schema: Schema of the output files, with the description of the data set.
      shares: Shares of train, val and test, in any unit; None if blocks hold splits.
      first_row: Number of the first row of a file, for messages.
      left_out: Columns of the files that are not read.
      has_users: Whether numbers of rows are sensitive, since they depend on how many
        rows each user has.
    """

    schema: pa.Schema
    shares: Sequence[int] | None
    first_row = 1
    left_out: Sequence[str] = ()
    has_users = False

    def blocks(self, file: InputFile) -> Iterator[tuple[Any, int]]:
        """Yields blocks of a file in order, and the number of bytes read so far.

        Args:
          file: File of the input.
        """
        raise NotImplementedError

    def ranges(self, file: InputFile, num_bytes: int) -> list[InputFile]:
        """Returns parts of a file, for ``blocks``; one if it cannot be divided.

        Args:
          file: File of the input.
          num_bytes: Approximate size of a part in bytes.
        """
        raise NotImplementedError

    def parse(self, block: Any) -> ParsedBlock:
        """Parses a block; thread-safe.

        Args:
          block: Block from ``blocks``.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How rows become files.  All fields are public.

    Attributes:
      on_bad_row: "fail" refuses an input with a malformed row, "skip" omits the row.
      row_group_rows: Rows per row group, except for the last of a split.
      row_groups_per_file: Row groups per file, except for the last of a split.

    Raises:
      InputError: a value out of range.
    """

    on_bad_row: str = "fail"
    row_group_rows: int = DEFAULT_ROW_GROUP_ROWS
    row_groups_per_file: int = ROW_GROUPS_PER_FILE

    #: Whether folders such as ``day=3`` are read as columns.
    partitions = False

    def __post_init__(self) -> None:
        check_choice("--on-bad-row", self.on_bad_row, ON_BAD_ROW)
        check_int("--row-group-rows", self.row_group_rows, at_least=1)
        check_int("row_groups_per_file", self.row_groups_per_file, at_least=1)

    @property
    def label(self) -> str:
        """Name of the column of labels."""
        return "label"

    @property
    def classes(self) -> Sequence[str]:
        """Classes of the label, if they are listed."""
        return ()

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the schema of the prepared data does not hold."""
        names = ("row_group_rows", "row_groups_per_file", "on_bad_row")
        return {name: getattr(self, name) for name in names}

    def open(self, files: Sequence[InputFile]) -> Format:
        """Returns the format of files, after checking their names and headers.

        Raises:
          InputError: files of another format.
        """
        raise NotImplementedError


def check_shares(name: str, shares: Sequence[int]) -> None:
    """Checks the shares of train, val and test.

    Args:
      name: Name of the flag or field, for messages.
      shares: Shares in any unit.

    Raises:
      InputError: not three, a negative one, or none for train.
    """
    if len(shares) != len(SPLITS):
        raise InputError(
            f"Expected {name} to be three shares, not {len(shares)}. Write train, val "
            "and test, such as 80,10,10."
        )
    for split, share in zip(SPLITS, shares, strict=True):
        check_int(f"{split} share of {name}", share, at_least=int(split == "train"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareSummary:
    """What ``prepare`` read, wrote and left out; numbers as in `Format.has_users`."""

    num_files: int
    num_rows: dict[str, int]
    num_bad_lines: int
    bad_lines: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    has_users: bool = False

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PrepareSummary:
        """Returns the summary whose ``dataclasses.asdict`` is ``fields``."""
        lists = {name: tuple(fields[name]) for name in ("bad_lines", "left_out")}
        return cls(**{**fields, **lists})


@dataclasses.dataclass(kw_only=True)
class RowCount:
    """Counts of rows.  Sensitive.

    Attributes:
      num_good: Number of well-formed rows.
      num_bad: Number of malformed rows.
      bad: File, number and reason of the first malformed rows.
      reasons: Reasons of all malformed rows.
      classes: Indices of the classes that the label of a well-formed row has.
      of_splits: Number of well-formed rows per split; zeros if shares decide.
    """

    num_good: int = 0
    num_bad: int = 0
    bad: list[tuple[str, int, str]] = dataclasses.field(default_factory=list)
    reasons: set[str] = dataclasses.field(default_factory=set)
    classes: set[int] = dataclasses.field(default_factory=set)
    of_splits: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(len(SPLITS), np.int64)
    )

    @property
    def num_rows(self) -> int:
        """Number of all rows."""
        return self.num_good + self.num_bad

    @property
    def bad_lines(self) -> list[str]:
        """Place and reason of the first malformed rows: each reason once."""
        places: dict[str, list[str]] = {}
        for path, row, reason in self.bad:
            places.setdefault(reason, []).append(f"{path}:{row}")
        return [f"{', '.join(of)}: {reason}" for reason, of in places.items()]

    def after(self, num_rows: int) -> RowCount:
        """Returns this count with row numbers after ``num_rows`` earlier rows."""
        bad = [(path, row + num_rows, reason) for path, row, reason in self.bad]
        return dataclasses.replace(self, bad=bad)

    def add(self, path: str, first_row: int, block: ParsedBlock) -> None:
        """Counts a block.

        Args:
          path: Path of its file, for messages.
          first_row: Number of its first row.
          block: The parsed block.
        """
        num_bad = len(block.reasons)
        self.num_good += block.num_rows - num_bad
        self.num_bad += num_bad
        if block.splits is not None:
            self.of_splits += np.bincount(block.splits, minlength=len(SPLITS))
        self.reasons.update(block.reasons.values())
        self.classes.update(block.classes)
        room = _REPORTED_ROWS - len(self.bad)
        for row, reason in sorted(block.reasons.items())[:room]:
            self.bad.append((path, first_row + row, reason))

    def merge(self, other: RowCount) -> None:
        """Adds the count of later rows."""
        self.num_good += other.num_good
        self.num_bad += other.num_bad
        self.bad = [*self.bad, *other.bad][:_REPORTED_ROWS]
        self.reasons |= other.reasons
        self.classes |= other.classes
        self.of_splits = self.of_splits + other.of_splits

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        plain = {
            "classes": sorted(self.classes),
            "reasons": sorted(self.reasons),
            "of_splits": self.of_splits.tolist(),
        }
        return {**vars(self), **plain}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RowCount:
        """Returns the count that ``to_json`` wrote."""
        typed = {
            "reasons": set(fields["reasons"]),
            "classes": set(fields["classes"]),
            "of_splits": np.array(fields["of_splits"], np.int64),
        }
        return cls(**{**fields, **typed})


def refuse_bad_rows(
    count: RowCount, options: ConvertOptions, *, has_users: bool
) -> None:
    """Refuses an input with malformed rows, unless the options omit them.

    Rows are not omitted if all of a class would be: the model would be of other data.

    Args:
      count: Count of all rows.
      options: Options of the table.
      has_users: As in ``Format``.

    Raises:
      InputError: there are malformed rows.
    """
    seen = count.classes if f"{options.label} {NO_CLASS}" in count.reasons else None
    lost = [
        name
        for number, name in enumerate(options.classes)
        if seen is not None and number not in seen
    ]
    may_omit = options.on_bad_row == "skip" and count.num_good and not lost
    if not count.num_bad or may_omit:
        return
    remedy = "Fix them or the schema; --on-bad-row skip leaves them out unless all are."
    if lost:
        remedy = (
            f"No well-formed row is of class {', '.join(map(repr, lost))}: write the "
            f"classes of {options.label} in the schema as they are in the table."
        )
    more = ", ..." if count.num_bad > len(count.bad) else ""
    some = "some" if has_users else f"{count.num_bad} of {count.num_rows}"
    raise InputError(
        f"Expected well-formed rows; {some} are malformed: "
        f"{'; '.join(count.bad_lines)}{more}. {remedy}"
    )


def split_counts(num_rows: int, split: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of rows per split: differences of half-up rounded boundaries.

    Args:
      num_rows: Number of rows, at least 0.
      split: Shares in any unit.

    Example:
      >>> split_counts(1999, (80, 10, 10))
      (1599, 200, 200)
    """
    total, shares, bounds = sum(split), 0, [0]
    for share in split:
        shares += share
        bounds.append((2 * num_rows * shares + total) // (2 * total))
    return tuple(after - before for before, after in itertools.pairwise(bounds))


def rows_of_splits(count: RowCount, shares: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the number of rows per split.

    Args:
      count: Count of all rows.
      shares: Shares of the splits; None if every row has its own split.

    Raises:
      InputError: there are no rows for training.
    """
    if shares is None:
        counts = tuple(int(number) for number in count.of_splits)
        found, remedy = "the", "Fix [split] of the schema."  # of users no number
    else:
        counts = split_counts(count.num_good, shares)
        found, remedy = f"{count.num_good}", "Give more input, or a larger share."
    if not counts[0]:
        raise InputError(
            f"Expected --split to leave rows for train; {found} well-formed rows leave "
            f"none. {remedy}"
        )
    return counts
