"""The files of a raw table: listed once, and refused when they change.

Public: paths and sizes.  Sensitive: what is in the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import os
import re
import zlib
from collections.abc import Iterator
from typing import Any

from accounting.validation import InputError
from pipelines.inputs.input_files import find_files

# Small enough for the temporaries of a block to stay in the cache of a core, and for
# the allocator to keep their memory: a MiB takes twice as long per row.
_BLOCK_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of the input, as it was when it was listed.

    Attributes:
      path: Where it is.
      name: Relative to the input.
      size: Bytes.
      modified_ns: When it was last written to.
    """

    path: str
    name: str
    size: int
    modified_ns: int

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


def read_lines(file: InputFile) -> Iterator[tuple[bytes, int]]:
    """Yields whole lines, about 256 KiB at a time, and the bytes of the file so far.

    The last line of the file is given a line end if it has none.

    Raises:
      InputError: unreadable, changed since it was listed, or not lines of text.
    """
    try:
        with open(file.path, "rb") as raw, contextlib.ExitStack() as stack:
            check_unchanged(file, os.fstat(raw.fileno()))
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
