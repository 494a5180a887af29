"""Reads batches in step order, without Beam and without TensorFlow.

Formal guarantees, for ``read_batches`` run to its end without an error:
  - every step of the plan was yielded exactly once, in order, with all of its parts;
  - every byte was what ``dpsgd batches`` wrote: the SHA-256 of all records of a file is
    checked before the first of them is yielded;
  - otherwise an InputError names the file or step that is wrong.

Public: the manifest.  Sensitive: every yielded batch.

Example:

    for batch in read_batches("batches"):
        batch.step, batch.columns["label"], batch.weight
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

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
from pipelines.batches.record_checksums import RecordChecksum
from pipelines.batches.tfrecord import CorruptRecordError, iterate_records
from pipelines.files.file_buffer import FileBuffer
from pipelines.files.paths import StrPath, is_remote, join
from pipelines.files.threads import in_order


def read_file(
    directory: StrPath,
    file: BatchFile,
    checksums: dict[str, FileChecksum],
    buffer: FileBuffer,
) -> memoryview:
    """Returns the contents of a batch file, after checking its digests.

    Args:
      directory: Folder of batches, local or in a store.
      file: File of its manifest.
      checksums: From ``read_checksums``.
      buffer: Memory for the contents, which are valid until it reads another file.

    Raises:
      InputError: missing, without a checksum, or not the bytes that were written.
    """
    path, checksum = join(directory, file.name), checksum_of(file, checksums)
    try:
        data = buffer.read(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(data) != checksum.size or not all(
        hashlib.sha256(frame).hexdigest() == sha256
        for frame, sha256 in _frames(data, file, checksum)
    ):
        raise changed(path)
    return data


def _frames(
    data: memoryview, file: BatchFile, checksum: FileChecksum
) -> Iterator[tuple[memoryview, str]]:
    """Yields the pieces of the data that have digests, each with its digest."""
    if not checksum.records:
        yield data, checksum.sha256
        return
    position = 0
    for record in parse_records(file, checksum):
        yield data[position : position + record.size], record.sha256
        position += record.size


def parse_records(file: BatchFile, checksum: FileChecksum) -> list[RecordChecksum]:
    """Returns the checksums of all records of a file; empty if it has none.

    Args:
      file: File of the manifest.
      checksum: Checksum of the file.

    Raises:
      InputError: malformed, or sizes that do not add up to that of the file.
    """
    try:
        records = list(map(record_checksums.parse, checksum.records))
    except (TypeError, ValueError):
        raise damaged_checksums(file) from None
    if records and sum(record.size for record in records) != checksum.size:
        raise damaged_checksums(file)
    return records


def damaged_checksums(file: BatchFile) -> InputError:
    """Returns the error for checksums that do not match a file's records."""
    return InputError(
        f"Expected the checksums of the records of {file.name} to be as they were "
        "written. Restore private/checksums.json, or make the batches again."
    )


def checksum_of(file: BatchFile, checksums: dict[str, FileChecksum]) -> FileChecksum:
    """Returns the checksum of a file.

    Args:
      file: File of the manifest.
      checksums: From ``read_checksums``.

    Raises:
      InputError: there is none.
    """
    if file.name not in checksums:
        raise InputError(f"Expected a checksum for batch file {file.name}.")
    return checksums[file.name]


def unreadable(path: str, error: OSError) -> InputError:
    """Returns the error for a batch file that cannot be read.

    Args:
      path: Path of the file.
      error: Error of the read.
    """
    if not is_remote(path):
        return InputError(
            f"Expected batch file {path} to be readable: {type(error).__name__}. "
            "Restore it, or make the batches again."
        )
    return InputError(
        f"Expected batch file {path} to be readable: "
        f"{error.strerror or type(error).__name__}. Restore it, or access to it, and "
        "give the same command again: a run goes on from its last checkpoint."
    )


def changed(path: StrPath) -> InputError:
    """Returns the error for a batch file that was changed."""
    return InputError(
        f"Expected batch file {path} to be as it was written; it was changed. "
        "Restore it, or make the batches again."
    )


