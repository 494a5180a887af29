"""Files of a table as blocks of rows: CSV, TSV and Parquet, by Arrow's readers.

Text may be compressed (.gz, .zst, .bz2).  Its columns are read as text: only the schema
decides what cells are.

Formal guarantees:
  - Every row of a file is in exactly one block, in order, or is counted as malformed.
  - A file that is truncated, damaged or has changed is refused, without its content,
    as is a column that is not as in the name of its folder.
  - Memory does not depend on the number of rows, but for Parquet on the stored size of
    the largest row group.

Public: names, columns and types.  Sensitive: rows.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import dataclasses
import io
import os
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from accounting.core.validation import InputError
from pipelines.tables.file_parts import Quotations
from pipelines.tables.raw_files import InputFile, check_unchanged
from pipelines.tables.schema.schema import InputOptions

CSV, TSV, PARQUET = "CSV", "TSV", "Parquet"
_ENDINGS = {".csv": CSV, ".tsv": TSV, ".parquet": PARQUET}
_PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}

# Maximum size of a block of text, and of one of Parquet.  Arrow reads about 32 blocks
# of text ahead.
_BLOCK_BYTES = 1 << 21
_BLOCK_ROWS = 1 << 14
#: Value of null in the names of partition folders of Spark and Hive.
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


def is_packed(file: InputFile) -> bool:
    """Whether a text is compressed, so that it can only be read from its beginning."""
    return os.path.splitext(file.path.lower())[1] in _PACKED


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawBlock:
    """Consecutive rows of a file.  Sensitive.

    Attributes:
      columns: Name -> cells of the rows with the right number of cells.
      num_rows: Number of rows, including uneven ones.
      uneven: Indices of rows with another number of cells, increasing.
    """

    columns: dict[str, pa.Array] = dataclasses.field(repr=False)
    num_rows: int
    uneven: np.ndarray


def kind_of_file(path: str) -> str | None:
    """Returns "CSV", "TSV" or "Parquet", by the suffix of a file; None for others."""
    stem, ending = os.path.splitext(path.lower())
    if ending in _PACKED:
        kind = _ENDINGS.get(os.path.splitext(stem)[1])
        return None if kind == PARQUET else kind
    return _ENDINGS.get(ending)


def table_kind(files: Sequence[InputFile]) -> str:
    """Returns the kind of all files.

    Raises:
      InputError: files of different kinds, or of none.
    """
    kinds = {}
    for file in files:
        kind = kind_of_file(file.path)
        if kind is None:
            raise InputError(
                f"Expected {file.shown} to be a table: a name that ends in "
                f"{', '.join(_ENDINGS)}, or for text in {', '.join(_PACKED)} after it. "
                "Save it as one of these (a spreadsheet as CSV), unpack it (an "
                "archive), or move it away."
            )
        kinds[kind] = file.shown
    if len(kinds) > 1:
        raise InputError(
            f"Expected files of one kind; {' and '.join(kinds.values())} differ. Give "
            "--input a glob that matches one kind, such as 'table/**/*.parquet'."
        )
    return next(iter(kinds))


def partitions_of(file: InputFile) -> dict[str, str | None]:
    """Returns name -> value of the columns in the names of folders."""
    folders = [part for part in file.name.split("/")[:-1] if "=" in part]
    pairs = [folder.split("=", 1) for folder in folders]
    return {
        urllib.parse.unquote(name): None
        if value == _NULL_PARTITION
        else urllib.parse.unquote(value)
        for name, value in pairs
    }


@contextlib.contextmanager
def _plain_errors(file: InputFile) -> Iterator[None]:
    """Raises Arrow's errors without their text, which may quote a row."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeError, csv.Error) as error:
        hint = " Is it all there, and what its name says? Write or copy it again."
        if isinstance(error, UnicodeError):
            hint = (
                " It is not UTF-8. Write it as that, or as Parquet, as the page Your "
                "own table says."
            )
        elif "straddl" in str(error):
            hint = f" A row is longer than {_BLOCK_BYTES} bytes; is a quote left open?"
        raise InputError(
            f"Expected input file {file.shown} to be readable to its end: "
            f"{type(error).__name__}.{hint}"
        ) from None


# --- Text ---------------------------------------------------------------------------


