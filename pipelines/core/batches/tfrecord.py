"""TFRecord: a file of records, each framed with its length and checksums.

Formal guarantees:
  - ``iterate_records`` yields the records that were written, in order.
  - A flipped bit in a record is an error, and so is a file that ends within one.

References:
  tensorflow/core/lib/io/record_writer.h.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import google_crc32c

from accounting.core.validation import InputError

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


class CorruptRecordError(InputError):
    """A batch file does not hold what was written to it."""


def _masked_crc(data: bytes | memoryview) -> int:
    crc = google_crc32c.value(bytes(data))
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def write_record(write: Callable[[bytes], object], record: bytes) -> None:
    """Writes a record in TFRecord framing.

    Args:
      write: Appends bytes to a file; called several times.
      record: Contents of the record.
    """
    length = _LENGTH.pack(len(record))
    write(length + _CRC.pack(_masked_crc(length)))
    write(record)
    write(_CRC.pack(_masked_crc(record)))


def iterate_records(data: bytes | memoryview) -> Iterator[bytes]:
    """Yields the records in the contents of a TFRecord file.

    Raises:
      CorruptRecordError: a checksum does not match, or the file ends within a record.
    """
    view, position = memoryview(data), 0
    while position < len(view):
        header = bytes(view[position : position + 12])
        if len(header) < 12 or _CRC.unpack(header[8:])[0] != _masked_crc(header[:8]):
            raise CorruptRecordError(f"Expected a record at byte {position}.")
        start = position + 12
        end = start + _LENGTH.unpack(header[:8])[0]
        record, crc = bytes(view[start:end]), bytes(view[end : end + 4])
        if len(crc) < 4 or _CRC.unpack(crc)[0] != _masked_crc(record):
            raise CorruptRecordError(f"Expected an intact record at byte {position}.")
        yield record
        position = end + 4
