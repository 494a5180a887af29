"""Criteo text files to numeric Parquet files, in two passes and in bounded memory.

    OUT/train/part-00000.parquet ...      label int8
    OUT/val/part-00000.parquet ...        integers float32[13], NaN where missing
    OUT/test/part-00000.parquet ...       categories int32[26], 0 where missing

The first pass checks every line and counts; the second one writes.  Nothing is written
before every line is known to be good or to be left out, and the chronological split is
exact without holding the data.

Formal guarantees:
  - Rows keep their order; the splits are contiguous, and the end of each is
    ``round_half_up(rows * cumulative share)``.
  - Equal input and options give equal columns, whatever the number of threads, the
    machine, or how the text is cut into files and blocks.
  - ``out`` appears complete or not at all, and what cannot become a folder is refused
    before any line is read; a stop by a signal leaves none of it.
  - On this machine nobody but this user may enter ``out``.
  - No message holds content of a line.

Public: options and summary.  Sensitive: everything read and written.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gzip
import itertools
import os
import pathlib
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from accounting.validation import InputError, check_int
from pipelines.files.folders import usable_folder
from pipelines.files.stopping import on_signals
from pipelines.files.threads import in_order, num_cores
from pipelines.inputs.input_files import find_files
from pipelines.tables.criteo import (
    NUM_CATEGORIES,
    NUM_INTEGERS,
    SPLITS,
    CategoryEncoder,
    ParsedBlock,
    PrepareOptions,
    Rows,
    bad_reason,
    dataset_schema,
    parse_block,
    rows_table,
)

#: ``on_progress(phase, bytes done, bytes in all)``.
Progress = Callable[[str, int, int], None]

# Small enough for the temporaries of a block to stay in the cache of a core, and for
# the allocator to keep their memory: a MiB takes twice as long per row.
_BLOCK_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 24
_REPORTED_LINES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of lines, as it was when it was listed."""

    path: str
    size: int
    modified_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareSummary:
    """What ``prepare`` read and wrote."""

    num_files: int
    num_rows: dict[str, int]
    num_bad_lines: int
    bad_lines: tuple[str, ...]
    bytes_read: int
    bytes_written: int


# --- Reading ----------------------------------------------------------------------


