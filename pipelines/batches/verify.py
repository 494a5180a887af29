"""Checks a folder of batches against its manifest and checksums.

If `verify` returns no findings:
  - the manifest is the one that was written, and every file that it names is there,
    byte for byte as written; no other batch file is in the folder;
  - the files hold every step of the plan once, in order, with all of its parts;
  - every record has its real rows first, weights of 0 and 1 only, and zero padding;
  - the key in the folder, if it holds one, is the one that sampled the batches;
  - the certificate in the folder, if it holds one, is about these batches.

``certify`` checks that the records are what plan, key and input determine.

Public: the findings, which name files and steps.  Sensitive: the batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from accounting.core.validation import InputError
from pipelines.batches import folder
from pipelines.core.batches.manifest import BatchFile, Checksums, Manifest
from pipelines.core.batches.reader import changed, check_file
from pipelines.core.threads import in_order, num_cores
from pipelines.files.storage import StrPath, is_remote, join, sizes

#: More threads would wait for Python's global lock.
_MAX_THREADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What was checked; each finding is one line.  All public.

    ``certified`` says whether the folder holds a certificate of these batches.
    """

    num_files: int
    num_steps: int
    findings: tuple[str, ...]
    certified: bool = False


def _check_files(
    directory: StrPath,
    manifest: Manifest,
    checksums: Checksums,
    found: dict[str, int],
    progress: Callable[[int], None],
) -> list[str]:
    """Returns the findings about the files of the manifest, in their order."""
    num_threads = 1 if is_remote(directory) else min(num_cores(), _MAX_THREADS)
    read = folder.read_from(directory, checksums)

    def finding(file: BatchFile) -> str | None:
        try:
            checksum = checksums.of_file(file)
            if found.get(file.name, checksum.size) != checksum.size:
                raise changed(join(directory, file.name))
            check_file(file, manifest, checksum, read)
        except InputError as error:
            return str(error)
        return None

    findings: list[str] = []
    with ThreadPoolExecutor(num_threads) as pool:
        checked = in_order(pool, finding, manifest.files, 2 * num_threads)
        with contextlib.closing(checked):
            for count, each in enumerate(checked, start=1):
                findings += [] if each is None else [each]
                progress(count)
    return findings


def verify(
    directory: StrPath, *, progress: Callable[[int], None] = lambda num_files: None
) -> Verification:
    """Checks every byte of a folder of batches, and reports all findings.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
      progress: Called with the number of files checked so far.

    Raises:
      InputError: the manifest or the checksums cannot be read.
    """
    manifest = folder.read_manifest(directory)
    checksums, found = folder.read_checksums(directory), sizes(directory)
    findings = _check_files(directory, manifest, checksums, found, progress)
    known = {file.name for file in manifest.files}
    for name in sorted(found):
        if name.endswith(".tfrecord") and name not in known:
            findings.append(f"Expected no batch file {name}: it is not of this job.")
    key_file = join(directory, folder.PRIVATE_NAME, folder.KEY_NAME)
    if not folder.is_same_key(directory, checksums):
        findings.append(
            f"Expected {key_file} to be the key of these batches; it was changed. "
            "Restore it: they are as they were."
        )
    certified = False
    try:
        certified = folder.check_certificate(directory, manifest, checksums)
    except InputError as error:
        findings.append(str(error))
    return Verification(
        num_files=len(manifest.files),
        num_steps=manifest.plan.num_steps,
        findings=tuple(findings),
        certified=certified and not findings,
    )
