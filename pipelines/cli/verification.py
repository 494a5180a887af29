"""The work of ``dpsgd verify``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from accounting.validation import InputError
from pipelines.batches import manifest
from pipelines.batches.verify import Verification
from pipelines.batches.verify import verify as verify_batches
from pipelines.certify import DEFAULT_MEMORY_LIMIT
from pipelines.certify import certify as certify_batches
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


def certify(
    directory: str, asked: dict[str, Any], progress: Callable[[str, int, int], None]
) -> Verification:
    """Compares batches with those of the reference sampler, and certifies them.

    Args:
      directory: Folder of batches, also in a store.
      asked: Options of ``--resample`` by their names.
      progress: As in ``certify.certify``.

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
        memory_limit=asked["memory-limit"] or DEFAULT_MEMORY_LIMIT,
        progress=progress,
    )


def check_alone(asked: dict[str, Any]) -> None:
    """Refuses options of ``--resample`` without it; arguments as for ``certify``.

    Raises:
      InputError: one of them is given.
    """
    for name, value in asked.items():
        if value is not None:
            raise InputError(
                f"Expected --resample with --{name} {value}. Add it, or omit --{name}."
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
