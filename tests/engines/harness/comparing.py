"""Compares two folders of batches."""

from __future__ import annotations

import pathlib
import shutil

from pipelines.batches.folder import CHECKSUMS_NAME, MANIFEST_NAME, PRIVATE_NAME

_CHECKSUMS = (MANIFEST_NAME, f"{PRIVATE_NAME}/{CHECKSUMS_NAME}")


def same_checksums(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Returns whether the manifests and the SHA-256 of every file are equal.

    Then the batches of verified folders are equal, which are not read for it.

    Args:
      one: A folder of batches.
      other: Another, or one that ``keep_checksums`` filled.
    """
    return all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in _CHECKSUMS
    )


def keep_checksums(out: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies the files that ``same_checksums`` reads.

    Args:
      out: A folder of batches.
      folder: Where the copies go; must not exist.
    """
    (folder / PRIVATE_NAME).mkdir(parents=True)
    for name in _CHECKSUMS:
        shutil.copy(out / name, folder / name)