@contextlib.contextmanager
def _open_text(file: InputFile) -> Iterator[tuple[Any, Any]]:
    """Yields the file, and a stream of its uncompressed text."""
    packed = _PACKED.get(os.path.splitext(file.path.lower())[1])
    with contextlib.ExitStack() as stack:
        raw: Any = stack.enter_context(pa.OSFile(file.path))
        check_unchanged(file, os.stat(file.path))
        stream = raw
        if file.part:
            stream = raw.get_stream(file.part.start, file.part.num_bytes)
        if packed:
            stream = stack.enter_context(pa.CompressedInputStream(raw, packed))
        yield raw, stream


def delimiter_of(file: InputFile, options: InputOptions) -> str:
    """Returns the delimiter of cells.

    Args:
      file: CSV or TSV.
      options: How text is read.
    """
    return options.delimiter or ("\t" if kind_of_file(file.path) == TSV else ",")


def _header(file: InputFile, options: InputOptions) -> tuple[list[str], int]:
    """Returns the names of the columns, and the number of lines in the header."""
    whole = dataclasses.replace(file, part=None)
    with _plain_errors(file), _open_text(whole) as (_, stream):
        # Rows after the header are read ahead, but not checked here.
        lines = io.TextIOWrapper(stream, "utf-8-sig", errors="replace", newline="")
        rows = csv.reader(lines, delimiter=delimiter_of(file, options))
        first = next((row for row in rows if row), [])
        num_lines = rows.line_num
        lines.detach()
    names = [name.strip() for name in first]
    if not options.header or _are_among(names, options.header):
        return names, num_lines
    if len(options.header) != len(first):
        raise InputError(
            f"Expected header of [input] in the schema to name the {len(first)} "
            f"columns of {file.shown}; it names {len(options.header)}. Give it "
            "a first row with the names of its columns."
        )
    return list(options.header), 0


def _are_among(names: Sequence[str], header: Sequence[str]) -> bool:
    """Whether a first row has names of columns alone, each once: it is no example."""
    return len(set(names)) == len(names) and set(names) <= set(header)


def first_row(file: InputFile, kind: str, options: InputOptions) -> int:
    """Returns the number of the first example of a file: a header is row 1.

    Args:
      file: File of a table.
      kind: From ``table_kind``.
      options: How text is read.
    """
    return 2 if kind != PARQUET and _header(file, options)[1] else 1


def text_columns(file: InputFile, options: InputOptions) -> list[str]:
    """Returns the names of the columns; arguments as for ``delimiter_of``.

    Raises:
      InputError: no header, a name that occurs twice, or a row in place of a header.
    """
    names, _ = _header(file, options)
    twice = [place for place, name in enumerate(names, 1) if names.count(name) > 1]
    if twice or not names:
        # They are not quoted: what is taken for a header may be a row.
        places = ", ".join(map(str, twice))
        found = f"some of columns {places} have one name" if names else "it is empty"
        raise InputError(
            f"Expected a header with different names in {file.shown}; {found}. If it "
            "has no header, write one, or header = [...] with all names below [input] "
            "of the schema."
        )
    if not options.header and _looks_like_a_row(names):
        raise InputError(
            f"Expected names of columns in the first row of {file.shown}; there is a "
            "number among them. If it has no header, write one, or give `dpsgd schema "
            "--header` (header = [...] with all names below [input] of a schema)."
        )
    return names


def _looks_like_a_row(names: Sequence[str]) -> bool:
    """Whether a name is a number, and they do not count from 0.

    A row that is taken for a header would be published in the schema.
    """
    named = [name for name in names if name]
    counted = named == [str(number) for number in range(len(named))]
    return not counted and any(map(_is_number, named))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_text(
    file: InputFile, needed: Sequence[str], options: InputOptions
) -> Iterator[tuple[RawBlock, int]]:
    """Yields blocks of rows, and the number of bytes read so far.

    Args:
      file: CSV or TSV, or a part of it.
      needed: Names of the columns to read.
      options: How text is read.

    Raises:
      InputError: the file is damaged, or has changed.
    """
    names, skipped = _header(file, options)
    if not file.begins:
        skipped = 0
    inside = [name for name in needed if name in names]
    delimiter = delimiter_of(file, options)
    quotations = Quotations(delimiter)
    with _plain_errors(file), _open_text(file) as (raw, stream):
        watched = _Watched(stream, quotations.feed)
        try:
            for block in _rows(
                file, raw, watched, names, inside, skipped, delimiter=delimiter
            ):
                _refuse_open(file, quotations.fault)
                yield block
        except pa.ArrowInvalid:
            _refuse_open(file, quotations.fault)
            raise
        quotations.end()
        _refuse_open(file, quotations.fault)


