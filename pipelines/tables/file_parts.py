"""Large files as parts of whole rows, for several workers; and where quotations end.

    Parquet               row groups
    Criteo's text, CSV    bytes that begin after a line end

A row of text is one line.  As in Arrow's reader, a quotation mark opens a quotation
only at the beginning of a cell, two of them within it stand for one, and after its end
they are plain characters.  Outside of a quotation such a plain mark is harmless (5"
pipe).  A quotation that does not end with its cell, or not on its line, is not: rows
may be in it.  ``Quotations`` finds these.

Not divided: compressed text, which cannot be read from its middle.

Formal guarantees:
  - The rows of the parts, in order, are those of the file, read by the same reader.
  - Text in which a quotation does not end with its cell, or a line end is quoted, is
    refused with its line.

Public: paths, sizes, and where parts begin, as lengths of files are.  Sensitive: text.
"""

from __future__ import annotations

import codecs
import dataclasses
import os
import re
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq

from pipelines.tables.raw_files import InputFile, Part, check_unchanged

#: A range never begins after a longer line.
_MAX_LINE_BYTES = 1 << 24


def line_ranges(file: InputFile, num_bytes: int) -> list[InputFile]:
    """Returns ranges of a text that begin after line ends.

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


class Quotations:
    """Finds a quotation of a text that does not end with its cell, on its line.

    Args:
      delimiter: Delimiter of cells, one byte.

    Attributes:
      fault: Line of the mark that begins it; 0 for none.
    """

    def __init__(self, delimiter: str) -> None:
        ends = b"[\r\n" + re.escape(delimiter.encode()) + b"]"
        mark = b'"(?<=' + ends + b'")'  # the mark first: it is searched faster
        of_line = b'[^"\r\n]*'
        self._quoted = re.compile(
            mark + of_line + b'(?:""' + of_line + b')*"(?=[ \t]*' + ends + b")"
        )
        self._wrong = re.compile(mark)
        self._rest, self._line, self.fault = b"", 1, 0

    def feed(self, data: bytes) -> None:
        """Reads the next bytes of the text."""
        data = self._rest + data
        size = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._rest = data[size:]
        self._look(data[:size])

    def end(self) -> None:
        """Reads the end of the text, which ends a line."""
        self._look(self._rest + b"\n")

    def _look(self, lines: bytes) -> None:
        if self._line == 1:
            lines = lines.removeprefix(codecs.BOM_UTF8)
        if b'"' not in lines:
            self._line += lines.count(b"\n")
            return
        left = self._quoted.sub(b"", b"\n" + lines)
        wrong = self._wrong.search(left)
        if wrong and not self.fault:
            self.fault = self._line + left.count(b"\n", 1, wrong.start())
        self._line += lines.count(b"\n")
