"""Reads the records of batch files, and checks every byte of them.

`StoredBatches` are the batches of a folder, on this machine or in a store:

    OUT/manifest.json             see `manifest`; public
    OUT/certificate.json          see `manifest`; public
    OUT/private/checksums.json    see `manifest`; sensitive

With W workers, part p of a step belongs to worker p mod W.  A worker reads the bytes of
its own records, each byte once, and no others.

If `read_records` of all workers end without an error:
  - Exactly one worker was given each physical batch of the plan, in step order.
  - Every byte was what ``dpsgd batches`` wrote: the SHA-256 of a record is checked
    before the record is yielded, the checksums of a file name each of its steps and
    parts once and in order, and each record holds the step and part of its checksum.

If any byte differs, at least one worker raises an InputError that names the file or the
step that is wrong.

If `check_file` ends without an error, the file holds every record once, in order, and
as many real rows as were written.  Every record has its real rows first, weights of 0
and 1 only, and padding of zeros.

The functions that get bytes, from this machine or a store, are not trusted.

Public: manifest, certificate and names.  Sensitive: checksums, ranges and batches,
since the number of parts of a step may depend on the examples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from accounting.core.validation import InputError, check_int
from pipelines.core.batches.manifest import (
    BatchFile,
    Checksums,
    FileChecksum,
    Manifest,
    RecordChecksum,
    digest_of_seal,
)
from pipelines.core.files.local_files import StrPath, find, read_json, read_known
from pipelines.core.keys import commitment
from pipelines.core.threads import in_order

if TYPE_CHECKING:  # `dpsgd account` reads certificates where protobuf is not installed
    from pipelines.core.batches.batch_format import PhysicalBatch

#: (name of a file, first byte, number of bytes) -> these bytes.
Read = Callable[[str, int, int], bytes]
#: Records are read together up to this size: a smaller request would wait longer for
#: its answer than for its bytes.
RANGE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Share:
    """The parts of steps that belong to one worker.

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
    """A range of bytes of a batch file that is read at once.

    Attributes:
      file: File of the manifest.
      start: Place of the first byte in the file.
      end: Place after the last byte.
      records: Checksums of the records in the range.
    """

    file: BatchFile
    start: int
    end: int
    records: list[RecordChecksum]


def ranges_of(
    file: BatchFile,
    manifest: Manifest,
    checksum: FileChecksum,
    share: Share = ALL,
    first_step: int = 0,
) -> list[Range]:
    """Returns the ranges of a file that a worker reads; adjacent records share one.

    Args:
      file: File of the manifest.
      manifest: Manifest of the batches.
      checksum: Checksums of the file.
      share: The parts of the worker.
      first_step: First step to read.

    Raises:
      InputError: the checksums do not name each step and part once and in order.
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
    """Checks that the checksums name each step and part of a file once, in order.

    Args:
      file: File of the manifest.
      checksum: Checksums of the file.
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


def read_records(
    manifest: Manifest,
    checksums: Checksums,
    read: Read,
    share: Share = ALL,
    *,
    first_step: int = 0,
    ahead: int = 1,
) -> Iterator[PhysicalBatch]:
    """Yields a worker's physical batches from ``first_step`` on, in step order.

    Args:
      manifest: Manifest of the batches.
      checksums: Checksums of the batches.
      read: Reads a range of a file; called by threads.
      share: The parts of the worker.
      first_step: First step to read.
      ahead: Number of ranges that are read while one is used.

    Raises:
      InputError: data are missing, changed, incomplete or repeated.
    """

    def checked(found: Range) -> tuple[Range, list[memoryview]]:
        return found, _checked(found, read)

    wanted = (
        found
        for file in manifest.files
        if file.first_step + file.num_steps > first_step
        for found in ranges_of(
            file, manifest, checksums.of_file(file), share, first_step
        )
    )
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
      read: Reads a range of a file.

    Raises:
      InputError: the file is not as it was written.
    """
    num_real = 0
    for found in ranges_of(file, manifest, checksum):
        for batch in _decoded(found, _checked(found, read), manifest):
            _check_padding(batch, file)
            num_real += int(np.count_nonzero(batch.weight))
    if num_real != checksum.num_real:
        raise InputError(f"Expected {file.name} to hold as many rows as were written.")


def _checked(found: Range, read: Read) -> list[memoryview]:
    """Returns the framed records of a range, read and compared with their digests."""
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
    from pipelines.core.batches.batch_format import decode_batch, iterate_records

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


MANIFEST_NAME = "manifest.json"
CERTIFICATE_NAME = "certificate.json"
PRIVATE_NAME = "private"
CHECKSUMS_NAME = "checksums.json"

_UNFINISHED = "The folder holds no finished batches; run `dpsgd batches` to the end."


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredBatches:
    """The batches of a folder, here or in a store.

    Attributes:
      place: The folder, for messages.
      read_file: Returns the contents of a file by its path, or raises an OSError.
      reader: (manifest, checksums) -> a function that reads ranges of the batch files,
        and how many ranges to read while one is used.
    """

    place: str
    read_file: Callable[[StrPath], bytes]
    reader: Callable[[Manifest, Checksums], tuple[Read, int]]

    def manifest(self) -> Manifest:
        """Returns the manifest.

        Raises:
          InputError: there is no manifest, or it is damaged.
        """
        path = f"{self.place}/{MANIFEST_NAME}"
        found = read_json(path, remedy=_UNFINISHED, read=self.read_file)
        return Manifest.from_json(found)

    def checksums(self) -> Checksums:
        """Returns the checksums, after checking the manifest against them.

        Raises:
          InputError: the checksums are missing or damaged, or the manifest was edited.
        """
        fields = read_json(
            f"{self.place}/{PRIVATE_NAME}/{CHECKSUMS_NAME}",
            remedy="Without it the batches cannot be verified.",
            read=self.read_file,
        )
        path = f"{self.place}/{MANIFEST_NAME}"
        manifest = read_known(path, remedy=_UNFINISHED, read=self.read_file)
        return Checksums.of(manifest, fields)

    def certificate(self) -> bytes | None:
        """Returns the contents of the certificate; None if there is none.

        Raises:
          InputError: the file cannot be read.
        """
        return find(f"{self.place}/{CERTIFICATE_NAME}", self.read_file)

    def key_name(self) -> str:
        """Returns a public name of the key that sampled the batches.

        Batches under one key share the name, even if their columns or files differ.

        Raises:
          InputError: as for `checksums`.
        """
        seal_key = bytes.fromhex(self.checksums().seal_key)  # made of that key
        return commitment(seal_key, "sampling key")

    def records_id(self) -> str:
        """Returns a public name of the manifest and all records.

        Raises:
          InputError: as for `checksums`.
        """
        return digest_of_seal(self.checksums().seal.hex())

    def batches(
        self,
        manifest: Manifest,
        checksums: Checksums,
        *,
        first_step: int = 0,
        share: Share = ALL,
    ) -> Iterator[PhysicalBatch]:
        """Yields the physical batches from ``first_step`` on, as `read_records` does.

        Args:
          manifest: What `manifest` returned.
          checksums: What `checksums` returned.
          first_step: First step to read; a resumed run passes its finished steps.
          share: The parts of one of several workers, if not all.

        Raises:
          InputError: data are missing, changed, incomplete or repeated, or
            ``first_step`` is out of range.
        """
        last = manifest.plan.num_steps
        check_int("first_step", first_step, at_least=0, at_most=last)
        read, ahead = self.reader(manifest, checksums)
        return read_records(
            manifest, checksums, read, share, first_step=first_step, ahead=ahead
        )
