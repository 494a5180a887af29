"""The bytes of the batch files that hold a worker's records.

Formal guarantees:
  - ``ranges`` of all workers hold each record of the wanted steps once, in step order
    for each of them, and no other byte.
  - Checksums that do not name each step and part of a file once and in order, or whose
    sizes do not add up to that of the file, are refused.

Sensitive: all of it, since the number of parts of a step may depend on the examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pipelines.batches.manifest import BatchFile, FileChecksum, Manifest
from pipelines.batches.reader import Order, checksum_of, files_from, parse_records
from pipelines.batches.record_checksums import RecordChecksum
from pipelines.batches.share import Share

#: A smaller request would wait longer for its answer than for its bytes.
RANGE_BYTES = 8 << 20


@dataclasses.dataclass(kw_only=True)
class Range:
    """A range of bytes that is read at once.

    Attributes:
      file: File of the manifest.
      checksum: Checksum of the file.
      start: First byte.
      end: Byte after the last.
      records: Records in the range; empty for a whole file whose checksum names none.
    """

    file: BatchFile
    checksum: FileChecksum
    start: int
    end: int
    records: list[RecordChecksum] = dataclasses.field(default_factory=list)


def ranges(
    manifest: Manifest,
    checksums: dict[str, FileChecksum],
    share: Share,
    first_step: int,
) -> Iterator[Range]:
    """Yields the ranges that a worker reads, in step order.

    A file whose checksum names no records is one range.

    Args:
      manifest: Manifest of the folder.
      checksums: From ``read_checksums``.
      share: The parts of the worker.
      first_step: First step to read.

    Raises:
      InputError: checksums without each step and part once.
    """
    for file in files_from(manifest.files, first_step):
        checksum = checksum_of(file, checksums)
        if checksum.records:
            yield from _ranges_of(file, manifest, checksum, share, first_step)
            continue
        yield Range(file=file, checksum=checksum, start=0, end=checksum.size)


def _ranges_of(
    file: BatchFile,
    manifest: Manifest,
    checksum: FileChecksum,
    share: Share,
    first_step: int,
) -> list[Range]:
    """Returns a worker's ranges: adjacent records together, up to ``RANGE_BYTES``."""
    found: list[Range] = []
    position = 0
    for record in _records(file, manifest, checksum):
        start, position = position, position + record.size
        if record.step < first_step or not share.has(record.part):
            continue
        last = found[-1] if found else None
        if last and last.end == start and position - last.start <= RANGE_BYTES:
            last.records.append(record)
            last.end = position
            continue
        found.append(
            Range(
                file=file,
                checksum=checksum,
                start=start,
                end=position,
                records=[record],
            )
        )
    return found


def _records(
    file: BatchFile, manifest: Manifest, checksum: FileChecksum
) -> list[RecordChecksum]:
    """Returns the checksums of all records, after checking steps and parts."""
    records = parse_records(file, checksum)
    order = Order(file, manifest.parts_per_step)
    for record in records:
        order.enter(record.step, record.part)
    order.finish()
    return records
