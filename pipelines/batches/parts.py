"""Reads the physical batches of one of several workers: its share of the bytes.

Part p of a step is worker p mod W's.

Formal guarantees, for ``read_parts`` of all workers run to their ends without an error:
  - exactly one worker was yielded each physical batch of the plan, and in step order;
  - every byte was what ``dpsgd batches`` wrote: SHA-256 per record, checked before the
    record is yielded, where the checksums of a file name each of its steps and parts
    once and in order, and sizes that add up to the size of the file;
  - otherwise an InputError says which file, or which step, is wrong, to at least one of
    the workers.

Of a file without checksums of records, as earlier versions wrote, a worker reads and
checks all, as ``read_batches``.

Public: the manifest.  Sensitive: every yielded batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from accounting.validation import InputError, check_int
from pipelines.batches import record_checksums
from pipelines.batches.batch_format import PhysicalBatch, decode_batch
from pipelines.batches.manifest import (
    BatchFile,
    FileChecksum,
    Manifest,
    read_checksums,
    read_manifest,
)
from pipelines.batches.reader import Order, check_file, files_from, read_file
from pipelines.batches.record_checksums import RecordChecksum
from pipelines.batches.share import Share
from pipelines.batches.tfrecord import iterate_records
from pipelines.files.file_buffer import FileBuffer
from pipelines.files.paths import StrPath, join
from pipelines.files.storage import size, slices


def read_parts(
    directory: StrPath, share: Share, *, first_step: int = 0
) -> Iterator[PhysicalBatch]:
    """Yields a worker's physical batches of steps ``first_step`` and later.

    Args:
      directory: A folder that ``dpsgd batches`` wrote, here or in a store.
      share: Which parts.
      first_step: Where to start; a resumed run passes the number of finished steps.

    Raises:
      InputError: missing, changed, incomplete or repeated data, or a bad start.
    """
    manifest = read_manifest(directory)
    checksums = read_checksums(directory)
    check_int("first_step", first_step, at_least=0, at_most=manifest.plan.num_steps)
    return _read(directory, manifest, checksums, share, first_step)


def has_record_checksums(directory: StrPath) -> bool:
    """Whether a worker reads its own parts alone.

    Raises:
      InputError: no readable checksums.
    """
    return all(sums.records for sums in read_checksums(directory).values())


def _read(
    directory: StrPath,
    manifest: Manifest,
    checksums: dict[str, FileChecksum],
    share: Share,
    first_step: int,
) -> Iterator[PhysicalBatch]:
    buffer = FileBuffer()
    for file in files_from(manifest.files, first_step):
        if file.name in checksums and checksums[file.name].records:
            records = _records(file, manifest, checksums[file.name])
            yield from _ranges(directory, file, manifest, records, share, first_step)
            continue
        data = read_file(directory, file, checksums, buffer)
        for batch in check_file(data, file, manifest):
            if batch.step >= first_step and share.has(batch.part):
                yield batch


def _records(
    file: BatchFile, manifest: Manifest, checksum: FileChecksum
) -> list[RecordChecksum]:
    """Returns the checksums of all records, which are every step and part once."""
    try:
        records = list(map(record_checksums.parse, checksum.records))
    except (TypeError, ValueError):
        raise _refusal(file) from None
    order = Order(file, manifest.parts_per_step)
    for record in records:
        order.enter(record.step, record.part)
    order.finish()
    if sum(record.size for record in records) != checksum.size:
        raise _refusal(file)
    return records


def check_records(
    data: memoryview, file: BatchFile, manifest: Manifest, checksum: FileChecksum
) -> None:
    """Accepts a file whose records are those of its checksums, if it has any.

    Args:
      data: Contents of the file.
      file: Which file of the manifest.
      manifest: Of the folder.
      checksum: Of the file.

    Raises:
      InputError: a record differs, or the checksums are not of all of them.
    """
    position = 0
    for record in _records(file, manifest, checksum) if checksum.records else ():
        frame = data[position : position + record.size]
        if hashlib.sha256(frame).hexdigest() != record.sha256:
            raise _refusal(file)
        position += record.size


def _refusal(file: BatchFile) -> InputError:
    return InputError(
        f"Expected the checksums of the records of {file.name} to be as they were "
        "written. Restore private/checksums.json, or make the batches again."
    )


def _ranges(
    directory: StrPath,
    file: BatchFile,
    manifest: Manifest,
    records: list[RecordChecksum],
    share: Share,
    first_step: int,
) -> Iterator[PhysicalBatch]:
    path = join(directory, file.name)
    position = 0
    try:
        # What is missing is an error of the read.
        if size(path) not in (None, sum(record.size for record in records)):
            raise _changed(path)
        with slices(path) as read:
            for record in records:
                if record.step >= first_step and share.has(record.part):
                    yield _decoded(read(position, record.size), record, manifest, path)
                position += record.size
    except OSError as error:
        raise InputError(
            f"Expected batch file {path} to be readable: {type(error).__name__}. "
            "Restore it, or make the batches again."
        ) from None


def _decoded(
    data: bytes, checksum: RecordChecksum, manifest: Manifest, path: StrPath
) -> PhysicalBatch:
    if hashlib.sha256(data).hexdigest() != checksum.sha256:
        raise _changed(path)
    [record] = iterate_records(data)
    return decode_batch(record, manifest.columns, manifest.physical_batch_size)


def _changed(path: StrPath) -> InputError:
    return InputError(
        f"Expected batch file {path} to be as it was written; it was changed. "
        "Restore it, or make the batches again."
    )
