"""Compares two folders of batches byte by byte."""

from __future__ import annotations

import filecmp
import pathlib
import shutil

from pipelines.batches.folder import CHECKSUMS_NAME, MANIFEST_NAME, PRIVATE_NAME

_CHECKSUMS = (MANIFEST_NAME, f"{PRIVATE_NAME}/{CHECKSUMS_NAME}")


def same_bytes(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Returns whether batches, manifest and checksums are equal, file by file.

    Key files are not compared; the manifests tell whether the keys were the same.

    Args:
      one: A folder of batches.
      other: Another.
    """
    names = _names(one)
    if names != _names(other) or not any(n.endswith(".tfrecord") for n in names):
        return False
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def same_checksums(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Returns whether the manifests and the SHA-256 of every file are equal.

    For verified folders this equals ``same_bytes``, without reading the batches.

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


def _names(folder: pathlib.Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".key"
    )
