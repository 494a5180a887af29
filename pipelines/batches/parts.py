"""Reads the physical batches of one of several workers: part p belongs to p mod W.

Formal guarantees, for ``read_parts`` of all workers run to their ends without an error:
  - exactly one worker was yielded each physical batch of the plan, in step order;
  - every byte was what ``dpsgd batches`` wrote: the SHA-256 of a record is checked
    before it is yielded, the checksums of a file name each of its steps and parts once
    and in order, as the records do, and their sizes add up to the size of the file;
  - otherwise an InputError of at least one worker names the file or step that is wrong.

Other guarantees:
  - A worker reads only the bytes of its own records, each once.
  - At most 64 MiB are read ahead from a store, or two records if these are longer,
    whatever the size of the batches.

A file without checksums of records, from an earlier version, is read and checked as a
whole, as by ``read_batches``.

Public: the manifest.  Sensitive: every yielded batch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from accounting.validation import check_int
from pipelines.batches.batch_format import PhysicalBatch, decode_batch
from pipelines.batches.columns import record_bytes
from pipelines.batches.manifest import (
    FileChecksum,
    Manifest,
    read_checksums,
    read_manifest,
)
from pipelines.batches.ranges import RANGE_BYTES, Range, ranges
from pipelines.batches.reader import (
    changed,
    check_file,
    damaged_checksums,
    unreadable,
)
from pipelines.batches.share import Share
from pipelines.batches.tfrecord import iterate_records
from pipelines.files.paths import StrPath, is_remote, join
from pipelines.files.storage import range_reader, size
from pipelines.files.threads import in_order

#: Maximum bytes and number of the ranges that are read ahead.
_AHEAD_BYTES, _MOST_AHEAD = 64 << 20, 8


def read_parts(
    directory: StrPath, share: Share, *, first_step: int = 0
) -> Iterator[PhysicalBatch]:
    """Yields a worker's physical batches; other arguments as for ``read_batches``.

    Args:
      share: The parts of the worker.

    Raises:
      InputError: as ``read_batches``.
    """
    manifest = read_manifest(directory)
    checksums = read_checksums(directory)
    check_int("first_step", first_step, at_least=0, at_most=manifest.plan.num_steps)
    return _read(directory, manifest, checksums, share, first_step)


def has_record_checksums(directory: StrPath) -> bool:
    """Whether a worker can read only its own parts.

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
    read = range_reader(directory)

    def checked(found: Range) -> tuple[Range, list[memoryview]]:
        return found, _checked(found, join(directory, found.file.name), read)

    depth = _depth(directory, manifest, checksums)
    wanted = ranges(manifest, checksums, share, first_step)
    with ThreadPoolExecutor(depth - 1) as pool:
        ahead = in_order(pool, checked, wanted, depth)
        with contextlib.closing(ahead):
            for found, frames in ahead:
                for batch in _decoded(found, frames, manifest):
                    if batch.step >= first_step and share.has(batch.part):
                        yield batch


def _depth(
    directory: StrPath, manifest: Manifest, checksums: dict[str, FileChecksum]
) -> int:
    """Returns how many ranges are held: more of a store, which is slow to answer."""
    if not is_remote(directory):
        return 2
    whole = [sums.size for sums in checksums.values() if not sums.records]
    record = record_bytes(manifest.columns, manifest.physical_batch_size)
    return max(2, min(_MOST_AHEAD, _AHEAD_BYTES // max([RANGE_BYTES, record, *whole])))


def _checked(
    found: Range, path: str, read: Callable[[str, int, int], bytes]
) -> list[memoryview]:
    """Returns the records of a range, or the whole file, after checking digests."""
    try:
        # In a store, the trainer checks the sizes of all files before its first
        # step, in one listing.
        if not is_remote(path) and size(path) not in (None, found.checksum.size):
            raise changed(path)
        data = memoryview(read(path, found.start, found.end - found.start))
    except OSError as error:
        raise unreadable(path, error) from None
    frames, position = [], 0
    for one in found.records or (found.checksum,):
        frames.append(data[position : position + one.size])
        position += one.size
        if hashlib.sha256(frames[-1]).hexdigest() != one.sha256:
            raise changed(path)
    return frames


def _decoded(
    found: Range, frames: list[memoryview], manifest: Manifest
) -> Iterator[PhysicalBatch]:
    if not found.records:
        yield from check_file(frames[0], found.file, manifest)
        return
    for frame, checksum in zip(frames, found.records, strict=True):
        [record] = iterate_records(frame)
        batch = decode_batch(record, manifest.columns, manifest.physical_batch_size)
        if (batch.step, batch.part) != (checksum.step, checksum.part):
            raise damaged_checksums(found.file)
        yield batch
