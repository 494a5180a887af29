"""The bytes of the batch files that hold a worker's records.

Of several workers, part p of a step belongs to worker p mod W.

Formal guarantees:
  - ``ranges`` of all workers hold each record of the wanted steps once, in step order
    for each of them, and no other byte.
  - Checksums that do not name each step and part of a file once and in order are
    refused.

Sensitive: all of it, since the number of parts of a step may depend on the examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from accounting.core.validation import InputError
from pipelines.core.batches.manifest import (
    BatchFile,
    Checksums,
    FileChecksum,
    Manifest,
    RecordChecksum,
)

#: (name of a file, first byte, number of bytes) -> these bytes.
Read = Callable[[str, int, int], bytes]
#: A smaller request would wait longer for its answer than for its bytes.
RANGE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Share:
    """The parts of one worker.

    Attributes:
      rank: Rank of the worker, from 0.
      count: Number of workers.

    Example:
      >>> [part for part in range(7) if Share(rank=1, count=3).has(part)]
      [1, 4]
    """

    rank: int = 0
    count: int = 1

    def has(self, part: int) -> bool:
        """Whether a part of a step belongs to this worker."""
        return part % self.count == self.rank


#: The share of a single worker.
ALL = Share()


@dataclasses.dataclass(kw_only=True)
class Range:
    """A range of bytes that is read at once.

    Attributes:
      file: File of the manifest.
      start: First byte.
      end: Byte after the last.
      records: Records in the range.
    """

    file: BatchFile
    start: int
    end: int
    records: list[RecordChecksum]


def ranges(
    manifest: Manifest, checksums: Checksums, share: Share, first_step: int
) -> Iterator[Range]:
    """Yields the ranges that a worker reads, in step order.

    Args:
      manifest: Manifest of the batches.
      checksums: Their checksums.
      share: The parts of the worker.
      first_step: First step to read.

    Raises:
      InputError: checksums without each step and part once.
    """
    for file in manifest.files:
        if file.first_step + file.num_steps > first_step:
            checksum = checksums.of_file(file)
            yield from ranges_of(file, manifest, checksum, share, first_step)


def ranges_of(
    file: BatchFile,
    manifest: Manifest,
    checksum: FileChecksum,
    share: Share = ALL,
    first_step: int = 0,
) -> list[Range]:
    """Returns a worker's ranges of a file: adjacent records together.

    Other arguments, and errors, as for ``ranges``.

    Args:
      file: File of the manifest.
      checksum: Its checksums.
    """
    _check_order(file, checksum, manifest.parts_per_step)
    found: list[Range] = []
    position = 0
    for record in checksum.records:
        start, position = position, position + record.size
        if record.step < first_step or not share.has(record.part):
            continue
        last = found[-1] if found else None
        if last and last.end == start and position - last.start <= RANGE_BYTES:
            last.records.append(record)
            last.end = position
        else:
            found.append(Range(file=file, start=start, end=position, records=[record]))
    return found


def _check_order(
    file: BatchFile, checksum: FileChecksum, parts_per_step: int | None
) -> None:
    """Checks that each step and part is there once, in order.

    Args:
      file: File of the manifest.
      checksum: Its checksums.
      parts_per_step: Number of records of every step; None if it depends on the data.
    """
    end = (file.first_step + file.num_steps, 0)
    allowed = {(file.first_step, 0)}
    for record in checksum.records:
        step, part = record.step, record.part
        if (step, part) not in allowed or step >= end[0]:
            raise InputError(
                f"Expected the batches of {file.name} in order; found step {step}, "
                f"part {part}."
            )
        allowed = {(step, part + 1), (step + 1, 0)}
        if parts_per_step is not None:
            allowed = {max(allowed) if part + 1 == parts_per_step else min(allowed)}
    if end not in allowed:
        raise InputError(f"Expected {file.name} to end with step {end[0] - 1}.")


def changed(name: str) -> InputError:
    """Returns the error for a batch file that was changed."""
    return InputError(
        f"Expected batch file {name} to be as it was written; it was changed. "
        "Restore it, or make the batches again."
    )
