"""Reads and checks the records of batch files, all or those of one of several workers.

Formal guarantees, for ``read_records`` of all workers run to their ends without an
error:
  - exactly one worker was yielded each physical batch of the plan, in step order;
  - every byte was what ``dpsgd batches`` wrote: the SHA-256 of a record is checked
    before it is yielded, the checksums of a file name each of its steps and parts once
    and in order, and each record says the step and part of its checksum;
  - otherwise an InputError of at least one worker names the file or step that is wrong.

And for ``check_file`` without an error:
  - the file holds every record once, in order, and as many real rows as were written;
  - every record has its real rows first, weights of 0 and 1 only, and zero padding.

Other guarantees:
  - Only the bytes of a worker's own records are read, each once.

Where the bytes come from is not trusted: every one is checked.

Public: the manifest.  Sensitive: every yielded batch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from accounting.core.validation import InputError
from pipelines.core.batches.batch_format import (
    PhysicalBatch,
    decode_batch,
    iterate_records,
)
from pipelines.core.batches.manifest import BatchFile, Checksums, FileChecksum, Manifest
from pipelines.core.batches.ranges import (
    ALL,
    Range,
    Read,
    Share,
    changed,
    ranges,
    ranges_of,
)
from pipelines.core.threads import in_order


def read_records(
    manifest: Manifest,
    checksums: Checksums,
    read: Read,
    share: Share = ALL,
    *,
    first_step: int = 0,
    ahead: int = 1,
) -> Iterator[PhysicalBatch]:
    """Yields a worker's physical batches of steps ``first_step`` and later, in order.

    Args:
      manifest: Manifest of the batches.
      checksums: Their checksums.
      read: Reads a file; called by threads.
      share: The parts of the worker.
      first_step: First step to read.
      ahead: Number of ranges that are read while one is used.

    Raises:
      InputError: missing, changed, incomplete or repeated data.
    """

    def checked(found: Range) -> tuple[Range, list[memoryview]]:
        return found, _checked(found, read)

    wanted = ranges(manifest, checksums, share, first_step)
    with (
        ThreadPoolExecutor(ahead) as pool,
        contextlib.closing(in_order(pool, checked, wanted, ahead + 1)) as all_read,
    ):
        for found, frames in all_read:
            yield from _decoded(found, frames, manifest)


def check_file(
    file: BatchFile, manifest: Manifest, checksum: FileChecksum, read: Read
) -> None:
    """Checks every byte of a file.

    Args:
      file: File of the manifest.
      manifest: Manifest of the batches.
      checksum: Checksums of the file.
      read: As in ``read_records``.

    Raises:
      InputError: what is wrong.
    """
    num_real = 0
    for found in ranges_of(file, manifest, checksum):
        for batch in _decoded(found, _checked(found, read), manifest):
            _check_padding(batch, file)
            num_real += int(np.count_nonzero(batch.weight))
    if num_real != checksum.num_real:
        raise InputError(f"Expected {file.name} to hold as many rows as were written.")


def _checked(found: Range, read: Read) -> list[memoryview]:
    """Returns the framed records of a range, after checking their digests."""
    data = memoryview(read(found.file.name, found.start, found.end - found.start))
    frames, position = [], 0
    for one in found.records:
        frames.append(data[position : position + one.size])
        position += one.size
        if hashlib.sha256(frames[-1]).hexdigest() != one.sha256:
            raise changed(found.file.name)
    return frames


def _decoded(
    found: Range, frames: list[memoryview], manifest: Manifest
) -> Iterator[PhysicalBatch]:
    for frame, checksum in zip(frames, found.records, strict=True):
        [record] = iterate_records(frame)
        batch = decode_batch(record, manifest.columns, manifest.physical_batch_size)
        if (batch.step, batch.part) != (checksum.step, checksum.part):
            raise InputError(
                f"Expected the checksums of the records of {found.file.name} to be as "
                "they were written. Restore private/checksums.json, or make the "
                "batches again."
            )
        yield batch


def _check_padding(batch: PhysicalBatch, file: BatchFile) -> None:
    num_real = int(np.count_nonzero(batch.weight))
    ordered = (batch.weight[:num_real] == 1).all()
    empty = not any(np.any(values[num_real:]) for values in batch.columns.values())
    if not ordered or not empty:
        raise InputError(
            f"Expected step {batch.step} of {file.name} to hold real rows of weight 1, "
            "then padding of zeros."
        )
