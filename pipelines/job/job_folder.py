"""The folder of a job: opened, locked, resumed, finished.

    OUT/private/job.json     digests of the job; its presence means unfinished
    OUT/private/files/       checksums of finished files, until the manifest is written
    OUT/private/spill/       rows between map and reduce, until then, unless elsewhere
    OUT/private/starts       of a shuffle, the ranks that start its steps, until then
    OUT/private/lock         on this machine, locked by the process that writes

Existing output is never replaced: a folder that is neither empty nor the unfinished
state of the same job (version, plan, layout, input, key) is refused.  A manifest is
written only when every file is there.

On this machine two jobs never write one folder at a time, and only this user may enter
the folder or read a batch, even if the folder existed before; otherwise the job is
refused before any work.  A store has no locks: whoever starts jobs lets one at a time
write to a folder there.

Public: plan and layout.  Sensitive: the key and ``private/``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
from contextlib import AbstractContextManager
from typing import Any

from accounting.core.neighboring_relation import REPLACE_SPECIAL, is_supported
from accounting.core.plan import DpSgdPlan, fingerprint
from accounting.core.validation import InputError
from pipelines.batches.folder import (
    CHECKSUMS_NAME,
    KEY_NAME,
    MANIFEST_NAME,
    PRIVATE_NAME,
    read_manifest,
    write_manifest,
)
from pipelines.core.batches.manifest import FORMAT_VERSION, FileChecksum, Manifest
from pipelines.core.files import locks
from pipelines.core.keys import commitment, derive
from pipelines.core.users import KEY_LABEL
from pipelines.files import outputs, storage
from pipelines.files.key_sources import read_key_file, read_or_create_key_file
from pipelines.files.storage import StrPath, is_remote, join
from pipelines.inputs.parquet_blocks import Dataset
from pipelines.inputs.source_table import table_of
from pipelines.job.packing import Layout

JOB_NAME = "job.json"
FILES_NAME = "files"
SPILL_NAME = "spill"
STARTS_NAME = "starts"


def checksum_path(directory: str, name: str) -> str:
    """Returns the path of a batch file's checksum, its completion marker.

    Args:
      directory: Directory of the job.
      name: Name of the batch file.
    """
    return join(directory, PRIVATE_NAME, FILES_NAME, f"{name}.json")


def read_checksum(directory: str, name: str, size: int | None) -> FileChecksum | None:
    """Returns the checksum of a batch file; None if it is not finished.

    A damaged checksum counts as none: its file is made again.

    Args:
      directory: Directory of the job.
      name: Name of the batch file.
      size: Bytes of the file; None if there is none.
    """
    if size is None:
        return None
    try:
        found = json.loads(storage.read_bytes(checksum_path(directory, name)))
        checksum = FileChecksum.from_json(found)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return checksum if checksum.size == size else None


def lock_job(out: StrPath) -> AbstractContextManager[None]:
    """Locks a job of this machine, until the context or the process ends.

    Raises:
      InputError: another job has the lock.
    """
    if is_remote(out):
        return contextlib.nullcontext()
    return locks.locked(join(out, PRIVATE_NAME), out)


def check_out(out: StrPath) -> None:
    """Refuses a folder that is neither empty nor an unfinished job.

    Raises:
      InputError: the folder holds finished batches or other files, or cannot be a
        folder.
    """
    outputs.check_folder(out, "--out")
    with outputs.usable_folder(out, "--out"):
        if storage.exists(join(out, PRIVATE_NAME, JOB_NAME)):
            return  # unfinished: open_job compares it with this job
        _refuse_finished(out)
        if os.path.isfile(out) or not _is_fresh(out):
            raise InputError(f"Expected --out {out} to be an empty or new folder.")


def _refuse_finished(out: StrPath) -> None:
    if storage.exists(join(out, MANIFEST_NAME)):
        raise InputError(
            f"Expected --out {out} to be empty; it holds finished batches."
        )


def _is_fresh(out: StrPath) -> bool:
    """Whether a folder is empty, or left by a job that was killed as it made it."""
    if storage.names(out) - {PRIVATE_NAME}:
        return False
    begun = (f".{KEY_NAME}.", f".{JOB_NAME}.")
    made = (KEY_NAME, FILES_NAME, locks.LOCK_NAME)
    private = storage.names(join(out, PRIVATE_NAME))
    return all(name in made or name.startswith(begun) for name in private)


def check_dataset(layout: Layout, dataset: Dataset) -> None:
    """Refuses a layout that was made for another data set.

    Args:
      layout: From ``make_layout``.
      dataset: From ``list_blocks``.

    Raises:
      InputError: the numbers of rows differ, or the sampler suits no bounded users.
    """
    if dataset.num_examples != layout.plan.num_examples:
        raise InputError(
            f"Expected num_examples={layout.plan.num_examples} to be the rows of the "
            f"input, {dataset.num_examples}. Make the plan of dataset.num_examples."
        )
    _check_slots(layout.plan, dataset)


def _check_slots(plan: DpSgdPlan, dataset: Dataset) -> None:
    """Refuses samplers for which nothing is proven about bounded users."""
    places = plan.largest_batch_size is not None and plan.truncated_batch_size is None
    if places and dataset.bounded is not None:
        raise InputError(
            f"Expected --sampler {plan.sampler} not to be used on rows kept of users, "
            "on whom depends which places have rows. Use truncated-poisson or poisson."
        )
    count = dataset.bounded.max_examples_per_user if dataset.bounded else 1
    if count > 1 and not is_supported(plan.sampler, REPLACE_SPECIAL, count):
        raise InputError(
            f"Expected --sampler {plan.sampler} not to be used on up to {count} rows "
            "of a user: no epsilon is proven for it. Use truncated-poisson or poisson."
        )


def _check_key(dataset: Dataset, key: bytes) -> None:
    """Refuses the key that chose the rows of users."""
    chosen_by = dataset.bounded.key if dataset.bounded else ""
    if chosen_by.startswith(commitment(key, KEY_LABEL)):
        raise InputError(
            "Expected --key-file to be of these batches alone; it chose the rows of "
            "users that `dpsgd prepare` kept."
        )


def open_job(
    out: StrPath, layout: Layout, dataset: Dataset, key_file: StrPath | None
) -> tuple[str, str]:
    """Makes or reopens the folder of a job; returns (key file, batches_id).

    Args:
      out: The folder, local or in a store.
      layout: From ``make_layout``.
      dataset: The input.
      key_file: File of the sampling key; None for one in the folder.

    Raises:
      InputError: as ``check_dataset`` and ``check_out``, or another job is unfinished
        there, or the key file is refused.
    """
    check_dataset(layout, dataset)
    check_out(out)
    key = None if key_file is None else read_or_create_key_file(key_file)
    _make_folders(out)
    with lock_job(out):
        begun = storage.exists(join(out, PRIVATE_NAME, JOB_NAME))
        if not begun:
            _refuse_finished(out)  # by another job in the meantime
        if key_file is None or key is None:
            key_file = _own_key_file(out)
            key = (read_key_file if begun else read_or_create_key_file)(key_file)
        _check_key(dataset, key)
        made_of = _begin_or_continue(out, layout, dataset, key)
    return os.fspath(key_file), commitment(key, "batches", *made_of)


def _begin_or_continue(
    out: StrPath, layout: Layout, dataset: Dataset, key: bytes
) -> tuple[str, str, str]:
    """Records a new job, or checks that it is the recorded one.

    Returns:
      Version, and digests of layout and input.
    """
    path = join(out, PRIVATE_NAME, JOB_NAME)
    state = {
        "version": str(FORMAT_VERSION),
        "layout": fingerprint(
            {**dataclasses.asdict(layout), "plan": layout.plan.to_json()}
        ),
        "input": dataset.digest,
        "key": commitment(key, "job"),
        "seal_key": derive(key, "seal").hex(),
    }
    if not storage.exists(path):
        storage.write_atomically(path, storage.pretty_json(state), mode=0o600)
    _check_same_job(out, storage.read_json(path), state)
    return state["version"], state["layout"], state["input"]


def _make_folders(out: StrPath) -> None:
    """Makes the folders of a job, private even if they existed before.

    Batches are sensitive, and so are the sizes of files if steps are not truncated.
    """
    private = join(out, PRIVATE_NAME)
    with outputs.usable_folder(out, "--out"):
        for folder in (out, private, join(private, FILES_NAME)):
            outputs.make_private_folder(folder)


def _own_key_file(out: StrPath) -> str:
    """Returns the default path of a job's key."""
    if is_remote(out):
        raise InputError(
            f"Expected --key-file with --out {out}, so that the key is not "
            "kept beside the batches. Name a file that every worker reads, or a secret."
        )
    return join(out, PRIVATE_NAME, KEY_NAME)


