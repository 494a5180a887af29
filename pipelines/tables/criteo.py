"""The format of Criteo's click logs: lines of text to columns of numbers.

    label, 13 integers, 26 categories     tab-separated, no header, missing is empty

They are UTF-8.  A quotation mark is a character like others.

Formal guarantees:
  - A category depends only on its own bytes, its column and the options: the written
    columns of a row reveal nothing about other rows.
  - A missing value is 0 in ``categories`` and NaN in ``integers``; a present one never
    is.  Hashed values lie in [1, num_buckets).
  - Equal lines and options give equal columns, on every machine.

A vocabulary counted from the training data would be a release about every row, which
the accounting of DP-SGD does not cover.  So strings are hashed; a public vocabulary is
one of a schema.

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
import pyarrow.compute as pc

from accounting.core.validation import InputError, check_int
from pipelines.core.users.hashing import GOLDEN, HASH_NAME, buckets_of, mix
from pipelines.inputs.parquet_blocks import DATASET_METADATA_KEY
from pipelines.tables.cells.cells import nulls
from pipelines.tables.columns import Converted, hash_texts
from pipelines.tables.convert import ConvertOptions, Format, ParsedBlock, check_shares
from pipelines.tables.file_parts import line_ranges
from pipelines.tables.raw_files import InputFile
from pipelines.tables.table_files import RawBlock, is_packed, read_lines
from pipelines.tables.table_format import even_rows, first_faults, to_table

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_CATEGORIES

DEFAULT_NUM_BUCKETS = 1024

#: Names of the cells of a line.
COLUMNS = tuple(map(str, range(NUM_FIELDS)))

_INTEGER = "^-?[0-9]{1,18}$"
_NO_INTEGER = "is not an integer of at most 18 digits"


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


# --- Cells ------------------------------------------------------------------------


_SALTS = mix(np.arange(1, NUM_CATEGORIES + 1, dtype=np.uint64) * np.uint64(GOLDEN))


def _is(texts: pa.Array, *values: str) -> np.ndarray:
    """Returns which texts are one of some values."""
    listed = pa.array(values, texts.type)
    found: np.ndarray = pc.is_in(texts, listed).to_numpy(zero_copy_only=False)
    return found


def _integers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns the float32 nearest to each integer, NaN if empty, and which are none."""
    known = pc.match_substring_regex(texts, _INTEGER)
    numbers = pc.if_else(known, texts, pa.scalar(None, texts.type)).cast(pa.int64())
    values = numbers.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    return values, nulls(numbers) & ~_is(texts, "")


def _category(texts: pa.Array, salt: np.uint64, num_buckets: int) -> np.ndarray:
    """Returns int32 values, 0 if empty."""
    buckets = buckets_of(hash_texts(texts, salt), num_buckets)
    buckets[_is(texts, "")] = 0
    return buckets.astype(np.int32)


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


class CriteoFormat(Format):
    """Lines of text as blocks of cells, and as columns."""

    def __init__(self, options: PrepareOptions) -> None:
        self.schema = dataset_schema(options)
        self.shares = options.split
        self._num_buckets = options.num_buckets

    def blocks(self, file: InputFile) -> Iterator[tuple[RawBlock, int]]:
        """Yields the cells of lines: see `Format.blocks`."""
        return read_lines(file, COLUMNS)

    def ranges(self, file: InputFile, num_bytes: int) -> list[InputFile]:
        """Returns whole lines, or a compressed file; see `Format.ranges`."""
        return [file] if is_packed(file) else line_ranges(file, num_bytes)

    def parse(self, block: RawBlock) -> ParsedBlock:
        """Parses the cells of lines: see `Format.parse`."""
        even, reasons = even_rows(block)
        found = self._converted(block) if len(even) else Converted()
        good = first_faults(found, even, reasons)
        table = to_table(found, good, self.schema)
        return ParsedBlock(num_rows=block.num_rows, reasons=reasons, table=table)

    def _converted(self, block: RawBlock) -> Converted:
        """Returns the columns of all lines, and which cells are malformed."""
        label, *others = (block.columns[name] for name in COLUMNS)
        faults = [(~_is(label, "0", "1"), "label is not 0 or 1")]
        integers = []
        for number, texts in enumerate(others[:NUM_INTEGERS], start=1):
            values, bad = _integers(texts)
            integers.append(values)
            faults.append((bad, f"integer {number} {_NO_INTEGER}"))
        strings = zip(others[NUM_INTEGERS:], _SALTS, self._num_buckets, strict=True)
        arrays = {
            "label": _is(label, "1").astype(np.int8),
            "integers": np.stack(integers, axis=1),
            "categories": np.stack([_category(*each) for each in strings], axis=1),
        }
        return Converted(arrays=arrays, faults=faults)
