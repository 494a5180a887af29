"""The checksums of single records: a reader of some of them reads no others.

    "7 2 1310874 9f86d0..."      step, part, bytes with the frame, SHA-256 of these

Formal guarantees:
  - ``parse(str(checksum))`` is the checksum; another text is refused.

Sensitive: all of it, since the number of parts of a step may depend on the examples.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordChecksum:
    """The checksum of one record.  Sensitive.

    Attributes:
      step: Step of its physical batch.
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
    """Returns the checksum that ``str`` wrote.

    Raises:
      ValueError: another text.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError("Expected step, part, size and SHA-256 of a record.")
    step, part, size = map(int, found.groups()[:3])
    return RecordChecksum(step=step, part=part, size=size, sha256=found[4])
