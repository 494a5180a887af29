"""Large files as parts of whole rows, for several workers.

    Parquet          row groups
    Criteo's text    bytes that begin after a line end
    CSV, TSV         bytes that begin after a line end outside of quotation marks

Whether a line end is quoted depends on all of the text before it.  For a single range
of lines ``leaves_open`` finds whether a quotation is open after it, both if one is open
before it and if none is.  Combined in order, the answers tell which ranges begin with a
row.  As in Arrow's reader, a quotation mark opens a quotation only at the beginning of
a cell, two of them within it stand for one, and after its end they are plain
characters.

Not divided: compressed text, which cannot be read from its middle; text whose schema
has an escape character; and encodings in which the bytes of line ends or quotation
marks may be part of other characters.

Formal guarantees:
  - The rows of the parts, in order, are those of the file, read by the same reader.
  - A part begins where a row does: no quotation is open there.
  - Each range that is not yet known to begin with a row is scanned once.

Public: paths, sizes, and where parts begin, as lengths of files are.  Sensitive: text.

References:
  Ge et al. (2019), "Speculative Distributed CSV Data Parsing for Big Data Analytics",
  SIGMOD.
"""

from __future__ import annotations

import codecs
import dataclasses
import os
import re
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq

from pipelines.tables.raw_files import (
    InputFile,
    Part,
    check_unchanged,
    read_lines,
)

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_BLOCK_BYTES = 1 << 23
#: A range never begins after a longer line.
_MAX_LINE_BYTES = 1 << 24

#: Whether a quotation is open after lines, if none was open before and if one was.
States = tuple[bool, bool]

# Encodings in which every byte below 128 is the ASCII character.
_OF_ASCII_BYTES = re.compile(r"utf-8|ascii|iso8859-\d+|cp125\d|koi8-[rtu]")


def has_ascii_bytes(encoding: str) -> bool:
    """Whether every byte below 128 is the ASCII character in an encoding."""
    return bool(_OF_ASCII_BYTES.fullmatch(codecs.lookup(encoding).name))


def line_ranges(file: InputFile, num_bytes: int) -> list[InputFile]:
    """Returns ranges of a text that begin after line ends, even quoted ones.

    Args:
      file: Text that is not compressed.
      num_bytes: Approximate size of a range in bytes.

    Raises:
      InputError: the file has changed.
    """
    starts = [0]
    with open(file.path, "rb") as raw:
        check_unchanged(file, os.fstat(raw.fileno()))
        for place in range(num_bytes, file.size, num_bytes):
            raw.seek(max(place, starts[-1]) - 1)
            line = raw.readline(_MAX_LINE_BYTES)
            if line.endswith(b"\n") and starts[-1] < raw.tell() < file.size:
                starts.append(raw.tell())
    return _parts(file, starts, [*starts[1:], file.size])


def row_group_ranges(file: InputFile, num_bytes: int) -> list[InputFile]:
    """Returns parts of Parquet of consecutive row groups.

    Args:
      file: Parquet file.
      num_bytes: Minimum size of a part in bytes, except for the last one.

    Raises:
      InputError: the file has changed.
    """
    with open(file.path, "rb") as raw:
        check_unchanged(file, os.fstat(raw.fileno()))
        metadata = pq.read_metadata(raw)
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    ends = file.size * np.cumsum(groups) // max(1, metadata.num_rows)
    starts, before = [0], 0
    for group, end in enumerate(ends[:-1].tolist(), start=1):
        if end - before >= num_bytes:
            starts.append(group)
            before = end
    sizes = np.diff([0, *(ends[group - 1] for group in starts[1:]), file.size])
    return _parts(file, starts, [*starts[1:], len(groups)], sizes.tolist())


def _parts(
    file: InputFile,
    starts: Sequence[int],
    ends: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> list[InputFile]:
    if len(starts) == 1:
        return [file]
    sizes = sizes or [end - start for start, end in zip(starts, ends, strict=True)]
    found = map(Part, starts, ends, sizes)
    return [dataclasses.replace(file, part=part) for part in found]


def leaves_open(lines: bytes, delimiter: str) -> States:
    """Returns whether a quotation is open after lines, for both states before them.

    Args:
      lines: Whole lines.  Sensitive.
      delimiter: Delimiter of cells, one byte.
    """
    codes = np.frombuffer(lines, np.uint8)
    marks = np.flatnonzero(codes == _QUOTE)
    firsts = np.flatnonzero(np.diff(marks, prepend=-2) != 1)
    lengths = np.diff(firsts, append=len(marks))
    # Pairs of marks change nothing: they stand for a mark, or for an empty text.
    odd = marks[firsts[lengths % 2 == 1]]
    at_cell = np.isin(codes[odd - 1], [ord(delimiter), _NEWLINE, _RETURN]) | (odd == 0)
    # A mark that is not at the beginning of a cell can only close a quotation.
    closing = np.flatnonzero(~at_cell)
    turned = bool((len(odd) - 1 - (closing[-1] if len(closing) else -1)) % 2)
    return turned, turned != (len(closing) == 0)


def range_leaves_open(file: InputFile, delimiter: str) -> States:
    """Returns ``leaves_open`` of a range of text.

    Args:
      file: From ``line_ranges``.
      delimiter: As in ``leaves_open``.

    Raises:
      InputError: the file has changed, or has a line that is too long.
    """
    closed, opened = False, True
    mark = codecs.BOM_UTF8 if file.begins else b""
    for lines, _ in read_lines(file, _BLOCK_BYTES):
        after = leaves_open(lines.removeprefix(mark), delimiter)
        mark = b""
        closed, opened = after[closed], after[opened]
    return closed, opened


def join_rows(ranges: Sequence[InputFile], after: Sequence[States]) -> list[InputFile]:
    """Returns parts that begin with rows: ranges, joined where a quotation is open.

    Args:
      ranges: Ranges of one file, in order.
      after: ``range_leaves_open`` of each.
    """
    parts: list[InputFile] = []
    is_open = False
    for each, states in zip(ranges, after, strict=True):
        parts.append(_joined(parts.pop(), each) if is_open else each)
        is_open = states[is_open]
    return parts


def _joined(first: InputFile, second: InputFile) -> InputFile:
    assert first.part is not None
    assert second.part is not None
    num_bytes = first.part.num_bytes + second.part.num_bytes
    part = Part(first.part.start, second.part.end, num_bytes)
    return dataclasses.replace(first, part=part)
