"""Certifies batches: compares every record with the reference sampler's.

A certificate is written only if ``verify`` and the reference find nothing, and if the
description in the manifest, with the bound on the rows of users, is that of the input.
An earlier certificate is removed first.  ``pipelines.core.resample`` says what a
certificate proves, and keeps memory within ``memory_limit``;
``pipelines.core.batches.manifest`` says what a certificate is bound to.

Public: findings, which name steps and files.  Sensitive: key, input, batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

from accounting.core.validation import InputError
from pipelines.batches import folder
from pipelines.batches.verify import Verification, verify
from pipelines.core import rows
from pipelines.core.batches.manifest import Checksums, Manifest, RecordChecksum
from pipelines.core.resample import Resampling, differing_steps, resampling
from pipelines.core.threads import machine_memory, num_cores
from pipelines.files import storage
from pipelines.files.key_sources import read_key_file
from pipelines.files.storage import StrPath, join
from pipelines.inputs.parquet_blocks import list_blocks
from pipelines.inputs.source_table import open_listed

#: Called with a label, what is done, and the total.
Progress = Callable[[str, int, int], None]
FILES, STEPS = ("files", "steps")

#: Memory in bytes that is taken unasked, and the most of it, for larger row groups.
_USUAL_MEMORY, _MOST_MEMORY = 11 << 27, 4 << 30


def default_memory(resampled: Resampling, num_threads: int) -> int:
    """Returns 1.375 GiB, or 4 GiB if the row groups of the input need more than that.

    It is at most half of what this machine or container has.

    Args:
      resampled: What is made again.
      num_threads: Number of threads that read.
    """
    half = machine_memory() // 2
    usual, most = min(_USUAL_MEMORY, half), min(_MOST_MEMORY, half)
    return usual if resampled.fitting_steps(usual, num_threads) > 0 else most


def certify(
    directory: StrPath,
    source: str,
    key_file: StrPath | None = None,
    *,
    memory_limit: int | None = None,
    progress: Progress = lambda label, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Compares batches with those of the reference; without findings it certifies them.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
      source: The ``--input`` of the batches.
      key_file: File of the sampling key; by default the one in ``directory``.
      memory_limit: Memory in bytes; by default ``default_memory``'s.
      progress: Called with ``FILES`` or ``STEPS``, what is done, and the total.
      say: Called with what the comparison costs, before it begins.

    Raises:
      InputError: key or input are not those of the batches, or memory is too small.
    """
    manifest = folder.read_manifest(directory)
    checksums = folder.read_checksums(directory)
    resampled = _resampling(directory, manifest, source, key_file)
    num_threads = num_cores()
    if memory_limit is None:
        memory_limit = default_memory(resampled, num_threads)
    num_passes = len(resampled.ranges(memory_limit, num_threads))
    say(
        f"memory: {memory_limit / 2**30:.3g} GiB at most (--memory-limit); passes over "
        f"--input: {num_passes:,}"
    )
    written = list(_written(manifest, checksums))
    storage.delete(join(directory, folder.CERTIFICATE_NAME))
    num_files, num_steps = len(manifest.files), manifest.plan.num_steps
    found = verify(directory, progress=lambda done: progress(FILES, done, num_files))
    remade = resampled.steps(
        memory=memory_limit,
        num_threads=num_threads,
        progress=lambda done: progress(STEPS, done, num_steps),
    )
    differing = differing_steps(remade, written)
    findings = (*found.findings, *_findings(differing))
    if not findings:
        folder.write_certificate(directory, manifest, checksums)
    return dataclasses.replace(found, findings=findings, certified=not findings)


def _resampling(
    directory: StrPath, manifest: Manifest, source: str, key_file: StrPath | None
) -> Resampling:
    if key_file is None:
        key_file = join(directory, folder.PRIVATE_NAME, folder.KEY_NAME)
    key, dataset = read_key_file(key_file), list_blocks(source)
    if dataset.description != manifest.dataset:  # such as a note of other users
        raise InputError(
            f"Expected --input {source} to be described as in the manifest of the "
            "batches. Give the --input of `dpsgd batches`, or make the batches again."
        )
    files = {block.name: block.path for block in dataset.blocks}
    data = rows.list_blocks([*files.items()], open_listed)
    return resampling(manifest.to_json(), key, data)


def _written(manifest: Manifest, checksums: Checksums) -> Iterator[RecordChecksum]:
    """Yields the checksums of all records, in the order of the files."""
    for file in manifest.files:
        yield from checksums.of_file(file).records


def _findings(differing: Iterable[int]) -> Iterator[str]:
    """Yields a line for each run of consecutive steps."""
    numbered = enumerate(differing)
    for _, group in itertools.groupby(numbered, lambda each: each[1] - each[0]):
        steps = [step for _, step in group]
        more = f" to {steps[-1]}" if len(steps) > 1 else ""
        yield (
            f"Expected step {steps[0]}{more} to be as the reference sampler makes it "
            "from key, plan and input; rows, weights or records differ."
        )
