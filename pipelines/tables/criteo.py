"""The format of Criteo's click logs: lines of text to columns of numbers.

    label, 13 integers, 26 categories     tab-separated, no header, missing is empty

Formal guarantees:
  - A category depends only on its own bytes, its column and the options: the written
    columns of a row reveal nothing about other rows.
  - A missing value is 0 in ``categories`` and NaN in ``integers``; a present one never
    is.  Hashed values lie in [1, num_buckets).
  - Equal lines and options give equal columns, on every machine.

A vocabulary counted from the training data would be a release about every row, which
the accounting of DP-SGD does not cover.  So strings are hashed; a public vocabulary is
one of a schema.

NumPy parses the bytes, and not ``pyarrow.csv``, which quotes cells in conversion
errors, stops at the first of them, and has no line numbers on several threads.

Public: options, the schema and its metadata.  Sensitive: lines and columns.

References:
  Criteo Display Advertising Challenge (2014).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from accounting.core.validation import InputError, check_int
from pipelines.core.users.hashing import (
    AFTER,
    GOLDEN,
    HASH_NAME,
    buckets_of,
    hash_fields,
    low_bytes,
    mix,
    words_of,
)
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY
from pipelines.tables.convert import (
    ConvertOptions,
    ParsedBlock,
    arrow_table,
    check_shares,
)
from pipelines.tables.file_parts import line_ranges
from pipelines.tables.raw_files import InputFile, read_lines

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_CATEGORIES

DEFAULT_NUM_BUCKETS = 1024

# Up to eight bytes before the text are read as part of a word, and every line follows a
# line end.
_BEFORE = b"\0\0\0\0\0\0\0\n"

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = b"\t\n\r-0"
_MAX_DIGITS = 18  # the most that always fit in int64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions(ConvertOptions):
    """How text becomes Parquet.  All fields are public.

    Attributes:
      num_buckets: Number of values of each of the 26 categories, including 0 for
        missing.
      split: Shares of train, val and test, in any unit.

    Raises:
      InputError: a value out of range.
    """

    num_buckets: tuple[int, ...] = (DEFAULT_NUM_BUCKETS,) * NUM_CATEGORIES
    split: tuple[int, ...] = (80, 10, 10)

    def __post_init__(self) -> None:
        ConvertOptions.__post_init__(self)
        if len(self.num_buckets) != NUM_CATEGORIES:
            raise InputError(
                f"Expected one or {NUM_CATEGORIES} values of --buckets; there are "
                f"{len(self.num_buckets)}."
            )
        for buckets in self.num_buckets:
            check_int("--buckets", buckets, at_least=2, at_most=2**31 - 1)
        check_shares("--split", self.split)

    def open(self, files: Sequence[InputFile]) -> CriteoFormat:
        """Returns the format of lines of text, for any files."""
        del files
        return CriteoFormat(self)


def bad_reason(code: int) -> str:
    """Returns the text for a code of `_faults`."""
    if code == 1:
        return f"not {NUM_FIELDS} fields"
    if code == 2:
        return "label is not 0 or 1"
    return f"integer {code - 2} is not an integer of at most {_MAX_DIGITS} digits"


# --- From bytes to numbers --------------------------------------------------------


_SALTS = mix(np.arange(1, NUM_CATEGORIES + 1, dtype=np.uint64) * np.uint64(GOLDEN))
_SALTS = _SALTS[:, None]  # fields come as (columns, rows)


def _eight_digits(
    words: np.ndarray, num_digits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers in the last ``num_digits`` characters, and their validity.

    Combines neighbouring digits, then pairs, then quadruples within each word.
    """
    # Zero characters, and zeros for those before the number.
    digits = (words ^ np.uint64(0x3030303030303030)) & ~low_bytes(8 - num_digits)
    carry = digits + np.uint64(0x0606060606060606)
    valid = ((digits | carry) & np.uint64(0xF0F0F0F0F0F0F0F0)) == 0
    for base, bits, mask in (
        (10, 8, 0x00FF00FF00FF00FF),
        (100, 16, 0x0000FFFF0000FFFF),
        (10_000, 32, 0x00000000FFFFFFFF),
    ):
        high = digits >> np.uint64(bits)
        digits *= np.uint64(base)
        digits += high
        digits &= np.uint64(mask)
    return digits.astype(np.int64), valid