def check_file(
    data: bytes | memoryview, file: BatchFile, manifest: Manifest
) -> Iterator[PhysicalBatch]:
    """Yields the batches of one file, and checks their steps and parts.

    Args:
      data: Contents of the file.
      file: File of the manifest.
      manifest: Manifest of the folder.

    Raises:
      CorruptRecordError: a step or part is missing, repeated or out of order.
    """
    order = Order(file, manifest.parts_per_step)
    for record in iterate_records(data):
        batch = decode_batch(record, manifest.columns, manifest.physical_batch_size)
        order.enter(batch.step, batch.part)
        yield batch
    order.finish()


class Order:
    """Checks that a file holds each step and part once and in order.

    Args:
      file: File of a manifest.
      parts_per_step: Number of records of every step; None if it depends on the data.
    """

    def __init__(self, file: BatchFile, parts_per_step: int | None) -> None:
        self._file = file
        self._parts_per_step = parts_per_step
        self._end = (file.first_step + file.num_steps, 0)
        self._allowed = {(file.first_step, 0)}

    def enter(self, step: int, part: int) -> None:
        """Accepts the next physical batch.

        Args:
          step: Step of the batch.
          part: Index among the physical batches of the step.

        Raises:
          CorruptRecordError: it is not the next one.
        """
        if (step, part) not in self._allowed or step >= self._end[0]:
            raise CorruptRecordError(
                f"Expected the batches of {self._file.name} in order; found step "
                f"{step}, part {part}."
            )
        next_part, next_step = (step, part + 1), (step + 1, 0)
        if self._parts_per_step is None:
            self._allowed = {next_part, next_step}
        else:
            is_last = part + 1 == self._parts_per_step
            self._allowed = {next_step if is_last else next_part}

    def finish(self) -> None:
        """Accepts the end of the file.

        Raises:
          CorruptRecordError: batches are missing.
        """
        if self._end not in self._allowed:
            raise CorruptRecordError(
                f"Expected {self._file.name} to end with step {self._end[0] - 1}."
            )


def read_batches(directory: StrPath, *, first_step: int = 0) -> Iterator[PhysicalBatch]:
    """Yields every physical batch of steps ``first_step`` and later, in step order.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
      first_step: First step to read; a resumed run passes its number of finished steps.

    Raises:
      InputError: missing, changed, incomplete or repeated data, or ``first_step`` is
        out of range.
    """
    manifest = read_manifest(directory)
    checksums = read_checksums(directory)
    check_int("first_step", first_step, at_least=0, at_most=manifest.plan.num_steps)
    return _read(directory, manifest, checksums, first_step)


def _read(
    directory: StrPath,
    manifest: Manifest,
    checksums: dict[str, FileChecksum],
    first_step: int,
) -> Iterator[PhysicalBatch]:
    files = files_from(manifest.files, first_step)
    for file, data in _contents(directory, files, checksums):
        for batch in check_file(data, file, manifest):
            if batch.step >= first_step:
                yield batch


def _contents(
    directory: StrPath,
    files: Iterable[BatchFile],
    checksums: dict[str, FileChecksum],
) -> Iterator[tuple[BatchFile, memoryview]]:
    """Yields checked files; reads and hashes the next one while one is used."""
    buffers = itertools.cycle([FileBuffer(), FileBuffer()])

    def read(work: tuple[BatchFile, FileBuffer]) -> tuple[BatchFile, memoryview]:
        file, buffer = work
        return file, read_file(directory, file, checksums, buffer)

    with ThreadPoolExecutor(1) as pool:
        yield from in_order(pool, read, zip(files, buffers, strict=False), 2)


def files_from(files: Iterable[BatchFile], first_step: int) -> Iterator[BatchFile]:
    """Returns the files that hold a step from ``first_step`` on.

    Args:
      files: Files in step order.
      first_step: First step to read.
    """
    return (file for file in files if file.first_step + file.num_steps > first_step)
