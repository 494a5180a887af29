"""The batches of a folder of this machine or of a store, for the core to read.

Other guarantees:
  - At most 64 MiB are read ahead from a store, or two records if these are longer,
    whatever the size of the batches.

Public: the manifest.  Sensitive: what is read.
"""

from __future__ import annotations

import functools
import os

from accounting.core.validation import InputError
from pipelines.core.batches.columns import record_bytes
from pipelines.core.batches.manifest import Checksums, Manifest
from pipelines.core.batches.ranges import RANGE_BYTES
from pipelines.core.batches.reader import Read, changed
from pipelines.core.batches.stored import StoredBatches
from pipelines.files.json_files import read_known
from pipelines.files.paths import StrPath, is_remote, join
from pipelines.files.storage import exists, range_reader, size

#: Maximum bytes and number of the ranges that are read ahead.
_AHEAD_BYTES, _MOST_AHEAD = 64 << 20, 8


def stored(directory: StrPath) -> StoredBatches:
    """Returns the batches of a folder, of which nothing is read yet.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
    """
    return StoredBatches(
        place=os.fspath(directory).rstrip("/"),
        find=functools.partial(_find, directory),
        reader=functools.partial(read_from, directory),
        ahead=functools.partial(_num_ahead, directory),
    )


def _find(directory: StrPath, name: str) -> bytes | None:
    path = join(directory, name)
    return read_known(path) if exists(path) else None


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
    reader = range_reader(directory)

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
            return reader(path, start, count)
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