def _parse_integers(
    words: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the float32 nearest to each field, NaN if empty, and its validity."""
    shape, starts, ends = starts.shape, starts.reshape(-1), ends.reshape(-1)
    lengths = ends - starts
    negative = words[starts].astype(np.uint8) == _MINUS
    digits = lengths - negative
    numbers, valid = _eight_digits(words[ends - 8], np.minimum(digits, 8))
    for offset in (8, 16):
        longer = np.flatnonzero((digits > offset) & (digits <= _MAX_DIGITS))
        more, good = _eight_digits(
            words[ends[longer] - 8 - offset], np.minimum(digits[longer] - offset, 8)
        )
        numbers[longer] += more * 10**offset
        valid[longer] &= good
    valid &= (digits > 0) & (digits <= _MAX_DIGITS)
    np.negative(numbers, out=numbers, where=negative)
    values = numbers.astype(np.float32)
    missing = lengths == 0
    values[missing] = np.nan
    return values.reshape(shape), (valid | missing).reshape(shape)


def _locate_fields(text: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the places of the fields of complete lines.

    Returns:
      Starts and ends, of shape (NUM_FIELDS, complete lines), and whether each line is
      complete: has the right number of fields.
    """
    is_end = text == _NEWLINE
    delimiters = np.flatnonzero((text == _TAB) | is_end)
    num_lines = np.count_nonzero(is_end) - 1
    if (
        len(delimiters) == num_lines * NUM_FIELDS + 1
        and is_end[delimiters[::NUM_FIELDS]].all()
    ):
        complete = np.ones(num_lines, bool)
        before, after = delimiters[:-1], delimiters[1:]
    else:
        line_ends = np.flatnonzero(is_end[delimiters])
        complete = np.diff(line_ends) == NUM_FIELDS
        last = line_ends[1:][complete]
        index = last[:, None] + np.arange(1 - NUM_FIELDS, 1)
        before, after = delimiters[index - 1], delimiters[index]
    starts = before.reshape(-1, NUM_FIELDS).T.copy()
    starts += 1
    ends = after.reshape(-1, NUM_FIELDS).T.copy()
    ends[-1] -= text[ends[-1] - 1] == _RETURN
    return starts, ends, complete


def _categories(
    words: np.ndarray, starts: np.ndarray, ends: np.ndarray, num_buckets: np.ndarray
) -> np.ndarray:
    """Returns int32 values of shape (rows, 26).

    Args:
      words: Words of the block's text, as in ``hash_fields``.
      starts: First byte of each field, of shape (26, rows).
      ends: Byte after each field, of shape (26, rows).
      num_buckets: Number of values of each category, of shape (26, 1).
    """
    buckets = buckets_of(hash_fields(words, starts, ends, _SALTS), num_buckets)
    buckets[starts == ends] = 0
    return buckets.T.astype(np.int32, order="C")


def _faults(
    complete: np.ndarray, good_label: np.ndarray, valid: np.ndarray
) -> np.ndarray:
    """Returns a code for the first fault of each line, from the left; 0 for none.

    Args:
      complete: Which lines have all fields.
      good_label: Which of these have a label.
      valid: Which of their integers are, of shape (13, complete lines).
    """
    first_invalid = np.where(valid.all(axis=0), 0, 3 + valid.argmin(axis=0))
    codes = np.where(complete, 0, 1)
    codes[complete] = np.where(good_label, first_invalid, 2)
    return codes


# --- Columns ----------------------------------------------------------------------


def dataset_schema(options: PrepareOptions) -> pa.Schema:
    """Returns the schema of the prepared data, with its description."""

    def array(kind: pa.DataType, size: int) -> pa.DataType:
        return pa.list_(pa.field("item", kind, nullable=False), size)

    description = {
        "name": "criteo",
        "num_buckets": list(options.num_buckets),
        "hash": HASH_NAME,
        "categories": ["hashed"] * NUM_CATEGORIES,
        "split": list(options.split),
    }
    return pa.schema(
        [
            pa.field("label", pa.int8(), nullable=False),
            pa.field("integers", array(pa.float32(), NUM_INTEGERS), nullable=False),
            pa.field("categories", array(pa.int32(), NUM_CATEGORIES), nullable=False),
        ],
        metadata={DATASET_METADATA_KEY: json.dumps(description).encode()},
    )


class CriteoFormat:
    """Lines of text as blocks of whole lines, and as columns."""

    first_row = 1
    left_out: tuple[str, ...] = ()
    has_users = False

    def __init__(self, options: PrepareOptions) -> None:
        self.schema = dataset_schema(options)
        self.shares: Sequence[int] = options.split
        self._num_buckets = np.array(options.num_buckets, np.uint64)[:, None]

    def blocks(self, file: InputFile) -> Iterator[tuple[bytes, int]]:
        """Yields whole lines: see `Format.blocks`."""
        return read_lines(file)

    def ranges(self, file: InputFile, num_bytes: int) -> list[InputFile]:
        """Returns whole lines, or a compressed file; see `Format.ranges`."""
        return [file] if file.path.endswith(".gz") else line_ranges(file, num_bytes)

    def parse(self, block: bytes) -> ParsedBlock:
        """Parses complete lines: see `Format.parse`."""
        padded = _BEFORE + block + AFTER
        words, text = words_of(padded), np.frombuffer(padded, np.uint8)
        starts, ends, complete = _locate_fields(text)
        label = text[starts[0]] - np.uint8(_ZERO)
        good_label = (label <= 1) & (ends[0] - starts[0] == 1)
        at = slice(1, 1 + NUM_INTEGERS)
        integers, valid = _parse_integers(words, starts[at], ends[at])
        at = slice(1 + NUM_INTEGERS, NUM_FIELDS)
        categories = _categories(words, starts[at], ends[at], self._num_buckets)
        codes = _faults(complete, good_label, valid)
        bad = np.flatnonzero(codes)
        keep = codes[complete] == 0 if len(bad) else slice(None)
        columns = (label.view(np.int8), integers.T, categories)
        return ParsedBlock(
            num_rows=len(complete),
            bad_rows=bad,
            bad_reasons=list(map(bad_reason, codes[bad].tolist())),
            table=arrow_table((column[keep] for column in columns), self.schema),
        )
