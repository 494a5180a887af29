"""The batches of a folder of this machine or of a store, for the core to read.

Public: the manifest.  Sensitive: what is read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from pipelines.core.batches.manifest import Checksums, Manifest
from pipelines.core.batches.stored import StoredBatches
from pipelines.files.paths import StrPath
from pipelines.files.storage import read_bytes


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
) -> tuple[Callable[[str, int, int], bytes], int]:
    from pipelines.batches import reader  # who reads a manifest needs no PyArrow

    return reader.read_from(directory, checksums), reader.num_ahead(directory, manifest)