def _natural(path: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", path)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def list_files(pattern: str) -> list[InputFile]:
    """Returns the input in order: by name, with numbers by value (day_2, day_10).

    Args:
      pattern: A file, a folder or a glob, as ``input_files.find_files`` reads it.

    Raises:
      InputError: no file, one that cannot be read, or nothing in them.
    """
    found = find_files(pattern, suffix="").files
    files = []
    for path in sorted((path for path, _ in found), key=_natural):
        if not os.access(path, os.R_OK):
            raise InputError(
                f"Expected input file {path} to be one of this machine that you may "
                "read."
            )
        status = os.stat(path)
        files.append(
            InputFile(path=path, size=status.st_size, modified_ns=status.st_mtime_ns)
        )
    if not any(file.size for file in files):
        raise InputError(f"Expected lines in --input={pattern!r}; it is empty.")
    return files


def _changed() -> InputError:
    return InputError(
        "Expected --input not to change while it is read. Run it again when nothing "
        "writes to it."
    )


def _check_unchanged(file: InputFile, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
        raise _changed()


def read_blocks(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Yields whole lines, about 256 KiB at a time, and the bytes of the file so far.

    The last line of the file is given a line end if it has none.

    Raises:
      InputError: unreadable, changed since it was listed, or not lines of text.
    """
    try:
        with open(file.path, "rb") as raw, contextlib.ExitStack() as stack:
            _check_unchanged(file, os.fstat(raw.fileno()))
            stream: Any = raw
            if file.path.endswith(".gz"):
                stream = stack.enter_context(gzip.GzipFile(fileobj=raw))
            rest = b""
            while chunk := stream.read(_BLOCK_BYTES):
                cut = chunk.rfind(b"\n") + 1
                if cut:
                    yield rest + chunk[:cut], raw.tell()
                    rest = b""
                rest += chunk[cut:]
                if len(rest) > _MAX_LINE_BYTES:
                    raise InputError(
                        f"Expected lines of at most {_MAX_LINE_BYTES} bytes in "
                        f"{file.path}. Is it text?"
                    )
            if rest:
                yield rest + b"\n", raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"Expected input file {file.path} to be readable to its end: "
            f"{type(error).__name__}."
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reader:
    """Parses the files, as often as asked, on several threads."""

    files: Sequence[InputFile]
    num_threads: int
    on_progress: Progress

    def parse(
        self, phase: str, encoder: CategoryEncoder | None
    ) -> Iterator[tuple[InputFile, ParsedBlock]]:
        """Yields the blocks of all files in order."""
        total, before = sum(file.size for file in self.files), 0

        def work(item: tuple[bytes, int]) -> tuple[ParsedBlock, int]:
            return parse_block(item[0], encoder), item[1]

        with ThreadPoolExecutor(self.num_threads) as pool:
            for file in self.files:
                blocks = read_blocks(file)
                for block, done in in_order(pool, work, blocks, 2 * self.num_threads):
                    self.on_progress(phase, before + done, total)
                    yield file, block
                before += file.size
        self.on_progress(phase, total, total)


@dataclasses.dataclass(kw_only=True)
class _Count:
    """What the first pass learns."""

    num_good: int = 0
    num_bad: int = 0
    bad_lines: list[str] = dataclasses.field(default_factory=list)

    def add(self, path: str, lines_before: int, block: ParsedBlock) -> None:
        num_bad = len(block.bad_lines)
        self.num_good += block.num_lines - num_bad
        self.num_bad += num_bad
        room = _REPORTED_LINES - len(self.bad_lines)
        for line, reason in zip(
            block.bad_lines[:room], block.bad_reasons[:room], strict=True
        ):
            number = lines_before + int(line) + 1
            self.bad_lines.append(f"{path}:{number}: {bad_reason(int(reason))}")


def _check_lines(reader: _Reader) -> _Count:
    count = _Count()
    lines: collections.Counter[str] = collections.Counter()
    for file, block in reader.parse("check", None):
        count.add(file.path, lines[file.path], block)
        lines[file.path] += block.num_lines
    return count


def _refuse_bad_lines(count: _Count, options: PrepareOptions) -> None:
    if not count.num_bad or options.on_bad_row == "skip":
        return
    total = count.num_good + count.num_bad
    more = ", ..." if count.num_bad > len(count.bad_lines) else ""
    raise InputError(
        f"Expected well-formed lines; {count.num_bad} of {total} are malformed: "
        f"{', '.join(count.bad_lines)}{more}. Mend them, or leave them out with "
        "--on-bad-row skip."
    )


# --- Writing ----------------------------------------------------------------------


def split_counts(num_rows: int, split: Sequence[int]) -> tuple[int, ...]:
    """Returns the rows of each split: differences of half-up rounded boundaries.

    Example:
      >>> split_counts(1999, (80, 10, 10))
      (1599, 200, 200)
    """
    total, shares, bounds = sum(split), 0, [0]
    for share in split:
        shares += share
        bounds.append((2 * num_rows * shares + total) // (2 * total))
    return tuple(after - before for before, after in itertools.pairwise(bounds))


class _Stream:
    """Hands out rows of consecutive blocks in other sizes than they came in."""

    def __init__(self, blocks: Iterable[Rows]) -> None:
        self._blocks = iter(blocks)
        self._rest: Rows | None = None

    def take(self, num_rows: int) -> Rows:
        """Returns the next ``num_rows`` rows.

        Raises:
          InputError: fewer are left.
        """
        parts: list[Rows] = []
        while num_rows:
            block = next(self._blocks, None) if self._rest is None else self._rest
            if block is None:
                raise _changed()
            parts.append(block[:num_rows])
            self._rest = block[num_rows:] if len(block) > num_rows else None
            num_rows -= len(parts[-1])
        return _concatenate(parts)

    def finish(self) -> None:
        """Reads on to the end.

        Raises:
          InputError: there are more rows.
        """
        if self._rest is not None or any(len(block) for block in self._blocks):
            raise _changed()


def _concatenate(parts: Sequence[Rows]) -> Rows:
    empty = Rows(
        label=np.empty(0, np.int8),
        integers=np.empty((0, NUM_INTEGERS), np.float32),
        categories=np.empty((0, NUM_CATEGORIES), np.int32),
    )
    names = [field.name for field in dataclasses.fields(Rows)]
    parts = parts or [empty]
    return Rows(
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in names
        }
    )


class _SplitWriter:
    """Writes the row groups of one split to its numbered files."""

    def __init__(
        self, folder: pathlib.Path, schema: pa.Schema, options: PrepareOptions
    ) -> None:
        folder.mkdir()
        self._folder, self._schema, self._options = folder, schema, options
        self._num_groups = 0
        self._writer: Any = None

    def _next_file(self) -> None:
        self._finish_file()
        number = self._num_groups // self._options.row_groups_per_file
        path = self._folder / f"part-{number:05d}.parquet"
        self._writer = pq.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            compression_level=1,
            write_page_checksum=True,
        )

    def _finish_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def write(self, rows: Rows) -> None:
        """Appends one row group."""
        if self._num_groups % self._options.row_groups_per_file == 0:
            self._next_file()
        table = rows_table(rows, self._schema)
        self._writer.write_table(table, row_group_size=len(rows))
        self._num_groups += 1

    def close(self) -> None:
        """Finishes the last file; a split without rows gets a file without rows."""
        if not self._num_groups:
            self._next_file()
        self._finish_file()


def check_output(out: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a folder that can be made, or that is empty.

    Raises:
      InputError: there is something already, or the system does not let it be made.
    """
    path = pathlib.Path(out)
    try:
        is_free = not os.path.lexists(path) or not any(path.iterdir())
    except OSError:
        is_free = False
    if not is_free:
        raise InputError(
            f"Expected --out {path} to be a new or an empty folder. Choose another, or "
            "remove it."
        )
    with usable_folder(path, "--out"):
        _try_to_replace(_real(path))
    return path


def _try_to_replace(final: pathlib.Path) -> None:
    """Does with empty folders what ends the work, and undoes it.

    Nothing else tells beforehand of rights, mount points and limits of names alike.

    Raises:
      OSError: it cannot be done.
    """
    staged = _staged(final)
    if final.exists():
        os.rename(final, staged)
        os.rename(staged, final)
        return
    made = [staged, final]
    try:
        for parent in reversed(final.parents):
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        staged.mkdir()
        os.rename(staged, final)
    finally:
        for folder in sorted(made, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):  # those that were not made
                folder.rmdir()


def _real(path: pathlib.Path) -> pathlib.Path:
    """Where links lead to; of a loop, which the system will refuse, some path."""
    return pathlib.Path(os.path.realpath(path))


def _staged(final: pathlib.Path) -> pathlib.Path:
    """A name beside ``final`` that nobody else uses, whatever the length of its own."""
    return final.with_name(f".dpsgd-{secrets.token_hex(8)}")


def _flush_to_disk(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staged_folder(
    out: str | os.PathLike[str], *, mode: int = 0o700
) -> Iterator[pathlib.Path]:
    """Gives a temporary folder that becomes ``out``, or goes, when the context ends.

    Args:
      out: A new or empty folder.
      mode: Permissions of the folder, before the umask.

    Raises:
      InputError: ``out`` is in use, or cannot be written.
    """
    path = check_output(out)
    final = _real(path)
    staged = _staged(final)
    try:
        staged.mkdir(mode, parents=True)
        yield staged
        for file in staged.rglob("*"):
            _flush_to_disk(file)
        os.rename(staged, final)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(
            f"Expected to be able to write --out {path}: {reason}. Make room or "
            "restore access, then give the same command again."
        ) from None
    finally:
        with on_signals(lambda _: None):  # a second signal finds it done
            shutil.rmtree(staged, ignore_errors=True)


def _write_split(
    writer: _SplitWriter, stream: _Stream, num_rows: int, row_group_rows: int
) -> None:
    # One thread encodes a row group while the next one is parsed and put together.
    with ThreadPoolExecutor(1) as pool:
        pieces = (
            stream.take(min(row_group_rows, num_rows - first))
            for first in range(0, num_rows, row_group_rows)
        )
        for _ in in_order(pool, writer.write, pieces, 2):
            pass


def _write_all(
    root: pathlib.Path, reader: _Reader, counts: Sequence[int], options: PrepareOptions
) -> None:
    blocks = reader.parse("write", CategoryEncoder(options))
    stream = _Stream(block.rows for _, block in blocks if block.rows is not None)
    schema = dataset_schema(options)
    for name, count in zip(SPLITS, counts, strict=True):
        with contextlib.closing(_SplitWriter(root / name, schema, options)) as writer:
            _write_split(writer, stream, count, options.row_group_rows)
    stream.finish()


def _ignore_progress(phase: str, done: int, total: int) -> None:
    del phase, done, total  # nobody listens


def prepare(
    pattern: str,
    out: str | os.PathLike[str],
    options: PrepareOptions,
    *,
    num_threads: int | None = None,
    on_progress: Progress = _ignore_progress,
) -> PrepareSummary:
    """Turns Criteo text into Parquet; see the module for what it guarantees.

    Args:
      pattern: A file, a folder or a glob; names that end in ``.gz`` are unpacked.
      out: A new or empty folder.
      options: What to write.
      num_threads: Threads that parse; as many as there are cores by default.
      on_progress: Called with "check" and "write", bytes read, and bytes in all.

    Raises:
      InputError: see ``list_files``, ``check_output``, ``PrepareOptions``; malformed
        lines; no row for the training data.
    """
    if num_threads is not None:
        check_int("--threads", num_threads, at_least=1)
    files = list_files(pattern)
    check_output(out)
    reader = _Reader(
        files=files,
        num_threads=num_threads or num_cores(),
        on_progress=on_progress,
    )
    count = _check_lines(reader)
    _refuse_bad_lines(count, options)
    counts = split_counts(count.num_good, options.split)
    if not counts[0]:
        raise InputError(
            f"Expected --split to leave rows for train; {count.num_good} well-formed "
            "rows leave none. Give more input, or a larger share."
        )
    with staged_folder(out) as root:
        _write_all(root, reader, counts, options)
        written = sum(path.stat().st_size for path in root.glob("*/*"))
    return PrepareSummary(
        num_files=len(files),
        num_rows=dict(zip(SPLITS, counts, strict=True)),
        num_bad_lines=count.num_bad,
        bad_lines=tuple(count.bad_lines),
        bytes_read=sum(file.size for file in files),
        bytes_written=written,
    )
