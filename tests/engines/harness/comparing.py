"""Whether two folders of batches hold the same bytes."""

from __future__ import annotations

import filecmp
import pathlib
import shutil

from pipelines.batches.manifest import CHECKSUMS_NAME, MANIFEST_NAME, PRIVATE_NAME

_CHECKSUMS = (MANIFEST_NAME, f"{PRIVATE_NAME}/{CHECKSUMS_NAME}")


def same_bytes(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether batches, manifest and checksums are the same, file by file.

    Keys that a job made for itself are left out: batches that are the same without the
    same key would be a fault, and the manifest tells.
    """
    names = _names(one)
    if names != _names(other) or not any(n.endswith(".tfrecord") for n in names):
        return False
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def same_checksums(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether the SHA-256 of every file, and the manifest, are the same.

    Of verified folders it says what ``same_bytes`` says, and reads next to nothing.
    """
    return all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in _CHECKSUMS
    )


def keep_checksums(out: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies of ``out`` what ``same_checksums`` needs."""
    (folder / PRIVATE_NAME).mkdir(parents=True)
    for name in _CHECKSUMS:
        shutil.copy(out / name, folder / name)


def _names(folder: pathlib.Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".key"
    )