def read_lines(file: InputFile, names: Sequence[str]) -> Iterator[tuple[RawBlock, int]]:
    """Yields what ``read_text`` does, of tab-separated text without quotations.

    Errors as for ``read_text``.

    Args:
      file: Text without a header, or a part of it.
      names: Names of all columns.
    """
    with _plain_errors(file), _open_text(file) as (raw, stream):
        yield from _rows(
            file, raw, _Watched(stream), names, names,
            delimiter="\t", quote_char=False, ignore_empty_lines=False,
        )  # fmt: skip


def _rows(
    file: InputFile,
    raw: Any,
    stream: _Watched,
    names: Sequence[str],
    needed: Sequence[str],
    skipped: int = 0,
    **parse: Any,
) -> Iterator[tuple[RawBlock, int]]:
    """Yields blocks of cells as they are written, and the number of bytes read."""
    uneven: list[int] = []

    def note(row: Any) -> str:
        uneven.append(row.number - skipped - 1)
        return "skip"

    reader = pa_csv.open_csv(
        stream,
        read_options=pa_csv.ReadOptions(
            block_size=_BLOCK_BYTES,
            use_threads=False,
            column_names=names,
            skip_rows=skipped,
        ),
        parse_options=pa_csv.ParseOptions(invalid_row_handler=note, **parse),
        convert_options=pa_csv.ConvertOptions(
            include_columns=needed,
            column_types=dict.fromkeys(needed, pa.large_string()),
            strings_can_be_null=False,
            check_utf8=False,  # the stream does
        ),
    )
    yield from _numbered(reader, uneven, file, raw if is_packed(file) else stream)


class _Watched(io.RawIOBase):
    """A stream of UTF-8, which is checked before Arrow sees it: Arrow would print it.

    Args:
      stream: Uncompressed text.
      feed: Called with all that is read.
    """

    def __init__(
        self, stream: Any, feed: Callable[[bytes], None] = lambda data: None
    ) -> None:
        self._stream, self._feed, self._num_read = stream, feed, 0
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def readable(self) -> bool:
        """See `io.IOBase.readable`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase.readinto`."""
        data = self._stream.read(len(buffer))
        self._decode(data, final=not data)
        self._feed(data)
        buffer[: len(data)] = data
        self._num_read += len(data)
        return len(data)

    def tell(self) -> int:
        """Returns the number of bytes read so far."""
        return self._num_read


def _refuse_open(file: InputFile, line: int) -> None:
    """Refuses text with an open quotation, which may hold the rows after it.

    Args:
      file: The text, or a part of it.
      line: From ``Quotations.fault``.

    Raises:
      InputError: there is one.
    """
    if line:
        where = f" on line {line}" if file.begins else ""
        raise InputError(
            f'Expected a quotation mark (") at the beginning of a cell of {file.shown} '
            "to have another one at the end of the cell, on the same line; "
            f"that{where} has none. Remove it, or double the marks within the cell. If "
            "cells have line ends, write Parquet, as the page Your own table says."
        )


def _numbered(
    reader: Any, uneven: list[int], file: InputFile, raw: Any
) -> Iterator[tuple[RawBlock, int]]:
    """Yields batches with the uneven rows before or among their rows.

    Args:
      reader: Yields batches without uneven rows.  It may be one batch ahead.
      uneven: Indices of the uneven rows in the file, appended by the reader.
      file: File of the table.
      raw: The file, whose position is the number of bytes read.
    """
    first = 0
    for batch in reader:
        last, here = first + batch.num_rows, []
        for row in sorted(row for row in uneven if row >= first):
            if row >= last:
                break
            here.append(row - first)
            last += 1
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        yield _block(columns, batch.num_rows, here, file), raw.tell()
        first = last
    if rest := [row for row in uneven if row >= first]:
        yield _block({}, 0, list(range(len(rest))), file), raw.tell()


