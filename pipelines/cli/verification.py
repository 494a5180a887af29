"""The work of ``dpsgd verify``."""

from __future__ import annotations

import os
from collections.abc import Callable

from accounting.validation import InputError
from pipelines.batches import manifest
from pipelines.batches.verify import Verification
from pipelines.batches.verify import verify as verify_batches
from pipelines.files import storage
from pipelines.files.paths import is_remote, join
from pipelines.tables.prepared_files import (
    PreparedVerification,
    is_prepared,
    verify_prepared,
)


def verify(
    directory: str, progress: Callable[[int, int], None]
) -> Verification | PreparedVerification:
    """Checks every byte of a folder of batches or of prepared data.

    Args:
      directory: Folder of batches, also in a store; or of prepared data.
      progress: Called with the number of files checked so far and in total.

    Raises:
      InputError: the folder is neither.
    """
    if not is_remote(directory):
        if is_prepared(directory):
            return verify_prepared(directory, progress=progress)
        above = os.path.dirname(os.path.normpath(directory)) or "."
        is_batches = storage.exists(join(directory, manifest.MANIFEST_NAME))
        if is_prepared(above) and not is_batches:
            raise InputError(
                f"Expected all of the prepared data, not a part of it. Give `dpsgd "
                f"verify {above}`."
            )
    total = len(manifest.read_manifest(directory).files)
    return verify_batches(directory, progress=lambda done: progress(done, total))


def counted(result: Verification | PreparedVerification) -> str:
    """Returns the number of files and, if public, of rows or steps, as text."""
    files = f"{result.num_files:,} files"
    if isinstance(result, PreparedVerification):
        return (
            files if result.num_rows is None else f"{files}, {result.num_rows:,} rows"
        )
    return f"{files}, {result.num_steps:,} steps"
