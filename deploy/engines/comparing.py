"""Whether two folders of batches hold the same bytes."""

from __future__ import annotations

import filecmp
import pathlib


def same_bytes(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether batches, manifest and checksums are the same, file by file.

    Keys that a job made for itself are left out: batches that are the same without the
    same key would be a fault, and the manifest tells.
    """
    names = _names(one)
    if names != _names(other) or not any(n.endswith(".tfrecord") for n in names):
        return False
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def _names(folder: pathlib.Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".key"
    )
