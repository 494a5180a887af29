"""The work of ``dpsgd verify``."""

from __future__ import annotations

import os
from typing import Any

from accounting.core.validation import InputError
from pipelines.batches.folder import MANIFEST_NAME, read_manifest
from pipelines.batches.verify import Verification
from pipelines.batches.verify import verify as verify_batches
from pipelines.certify import certify as certify_batches
from pipelines.files import storage
from pipelines.files.progress_bars import Bars
from pipelines.files.storage import is_remote, join
from pipelines.tables.prepared_files import (
    PreparedVerification,
    is_prepared,
    verify_prepared,
)


def verify(
    directory: str, asked: dict[str, Any], bars: Bars
) -> Verification | PreparedVerification:
    """Checks every byte of a folder of batches or of prepared data.

    Args:
      directory: Folder of batches, also in a store; or of prepared data.
      asked: Options of ``--resample`` by their names; all None.
      bars: Shows "files".

    Raises:
      InputError: the folder is neither, or an option is given without ``--resample``.
    """
    for name, value in asked.items():
        if value is not None:
            raise InputError(
                f"Expected --resample with --{name} {value}. Add it, or omit --{name}."
            )

    def advance(done: int, total: int) -> None:
        bars.update("files", done, total)

    if not is_remote(directory):
        if is_prepared(directory):
            return verify_prepared(directory, progress=advance)
        above = os.path.dirname(os.path.normpath(directory)) or "."
        is_batches = storage.exists(join(directory, MANIFEST_NAME))
        if is_prepared(above) and not is_batches:
            raise InputError(
                f"Expected all of the prepared data, not a part of it. Give `dpsgd "
                f"verify {above}`."
            )
    total = len(read_manifest(directory).files)
    return verify_batches(directory, progress=lambda done: advance(done, total))


def certify(
    directory: str, asked: dict[str, Any], bars: Bars
) -> Verification | PreparedVerification:
    """Compares batches with those of the reference sampler, and certifies them.

    Args:
      directory: Folder of batches, also in a store.
      asked: Options of ``--resample`` by their names.
      bars: Shows "files" and "steps".

    Raises:
      InputError: prepared data, no input, or as ``certify.certify``.
    """
    if asked["input"] is None:
        raise InputError(
            "Expected --input with --resample: the records are made again from it. "
            "Give the --input of `dpsgd batches`."
        )
    return certify_batches(
        directory,
        asked["input"],
        asked["key-file"],
        memory_limit=asked["memory-limit"],
        progress=bars.update,
        say=bars.say,
    )


def counted(result: Verification | PreparedVerification) -> str:
    """Returns the number of files and, if public, of rows or steps, as text."""
    files = f"{result.num_files:,} files"
    if isinstance(result, PreparedVerification):
        return (
            files if result.num_rows is None else f"{files}, {result.num_rows:,} rows"
        )
    steps = f"{files}, {result.num_steps:,} steps"
    return f"{steps}; certified" if result.certified else steps
