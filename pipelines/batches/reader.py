"""Reads the batches of a folder in step order, without Beam and without TensorFlow.

Formal guarantees:
  - Those of ``pipelines.core.batches.reader``: every record is compared with its
    digest, and every step and part is yielded once.

Other guarantees:
  - At most 64 MiB are read ahead from a store, or two records if these are longer,
    whatever the size of the batches.

Public: the manifest.  Sensitive: every yielded batch.

Example:

    for batch in read_batches("batches"):
        batch.step, batch.columns["label"], batch.weight
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accounting.core.validation import InputError
from pipelines.core.batches.columns import record_bytes
from pipelines.core.batches.manifest import Checksums, Manifest
from pipelines.core.batches.ranges import ALL, RANGE_BYTES, Read, Share, changed
from pipelines.core.batches.stored import StoredBatches
from pipelines.files.storage import (
    StrPath,
    is_remote,
    join,
    read_bytes,
    read_range,
    size,
)

if TYPE_CHECKING:  # who reads a manifest needs no PyArrow
    from pipelines.core.batches.batch_format import PhysicalBatch

#: Maximum bytes and number of the ranges that are read ahead.
_AHEAD_BYTES, _MOST_AHEAD = 64 << 20, 8


def read_batches(
    directory: StrPath, *, first_step: int = 0, share: Share = ALL
) -> Iterator[PhysicalBatch]:
    """Yields every physical batch of steps ``first_step`` and later, in step order.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
      first_step: First step to read; a resumed run passes its number of finished steps.
      share: The parts of one of several workers, if not all.

    Raises:
      InputError: missing, changed, incomplete or repeated data, or ``first_step`` is
        out of range.
    """
    found = stored(directory)
    return found.batches(
        found.manifest(), found.checksums(), first_step=first_step, share=share
    )


def stored(directory: StrPath) -> StoredBatches:
    """Returns the batches of a folder, of which nothing is read yet.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
    """
    return StoredBatches(
        place=os.fspath(directory).rstrip("/"),
        read_file=read_bytes,
        reader=functools.partial(_reader, directory),
    )


def _reader(
    directory: StrPath, manifest: Manifest, checksums: Checksums
) -> tuple[Read, int]:
    return read_from(directory, checksums), _num_ahead(directory, manifest)


def _num_ahead(directory: StrPath, manifest: Manifest) -> int:
    """Returns how many ranges are read ahead: more of a store, which answers slowly."""
    if not is_remote(directory):
        return 1
    record = record_bytes(manifest.columns, manifest.physical_batch_size)
    return max(2, min(_MOST_AHEAD, _AHEAD_BYTES // max(RANGE_BYTES, record))) - 1


def read_from(directory: StrPath, checksums: Checksums) -> Read:
    """Returns a function that reads the batch files of a folder, of their sizes.

    Args:
      directory: Folder of batches, local or in a store.
      checksums: From ``read_checksums``.
    """

    def read(name: str, start: int, count: int) -> bytes:
        path = join(directory, name)
        try:
            # The sizes of a store's files are compared by ``verify``, and by the
            # trainer before its first step, in one listing.
            if not is_remote(path) and size(path) not in (
                None,
                checksums.files[name].size,
            ):
                raise changed(path)
            return read_range(path, start, count)
        except OSError as error:
            raise _unreadable(path, error) from None

    return read


def _unreadable(path: str, error: OSError) -> InputError:
    """Returns the error for a batch file that cannot be read."""
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
