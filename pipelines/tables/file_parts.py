"""Large files as parts of whole rows, for several workers; and where quotations end.

    Parquet          row groups
    Criteo's text    bytes that begin after a line end
    CSV, TSV         bytes that begin after a line end outside of quotation marks

Whether a line end is quoted depends on all of the text before it.  For a single range
of lines ``leaves_open`` finds whether a quotation is open after it, both if one is open
before it and if none is.  Combined in order, the answers tell which ranges begin with a
row.  As in Arrow's reader, a quotation mark opens a quotation only at the beginning of
a cell, two of them within it stand for one, and after its end they are plain
characters.

Outside of a quotation such a plain mark is harmless (5" pipe).  A mark that ends a
quotation within a cell is not: the quotation was left open, and rows are in it.
``Quotations`` finds these.

Not divided: compressed text, which cannot be read from its middle; text whose schema
has an escape character; and encodings in which the bytes of line ends or quotation
marks may be part of other characters.

Formal guarantees:
  - The rows of the parts, in order, are those of the file, read by the same reader.
  - A part begins where a row does: no quotation is open there.
  - Each range that is not yet known to begin with a row is scanned once.
  - Text whose last quotation is open, or in which one does not end with a cell, is
    refused with the line of its first mark.

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
    at_cell = np.isin(codes[odd - 1], _ends(delimiter)) | (odd == 0)
    # A mark that is not at the beginning of a cell can only close a quotation.
    closing = np.flatnonzero(~at_cell)
    turned = bool((len(odd) - 1 - (closing[-1] if len(closing) else -1)) % 2)
    return turned, turned != (len(closing) == 0)


def _ends(delimiter: str) -> list[int]:
    """Returns the bytes after which a cell begins, and before which one ends."""
    return [ord(delimiter), _NEWLINE, _RETURN]


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


class Quotations:
    """Finds a quotation of a text that does not end with its cell.

    Args:
      delimiter: Delimiter of cells, one byte.
      escape: Character before marks within a quotation; empty if they are doubled.
      encoding: Encoding of the text.

    Attributes:
      opened: Line of the mark that begins the open quotation; 0 for none.
      fault: The same of one that ended within a cell; 0 for none.
    """

    def __init__(self, delimiter: str, *, escape: str = "", encoding: str) -> None:
        self._ends = np.array(_ends(delimiter), np.uint8)
        self._escaped = re.compile(re.escape(escape.encode()) + b".", re.DOTALL)
        self._has_escape = bool(escape)
        self._waiting_for = b'" \t' + escape.encode()
        self._decoder = None
        if not has_ascii_bytes(encoding):
            self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        self._rest, self._before = b"", _NEWLINE
        self._line, self._begins = 1, True
        self.opened = self.fault = 0

    def feed(self, data: bytes) -> None:
        """Reads the next bytes of the text."""
        if self._decoder is not None:
            data = self._decoder.decode(data).encode(errors="replace")
        data = self._rest + data
        if self._begins and data:
            data, self._begins = data.removeprefix(codecs.BOM_UTF8), False
        # What follows a mark is not known before it is read.
        size = len(data.rstrip(self._waiting_for))
        self._rest = data[size:]
        self._look(data[:size])

    def end(self) -> None:
        """Reads the end of the text, which ends a cell."""
        self._look(self._rest + b"\n")
        self.fault = self.fault or self.opened

    def _look(self, data: bytes) -> None:
        if self._has_escape:
            data = self._escaped.sub(b"xx", data)
        codes = np.frombuffer(data, np.uint8)
        marks = np.flatnonzero(codes == _QUOTE)
        if len(marks) and not self.fault:
            firsts = np.flatnonzero(np.diff(marks, prepend=-2) != 1)
            lengths = np.diff(firsts, append=len(marks))
            self._follow(codes, marks[firsts], lengths)
        if len(codes):
            self._line += int(np.count_nonzero(codes == _NEWLINE))
            self._before = int(codes[-1])

    def _follow(
        self, codes: np.ndarray, firsts: np.ndarray, counts: np.ndarray
    ) -> None:
        """Follows runs of marks, all at once if no mark is a plain character.

        Args:
          codes: Bytes of the text.
          firsts: Place of the first mark of each run.
          counts: Number of marks of each run.
        """
        before = np.where(firsts > 0, codes[firsts - 1], self._before)
        begins = np.isin(before, self._ends)
        ends = np.isin(codes[firsts + counts], self._ends)
        odd = counts % 2 == 1
        turns = np.cumsum(odd) - odd + bool(self.opened)
        inside = turns % 2 == 1
        opens = ~inside & odd
        if np.all(np.where(inside, ends | ~odd, begins & (ends | odd))):
            if opens.any():
                last = firsts[opens][-1]
                self.opened = self._line_of(codes, last)
            if inside[-1] == odd[-1]:
                self.opened = 0
            return
        runs = zip(firsts.tolist(), counts.tolist(), begins.tolist(), strict=True)
        for first, count, at_cell in runs:
            if at_cell or self.opened:  # others are plain characters
                self._step(codes, first, count)
            if self.fault:
                return

    def _step(self, codes: np.ndarray, first: int, count: int) -> None:
        """Follows one run of marks; arguments as in ``_follow``."""
        after = first + count
        if not self.opened:
            self.opened = self._line_of(codes, first)
            count -= 1
        if count % 2 == 0:
            return  # they stand for marks
        while codes[after] in b" \t":
            after += 1
        if codes[after] not in self._ends:
            self.fault = self.opened
        self.opened = 0

    def _line_of(self, codes: np.ndarray, place: int) -> int:
        return self._line + int(np.count_nonzero(codes[:place] == _NEWLINE))
