"""Which bytes of the batch files hold a worker's records.

Formal guarantees:
  - ``ranges`` of all workers hold each record of the wanted steps once, in step order
    for each of them, and no other byte.
  - They come from checksums that name each step and part of a file once and in order,
    with sizes that add up to that of the file; others are refused.

Sensitive: all of it, as the number of parts of a step may follow from the examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pipelines.batches.manifest import BatchFile, FileChecksum, Manifest
from pipelines.batches.reader import Order, checksum_of, files_from, parse_records
from pipelines.batches.record_checksums import RecordChecksum
from pipelines.batches.share import Share

#: A request for less would wait longer for its answer than for its bytes.
RANGE_BYTES = 8 << 20


@dataclasses.dataclass(kw_only=True)
class Range:
    """Bytes of a file that are read at once.

    Attributes:
      file: Of the manifest.
      checksum: Of the file.
      start: The first byte.
      end: After the last byte.
      records: What the bytes are; empty if they are all of a file whose checksums
        name no records.
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
    """Yields what a worker reads, in step order.

    Args:
      manifest: Of the folder.
      checksums: From ``read_checksums``.
      share: Which parts of a step; of a file whose checksums name no records, all.
      first_step: The first step that is wanted.

    Raises:
      InputError: checksums that are not of every step and part once.
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
    """Returns the records of a worker, neighbours up to ``RANGE_BYTES`` together."""
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
    """Returns the checksums of all records, which are every step and part once."""
    records = parse_records(file, checksum)
    order = Order(file, manifest.parts_per_step)
    for record in records:
        order.enter(record.step, record.part)
    order.finish()
    return records
