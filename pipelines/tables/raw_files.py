"""The files of a raw table: listed once, and refused when they change.

Public: paths and sizes.  Sensitive: what is in the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from accounting.validation import InputError
from pipelines.inputs.input_files import find_files

# Small enough for the temporaries of a block to stay in the cache of a core, and for
# the allocator to keep their memory: a MiB takes twice as long per row.
_BLOCK_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 24


class Part(NamedTuple):
    """Whole rows of a file that are read apart from its others.

    Attributes:
      start: Its first byte for text, its first row group for Parquet.
      end: After the last one.
      num_bytes: Size of the file in bytes; approximate for Parquet.
    """

    start: int
    end: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of the input, as it was when it was listed.

    Attributes:
      path: Where it is.
      name: Relative to the input.
      size: Bytes.
      modified_ns: When it was last written to.
      part: Which rows of it are meant; None for all.
    """

    path: str
    name: str
    size: int
    modified_ns: int
    part: Part | None = None

    @property
    def num_bytes(self) -> int:
        """Of what is meant."""
        return self.part.num_bytes if self.part else self.size

    @property
    def begins(self) -> bool:
        """Whether what is meant begins where the file does."""
        return self.part is None or self.part.start == 0

    @property
    def shown(self) -> str:
        """The path for messages: values of partition columns are not said."""
        folder = self.path.removesuffix(self.name)
        return folder + re.sub(r"=[^/]*/", "=*/", self.name)


def _natural(path: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", path)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def list_files(pattern: str, *, partitions: bool = False) -> list[InputFile]:
    """Returns the input in order: by name, with numbers by value (day_2, day_10).

    Args:
      pattern: A file, a folder or a glob, as ``input_files.find_files`` reads it.
      partitions: Whether folders such as ``day=3`` are read as columns.

    Raises:
      InputError: no file, one that cannot be read, or nothing in them.
    """
    found = find_files(pattern, suffix="", partitions=partitions).files
    files = []
    for path, name in sorted(found, key=lambda each: _natural(each[0])):
        if not os.access(path, os.R_OK):
            raise InputError(
                f"Expected input file {path} to be one of this machine that you may "
                "read."
            )
        status = os.stat(path)
        files.append(
            InputFile(
                path=path,
                name=name,
                size=status.st_size,
                modified_ns=status.st_mtime_ns,
            )
        )
    if not any(file.size for file in files):
        raise InputError(f"Expected rows in --input={pattern!r}; it is empty.")
    return files


def changed() -> InputError:
    """Returns the error of an input that was written to."""
    return InputError(
        "Expected --input not to change while it is read. Run it again when nothing "
        "writes to it."
    )


def check_unchanged(file: InputFile, status: os.stat_result) -> None:
    """Refuses a file that is not the one that was listed.

    Args:
      file: As it was listed.
      status: As it is.

    Raises:
      InputError: they differ in size or time.
    """
    if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
        raise changed()


class TextRange(io.RawIOBase):
    """A part of a file that is read as if it were one.

    Args:
      raw: The file.
      part: Bytes of it.
    """

    def __init__(self, raw: BinaryIO, part: Part) -> None:
        self._raw, self._part = raw, part
        raw.seek(part.start)

    def readable(self) -> bool:
        """See `io.IOBase.readable`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase.readinto`."""
        data = self._raw.read(min(len(buffer), self._part.num_bytes - self.tell()))
        buffer[: len(data)] = data
        return len(data)

    def tell(self) -> int:
        """Returns the bytes of the part that were read."""
        return self._raw.tell() - self._part.start


def long_line(file: InputFile) -> InputError:
    """Returns the error of a file that is no text, as it seems."""
    return InputError(
        f"Expected lines of at most {_MAX_LINE_BYTES} bytes in {file.path}. Is it text?"
    )


def read_lines(
    file: InputFile, block_bytes: int = _BLOCK_BYTES
) -> Iterator[tuple[bytes, int]]:
    """Yields whole lines, some at a time, and the bytes of the file so far.

    The last line of the file is given a line end if it has none.

    Args:
      file: Or a part of one.
      block_bytes: About as many at a time.

    Raises:
      InputError: unreadable, changed since it was listed, or not lines of text.
    """
    try:
        with contextlib.ExitStack() as stack:
            raw: Any = stack.enter_context(open(file.path, "rb"))
            check_unchanged(file, os.fstat(raw.fileno()))
            stream = raw
            if file.path.endswith(".gz"):
                stream = stack.enter_context(gzip.GzipFile(fileobj=raw))
            if file.part:
                stream = raw = TextRange(raw, file.part)
            rest = b""
            while chunk := stream.read(block_bytes):
                cut = chunk.rfind(b"\n") + 1
                if cut:
                    yield rest + chunk[:cut], raw.tell()
                    rest = b""
                rest += chunk[cut:]
                if len(rest) > _MAX_LINE_BYTES:
                    raise long_line(file)
            if rest:
                yield rest + b"\n", raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"Expected input file {file.path} to be readable to its end: "
            f"{type(error).__name__}."
        ) from None
