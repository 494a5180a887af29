"""Checks a folder of batches against its manifest and checksums.

Formal guarantees, if ``verify`` returns no findings:
  - the manifest is the one that was written, and every file that it names is there,
    byte for byte as written; no other batch file is in the folder;
  - the files hold every step of the plan once, in order, with all of its parts;
  - the checksums of single records, where there are any, are those of the files;
  - every record has its real rows first, weights of 0 and 1 only, and zero padding;
  - the key in the folder, if it holds one, is the one that sampled the batches;
  - the certificate in the folder, if it holds one, is about these batches.

That the records are what plan, key and input determine is for ``certify``.

Public: the findings, which name files and steps.  Sensitive: the batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from accounting.validation import InputError
from pipelines.batches.batch_format import PhysicalBatch
from pipelines.batches.certificate import (
    CERTIFICATE_NAME,
    read_certificate,
    records_id,
)
from pipelines.batches.manifest import (
    KEY_NAME,
    PRIVATE_NAME,
    BatchFile,
    FileChecksum,
    Manifest,
    is_same_key,
    read_checksums,
    read_manifest,
)
from pipelines.batches.reader import (
    check_file,
    damaged_checksums,
    parse_records,
    read_file,
)
from pipelines.files.file_buffer import FileBuffer
from pipelines.files.paths import StrPath, is_remote, join
from pipelines.files.storage import sizes
from pipelines.files.threads import in_order, num_cores

#: More threads would wait for Python's global lock.
_MAX_THREADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What was checked; each finding is one line.  All public.

    ``certified`` if the folder holds a certificate of these batches.
    """

    num_files: int
    num_steps: int
    findings: tuple[str, ...]
    certified: bool = False


def _check_padding(batch: PhysicalBatch, file: BatchFile) -> None:
    num_real = int(np.count_nonzero(batch.weight))
    ordered = (batch.weight[:num_real] == 1).all()
    empty = not any(np.any(values[num_real:]) for values in batch.columns.values())
    if not ordered or not empty:
        raise InputError(
            f"Expected step {batch.step} of {file.name} to hold real rows of weight 1, "
            "then padding of zeros."
        )


def _check_file(
    directory: StrPath,
    file: BatchFile,
    manifest: Manifest,
    checksums: dict[str, FileChecksum],
    buffer: FileBuffer,
) -> None:
    data = read_file(directory, file, checksums, buffer)
    found, num_real = list[tuple[int, int]](), 0
    for batch in check_file(data, file, manifest):
        _check_padding(batch, file)
        found.append((batch.step, batch.part))
        num_real += int(np.count_nonzero(batch.weight))
    checksum = checksums[file.name]
    if (len(found), num_real) != (checksum.num_records, checksum.num_real):
        raise InputError(f"Expected {file.name} to hold as many rows as were written.")
    named = [(one.step, one.part) for one in parse_records(file, checksum)]
    if checksum.records and named != found:
        raise damaged_checksums(file)


def _check_files(
    directory: StrPath,
    manifest: Manifest,
    checksums: dict[str, FileChecksum],
    progress: Callable[[int], None],
) -> list[str]:
    """Returns the findings about the files of the manifest, in their order."""
    num_threads = 1 if is_remote(directory) else min(num_cores(), _MAX_THREADS)
    buffers: queue.SimpleQueue[FileBuffer] = queue.SimpleQueue()
    for _ in range(num_threads):
        buffers.put(FileBuffer(cached=False))

    def finding(file: BatchFile) -> str | None:
        buffer = buffers.get()
        try:
            _check_file(directory, file, manifest, checksums, buffer)
        except InputError as error:
            return str(error)
        finally:
            buffers.put(buffer)
        return None

    findings: list[str] = []
    with ThreadPoolExecutor(num_threads) as pool:
        checked = in_order(pool, finding, manifest.files, 2 * num_threads)
        with contextlib.closing(checked):
            for count, found in enumerate(checked, start=1):
                findings += [] if found is None else [found]
                progress(count)
    return findings


def verify(
    directory: StrPath,
    *,
    progress: Callable[[int], None] = lambda num_files: None,
) -> Verification:
    """Checks every byte of a folder of batches, and reports all findings.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
      progress: Called with the number of files checked so far.

    Raises:
      InputError: the manifest or the checksums cannot be read.
    """
    manifest = read_manifest(directory)
    checksums = read_checksums(directory)
    findings = _check_files(directory, manifest, checksums, progress)
    known = {file.name for file in manifest.files}
    for name in sorted(sizes(directory)):
        if name.endswith(".tfrecord") and name not in known:
            findings.append(f"Expected no batch file {name}: it is not of this job.")
    if not is_same_key(directory):
        findings.append(
            f"Expected {join(directory, PRIVATE_NAME, KEY_NAME)} to be the key of "
            "these batches; it was changed. Restore it: they are as they were."
        )
    certificate = read_certificate(directory)
    certified = certificate is not None and certificate.is_about(
        manifest.fingerprint, records_id(directory)
    )
    if certificate is not None and not certified:
        findings.append(
            f"Expected {join(directory, CERTIFICATE_NAME)} to be about these batches. "
            "Remove it, or run `dpsgd verify --resample`."
        )
    return Verification(
        num_files=len(manifest.files),
        num_steps=manifest.plan.num_steps,
        findings=tuple(findings),
        certified=certified and not findings,
    )