def _check_same_job(out: StrPath, found: Any, state: dict[str, str]) -> None:
    names = {
        "version": "batch format version",
        "layout": "options or columns",
        "input": "input",
        "key": "sampling key",
    }
    for field, name in names.items():
        if not isinstance(found, dict) or found.get(field) != state[field]:
            raise InputError(
                f"Expected the unfinished job in --out {out} to have the same {name}. "
                "Finish it with its own options and release, or choose another --out."
            )


def _finished(out: StrPath, layout: Layout) -> dict[int, FileChecksum]:
    """Returns the finished groups, with the checksums of their files."""
    files = storage.sizes(out)

    def read(group: int) -> FileChecksum | None:
        name = layout.file(group).name
        return read_checksum(os.fspath(out), name, files.get(name))

    groups = range(layout.num_groups)
    # A store answers slowly, but many requests at once.
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = pool.map(read, groups)
        return {group: c for group, c in zip(groups, found, strict=True) if c}


def pending_groups(out: StrPath, layout: Layout) -> list[int]:
    """Returns the groups that an open job has yet to write.

    Args:
      out: Folder of the job.
      layout: Layout of the job.
    """
    if storage.exists(join(out, MANIFEST_NAME)):
        return []  # it was killed during its cleanup
    done = _finished(out, layout)
    return [group for group in range(layout.num_groups) if group not in done]


