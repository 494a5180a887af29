"""The files of a raw table: listed once, and refused when they change.

Public: paths and sizes.  Sensitive: contents.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import NamedTuple

from accounting.core.validation import InputError
from pipelines.inputs.input_files import find_files, without_values


class Part(NamedTuple):
    """A part of a file, of whole rows.

    Attributes:
      start: First byte of text, or first row group of Parquet.
      end: Byte or row group after the last.
      num_bytes: Size of the part in bytes; approximate for Parquet.
    """

    start: int
    end: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of the input or a part of it, as it was when it was listed.

    Attributes:
      path: Path of the file.
      name: Path relative to the input.
      size: Bytes of the file.
      modified_ns: Time of its last modification, in nanoseconds.
      part: The part; None for the whole file.
    """

    path: str
    name: str
    size: int
    modified_ns: int
    part: Part | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the part, or of the file."""
        return self.part.num_bytes if self.part else self.size

    @property
    def begins(self) -> bool:
        """Whether the part begins where the file does."""
        return self.part is None or self.part.start == 0

    @property
    def shown(self) -> str:
        """Path for messages, without the values of partition columns."""
        return _shown(self.path, self.name)


def _shown(path: str, name: str) -> str:
    return path.removesuffix(name) + without_values(name)


def _natural(path: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", path)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def list_files(pattern: str, *, partitions: bool = False) -> list[InputFile]:
    """Returns the files in natural order of their names (day_2, day_10).

    Args:
      pattern: A file, a folder or a glob; see ``input_files.find_files``.
      partitions: Whether folders such as ``day=3`` are read as columns.

    Raises:
      InputError: no file, one that cannot be read, or only empty files.
    """
    found = find_files(pattern, suffix="", partitions=partitions).files
    files = []
    for path, name in sorted(found, key=lambda each: _natural(each[0])):
        if not os.access(path, os.R_OK):
            raise InputError(
                f"Expected input file {_shown(path, name)} to be one of this machine "
                "that you may read."
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
    """Returns the error for an input that has changed."""
    return InputError(
        "Expected --input not to change while it is read. Run it again when nothing "
        "writes to it."
    )


def check_unchanged(file: InputFile, status: os.stat_result) -> None:
    """Refuses a file that has changed since it was listed.

    Args:
      file: The listed file.
      status: Current status of the file.

    Raises:
      InputError: size or time differ.
    """
    if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
        raise changed()
