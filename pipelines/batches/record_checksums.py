"""The checksums of single records, so that a reader of some need not read the others.

    "7 2 1310874 9f86d0..."      step, part, bytes with the frame, SHA-256 of these

Formal guarantees:
  - ``parse(str(checksum))`` is the checksum; another text is refused.

Sensitive: all of it, as the number of parts of a step may follow from the examples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordChecksum:
    """What one record is.  Sensitive.

    Attributes:
      step: Step of the physical batch in it.
      part: Index of the physical batch within the step, from 0.
      size: Bytes of the record and its frame.
      sha256: SHA-256 of these bytes, as hex digits.

    Example:
      >>> str(RecordChecksum(step=7, part=2, size=16, sha256="0" * 64))[:10]
      '7 2 16 000'
    """

    step: int
    part: int
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.step} {self.part} {self.size} {self.sha256}"


_TEXT = re.compile(r"(\d{1,18}) (\d{1,18}) (\d{1,18}) ([0-9a-f]{64})")


def parse(text: str) -> RecordChecksum:
    """Returns the checksum that a text says.

    Raises:
      ValueError: it says none.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError("Expected step, part, size and SHA-256 of a record.")
    step, part, size = map(int, found.groups()[:3])
    return RecordChecksum(step=step, part=part, size=size, sha256=found[4])


class Summed:
    """Passes bytes on, and keeps their number and their digest.

    Args:
      write: Takes the bytes.

    Attributes:
      size: How many bytes have passed.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._digest = hashlib.sha256()
        self.size = 0

    def __call__(self, data: bytes) -> None:
        self._write(data)
        self._digest.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        """Of the bytes that have passed, as hex digits."""
        return self._digest.hexdigest()