def _block(
    columns: dict[str, pa.Array],
    num_rows: int,
    uneven: Sequence[int],
    file: InputFile,
) -> RawBlock:
    partitions = partitions_of(file)
    for name in columns.keys() & partitions.keys():  # polars writes it in both
        value = pa.array([partitions[name]], pa.large_string())
        cells = columns[name].cast(pa.large_string())
        if not pc.all(pc.is_in(cells, value_set=value)).as_py():
            raise InputError(
                f"Expected column {name} of {file.shown} to be as in the name of its "
                "folder, or in one of them. Rename the folder, or drop the column."
            )
    # With a dictionary of one value, its hash is computed once.
    zeros = pa.array(np.zeros(num_rows, np.int32))
    in_names = {
        name: pa.DictionaryArray.from_arrays(zeros, pa.array([value], pa.string()))
        for name, value in partitions.items()
    }
    return RawBlock(
        columns={**columns, **in_names},
        num_rows=num_rows + len(uneven),
        uneven=np.array(uneven, np.int64),
    )


# --- Parquet ------------------------------------------------------------------------


@contextlib.contextmanager
def _open_parquet(file: InputFile) -> Iterator[pq.ParquetFile]:
    with pa.OSFile(file.path) as raw:
        check_unchanged(file, os.stat(file.path))
        # By default times of INT96 wrap outside of the years 1677 to 2262.
        yield pq.ParquetFile(
            raw, page_checksum_verification=True, coerce_int96_timestamp_unit="us"
        )


def _in_utc(columns: dict[str, pa.Array], parquet: pq.ParquetFile) -> None:
    """Gives times of INT96 their zone: Spark writes those of UTC, and does not say so.

    Args:
      columns: Name -> array; those of INT96 are replaced.
      parquet: The file.
    """
    for column in parquet.schema:
        if column.physical_type == "INT96" and column.path in columns:
            utc = pa.timestamp("us", "UTC")
            columns[column.path] = columns[column.path].cast(utc)


def parquet_schema(file: InputFile) -> pa.Schema:
    """Returns the schema of a Parquet file, from its footer.

    Raises:
      InputError: it is damaged.
    """
    with _plain_errors(file), _open_parquet(file) as parquet:
        return parquet.schema_arrow


def read_parquet(
    file: InputFile, needed: Sequence[str]
) -> Iterator[tuple[RawBlock, int]]:
    """Yields blocks of rows, and the approximate number of bytes read so far.

    Arguments, and errors, as for ``read_text``; ``file`` may be some row groups.
    """
    done = 0
    with _plain_errors(file), _open_parquet(file) as parquet:
        groups = range(parquet.num_row_groups)
        if file.part:
            groups = groups[file.part.start : file.part.end]
        total = max(1, sum(parquet.metadata.row_group(i).num_rows for i in groups))
        inside = [name for name in needed if name in parquet.schema_arrow.names]
        for batch in parquet.iter_batches(
            _rows_at_a_time(parquet), row_groups=groups, columns=inside
        ):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            _in_utc(columns, parquet)
            done += batch.num_rows
            block = _block(columns, batch.num_rows, [], file)
            yield block, file.num_bytes * done // total


def _rows_at_a_time(parquet: pq.ParquetFile) -> int:
    """Returns the rows of a block, by the largest row size in the footer."""
    metadata = parquet.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    sizes = [group.total_byte_size / max(1, group.num_rows) for group in groups]
    return max(1, min(_BLOCK_ROWS, int(4 * _BLOCK_BYTES / max([1.0, *sizes]))))


def read_blocks(
    file: InputFile, kind: str, needed: Sequence[str], options: InputOptions
) -> Iterator[tuple[RawBlock, int]]:
    """Yields blocks of rows, and the number of bytes read so far.

    Args:
      file: File of a table.
      kind: From ``table_kind``.
      needed: Names of the columns to read.
      options: How text is read.
    """
    if not file.size:
        return iter(())
    if kind == PARQUET:
        return read_parquet(file, needed)
    return read_text(file, needed, options)


def table_columns(
    file: InputFile, kind: str, options: InputOptions
) -> dict[str, pa.DataType]:
    """Returns name -> type of the columns of a file and of the names of its folders.

    Args:
      file: File of a table.
      kind: From ``table_kind``.
      options: How text is read.

    Raises:
      InputError: the file is damaged, or a name occurs twice.
    """
    if kind == PARQUET:
        schema = parquet_schema(file)
        found = dict(zip(schema.names, schema.types, strict=True))
        if len(found) < len(schema.names):
            raise InputError(
                f"Expected columns with different names in {file.shown}. Rename one."
            )
    else:
        found = dict.fromkeys(text_columns(file, options), pa.large_string())
    return {**found, **{name: pa.string() for name in partitions_of(file)}}