def finish_job(
    out: StrPath,
    layout: Layout,
    dataset: Dataset,
    batches_id: str,
    spill: StrPath | None = None,
) -> Manifest:
    """Writes checksums and manifest of an open job, and removes its temporary files.

    Args:
      out: The folder, local or in a store.
      layout: From ``make_layout``.
      dataset: The input.
      batches_id: From ``open_job``.
      spill: Folder of the spill, if it is not in ``out``.

    Raises:
      InputError: a file is missing.
    """
    if not storage.exists(join(out, MANIFEST_NAME)):
        _write_manifest(out, layout, dataset, batches_id)
    _clean(out, spill)
    return read_manifest(out)


def _write_manifest(
    out: StrPath, layout: Layout, dataset: Dataset, batches_id: str
) -> None:
    done = _finished(out, layout)
    if len(done) < layout.num_groups:
        # Some releases of Beam report success with files missing.
        raise InputError(
            f"Expected {layout.num_groups} batch files in {out}; {len(done)} are there."
            " Run the same command again."
        )
    manifest = layout.manifest(dataset.description, batches_id)
    checksums = {file.name: done[group] for group, file in enumerate(manifest.files)}
    write_manifest(
        out,
        manifest,
        checksums,
        input_digests=dataset.footers.values(),
        seal_key=storage.read_json(join(out, PRIVATE_NAME, JOB_NAME))["seal_key"],
        table=dataclasses.asdict(table_of(dataset)),
    )


def _clean(out: StrPath, spill: StrPath | None) -> None:
    """Removes the temporary files of a finished job; does nothing the second time."""
    private = join(out, PRIVATE_NAME)
    own_spill = join(private, SPILL_NAME)
    for folder in {join(private, FILES_NAME), own_spill, spill or own_spill}:
        storage.delete_folder(folder)
    # Killed processes leave temporary files.
    left = (STARTS_NAME, locks.LOCK_NAME, JOB_NAME)
    names = (KEY_NAME, CHECKSUMS_NAME, *left)
    for folder, prefixes in ((out, ("batches-", MANIFEST_NAME)), (private, names)):
        begun = tuple(f".{prefix}" for prefix in prefixes)
        for name in storage.sizes(folder):
            if name.startswith(begun):
                storage.delete(join(folder, name))
    # Last: while job.json is there, the same command resumes here.
    for name in left:
        storage.delete(join(private, name))
