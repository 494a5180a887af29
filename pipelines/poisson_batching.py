"""The job: from Parquet to a folder of verified batches, resumable.

    OUT/private/job.json     what is being made; its presence means unfinished
    OUT/private/files/       checksums of finished files, until the manifest is written
    OUT/private/spill/       the local runner's shuffle, until then, unless elsewhere
    OUT/private/boundaries.npy  of a shuffle, the ranks that start its steps, until then
    OUT/private/owner        in a store, who began last to write here, until then

Formal guarantees:
  - Nothing is written before every option, the input's columns and the key are checked.
  - Existing output is never replaced: a folder that is neither empty nor the unfinished
    state of the very same job (plan, layout, input, key) is refused.
  - A job that was killed is finished by the same command; blocks that were sampled and
    files that were complete are not made again, and the result is byte-identical to an
    undisturbed run.
  - On this machine two jobs never write one folder at a time.  A store has no locks:
    there the job that began last wins, any other ends with an error, and what both
    wrote of the same job is the same.
  - On the local runner memory stays within ``memory_limit``, whatever the size of the
    data: the shuffle goes through files, and the input is read once.

Public: plan and layout.  Sensitive: the key and ``private/``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import io
import json
import math
import os
import pathlib
import re
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners import create_runner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from accounting.plan import DpSgdPlan, fingerprint
from accounting.validation import InputError, check_int
from pipelines import progress, storage
from pipelines.batch_format import row_bytes
from pipelines.keys import commitment, read_key_file, read_or_create_key_file
from pipelines.manifest import (
    CHECKSUMS_NAME,
    KEY_NAME,
    MANIFEST_NAME,
    PRIVATE_NAME,
    FileChecksum,
    Manifest,
    pretty_json,
    read_json,
    read_manifest,
    write_manifest,
)
from pipelines.parquet_blocks import Dataset
from pipelines.sampling import check_sampler, find_boundaries
from pipelines.storage import StrPath, absolute, is_remote, join, write_atomically
from pipelines.transforms import (
    AGAIN,
    OVERHEAD_BYTES,
    Layout,
    Secrets,
    Spill,
    WriteBatches,
    checksum_path,
    group_bytes,
    storage_error,
)

#: Rows of a record unless the user says otherwise: some MB, one record per small step.
DEFAULT_PHYSICAL_BATCH_SIZE = 8192
#: A reducer holds about this much; enough of them to keep a few workers busy, and few
#: enough that what a block sends to each is not tiny.
_GROUP_BYTES = 32 << 20
_LEAST_GROUPS = 16
_MOST_GROUPS = 4096
#: Memory of the local runner: without any data, per byte of the block or group that a
#: thread works on (read, gathered, encoded, hashed), and per participation of a block.
#: Measured, and rounded up.
_BASE_BYTES = 512 << 20
_COPIES = 6
_PARTICIPATION_BYTES = 96
#: What Beam lets pile up between a Python worker and an engine that is slower: two
#: queues to send and one to receive, of 100 MiB each.
_CHANNEL_BYTES = 300 << 20

JOB_NAME = "job.json"
OWNER_NAME = "owner"
FILES_NAME = "files"
SPILL_NAME = "spill"
BOUNDARIES_NAME = "boundaries.npy"
DEFAULT_MEMORY_LIMIT = 4 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a job will cost.  Public: expectations over the sampling.

    Attributes:
      shuffle_bytes: Expected bytes between map and reduce; on the local runner they
        are on disk, beside the output, until the job ends.
      output_bytes: Bytes of the columns and weights of all records.
      padding: Rows that are padding, in expectation, per example of a step.
    """

    shuffle_bytes: int
    output_bytes: int
    padding: float


def make_layout(
    plan: DpSgdPlan, dataset: Dataset, physical_batch_size: int | None = None
) -> Layout:
    """Returns the layout that depends on public values only, never on the engine.

    Raises:
      InputError: a bad size, or a sampler that is not there.
    """
    check_sampler(plan)
    largest = _usual_batch_size(plan)
    if physical_batch_size is None:
        # The fewest records per step, of equal size.
        parts = -(-largest // DEFAULT_PHYSICAL_BATCH_SIZE)
        physical_batch_size = -(-largest // parts)
    check_int("physical_batch_size", physical_batch_size, at_least=1)
    step_bytes = largest * row_bytes(dataset.columns)
    least = -(-plan.num_steps // _MOST_GROUPS)
    steps = min(_GROUP_BYTES // step_bytes, plan.num_steps // _LEAST_GROUPS)
    return Layout(
        plan=plan,
        columns=dataset.columns,
        physical_batch_size=physical_batch_size,
        steps_per_group=max(1, least, steps),
    )


def _usual_batch_size(plan: DpSgdPlan) -> int:
    """The cap of a step or, where there is none, what next to no step exceeds."""
    if plan.largest_batch_size is not None:
        return plan.largest_batch_size
    return plan.expected_batch_size + 4 * math.isqrt(plan.expected_batch_size)


def estimate(layout: Layout) -> Estimate:
    """Returns the expected cost of a job, before it starts."""
    plan, size = layout.plan, layout.physical_batch_size
    row = row_bytes(layout.columns)
    sampled = plan.num_steps * plan.expected_batch_size
    rows = -(-_usual_batch_size(plan) // size) * size
    return Estimate(
        shuffle_bytes=sampled * (row + OVERHEAD_BYTES),
        output_bytes=plan.num_steps * rows * (row + 4),
        padding=rows / plan.expected_batch_size - 1,
    )


def worker_bytes(layout: Layout, dataset: Dataset) -> int:
    """Returns the memory that a Python worker of an engine needs.  Public.

    It holds one block or one range of steps at a time, whatever the size of the data.
    """
    return _BASE_BYTES + _CHANNEL_BYTES + _unit_bytes(layout, dataset)


def _unit_bytes(layout: Layout, dataset: Dataset) -> int:
    """Bytes for the block or the range of steps that one thread works on."""
    largest_block = max(block.num_rows for block in dataset.blocks)
    participations = layout.plan.num_steps * layout.plan.sampling_probability
    row = _COPIES * row_bytes(layout.columns) + _PARTICIPATION_BYTES * participations
    return max(math.ceil(largest_block * row), _COPIES * group_bytes(layout))


def local_threads(layout: Layout, dataset: Dataset, memory_limit: int) -> int:
    """Returns how many threads of the local runner fit into ``memory_limit`` bytes.

    Raises:
      InputError: not even one.
    """
    each = _unit_bytes(layout, dataset)
    if memory_limit < _BASE_BYTES + each:
        raise InputError(
            f"Expected memory_limit={memory_limit} >= {_BASE_BYTES + each} bytes, "
            "which one block or one range of steps needs. Raise --memory-limit, lower "
            "--batch-size, or prepare the input with smaller --row-group-rows."
        )
    cores = len(os.sched_getaffinity(0))
    return min(cores, (memory_limit - _BASE_BYTES) // each)


@contextlib.contextmanager
def lock_job(out: StrPath) -> Iterator[Callable[[], None]]:
    """Holds an open job locked; the lock goes with the process, however it ends.

    Yields:
      What checks, right before the job is finished, that the lock is still held: in a
      store, which has no locks, the job that began last has it.

    Raises:
      InputError: another job has it.
    """
    taken = InputError(
        f"Expected no other job to write {out}. Wait for it, or choose another --out."
    )
    if is_remote(out):
        yield _own(join(out, PRIVATE_NAME, OWNER_NAME), taken)
        return
    with open(join(out, PRIVATE_NAME, JOB_NAME), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_nlink:  # finished before it was locked
                raise OSError
        except OSError:
            raise taken from None
        yield lambda: None


def _own(path: str, taken: InputError) -> Callable[[], None]:
    """Enters this process as the owner of a job; returns what checks that it still is.

    The window between that check and the manifest stays open; ``verify`` finds files of
    two jobs with different keys.
    """
    name = os.urandom(16)
    write_atomically(path, name)

    def check() -> None:
        if not storage.exists(path) or storage.read_bytes(path) != name:
            raise taken

    return check


def check_out(out: StrPath) -> None:
    """Refuses a folder that holds anything but an unfinished job.

    Raises:
      InputError: what the folder holds.
    """
    storage.check_folder(out, "--out")
    if storage.exists(join(out, PRIVATE_NAME, JOB_NAME)):
        return  # unfinished: open_job compares it with this job
    if storage.exists(join(out, MANIFEST_NAME)):
        raise InputError(
            f"Expected --out {out} to be empty; it holds finished batches."
        )
    if os.path.isfile(out) or not _is_fresh(out):
        raise InputError(f"Expected --out {out} to be an empty or new folder.")


def _is_fresh(out: StrPath) -> bool:
    """Whether a folder holds nothing, or what a job does before its state is there."""
    if storage.names(out) - {PRIVATE_NAME}:
        return False
    begun = (f".{KEY_NAME}.", f".{JOB_NAME}.")
    private = storage.names(join(out, PRIVATE_NAME))
    return all(
        name in (KEY_NAME, FILES_NAME) or name.startswith(begun) for name in private
    )


def open_job(
    out: StrPath, layout: Layout, dataset: Dataset, key_file: StrPath | None
) -> tuple[str, str]:
    """Makes or re-opens the folder of a job; returns (key file, batches_id).

    Raises:
      InputError: the input has other rows than the plan, the folder holds something
        else, or the key file is refused.
    """
    if dataset.num_examples != layout.plan.num_examples:
        raise InputError(
            f"Expected num_examples={layout.plan.num_examples} to be the rows of the "
            f"input, {dataset.num_examples}."
        )
    check_out(out)
    private = join(out, PRIVATE_NAME)
    path = join(private, JOB_NAME)
    if key_file is not None:
        key = read_or_create_key_file(key_file)
    # Batches are sensitive, and so is the size of a file where a step is not capped.
    for folder in (out, private, join(private, FILES_NAME)):
        storage.make_folder(folder)
    if key_file is None:
        key_file = _own_key_file(out)
        key = read_or_create_key_file(key_file)
    state = {
        "layout": fingerprint(_layout_json(layout)),
        "input": dataset.digest,
        "key": commitment(key, "job"),
    }
    if not storage.exists(path):
        write_atomically(path, pretty_json(state), mode=0o600)
    _check_same_job(out, read_json(path), state)
    batches_id = commitment(key, "batches", state["layout"], state["input"])
    return os.fspath(key_file), batches_id


def _own_key_file(out: StrPath) -> str:
    """Where the key of a job is kept whose user named no place."""
    if is_remote(out):
        raise InputError(
            f"Expected --key-file with --out {out}, so that the key is not "
            "kept beside the batches. Name a file that every worker reads, or a secret."
        )
    return join(out, PRIVATE_NAME, KEY_NAME)


def _layout_json(layout: Layout) -> dict[str, Any]:
    fields = dataclasses.asdict(layout)
    return {**fields, "plan": layout.plan.to_json()}


def _check_same_job(out: StrPath, found: Any, state: dict[str, str]) -> None:
    names = {"layout": "options or columns", "input": "input", "key": "sampling key"}
    for field, name in names.items():
        if not isinstance(found, dict) or found.get(field) != state[field]:
            raise InputError(
                f"Expected the unfinished job in --out {out} to have the same {name}. "
                "Finish it with its own options, or choose another --out."
            )


def _finished(out: StrPath, layout: Layout) -> dict[int, FileChecksum]:
    """Groups whose file is complete, with the checksums that their writers left."""
    files = storage.sizes(out)
    marks = storage.sizes(join(out, PRIVATE_NAME, FILES_NAME))

    def read(group: int) -> FileChecksum | None:
        name = layout.file(group).name
        if name not in files or os.path.basename(checksum_path("", name)) not in marks:
            return None
        text = storage.read_bytes(checksum_path(os.fspath(out), name))
        checksum = FileChecksum(**json.loads(text))
        return checksum if checksum.size == files[name] else None

    groups = range(layout.num_groups)
    # A store answers after a while, and answers many at once.
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = pool.map(read, groups)
        return {group: c for group, c in zip(groups, found, strict=True) if c}


def is_local(options: PipelineOptions) -> bool:
    """Whether no engine is named; refuses what the local runner does not survive.

    Raises:
      InputError: no such runner, or several workers of the local one.
    """
    values = options.get_all_options()
    runner = values.get("runner")
    try:
        create_runner(runner or "FnApiRunner")
    except (ValueError, ImportError) as error:
        raise InputError(
            f"Expected runner={runner!r} to be one that Beam has here: "
            f"{type(error).__name__}. See Beam's list of runners."
        ) from None
    if values.get("direct_num_workers", 1) != 1:
        # Beam 2.77 loses elements of more than a megabyte between such workers.
        raise InputError(
            f"Expected direct_num_workers={values['direct_num_workers']} to be 1: "
            "Beam's local runner loses data between workers. One worker uses all cores."
        )
    return runner in (None, "FnApiRunner")


def _run_pipeline(
    layout: Layout,
    dataset: Dataset,
    out: str,
    secrets: Secrets,
    groups: list[int],
    spill: Spill | None,
    options: PipelineOptions,
) -> None:
    pipeline = beam.Pipeline(FnApiRunner() if spill else None, options=options)
    _ = (
        pipeline
        | "Blocks" >> beam.Create(dataset.blocks)
        | "WriteBatches"
        >> WriteBatches(
            layout,
            out,
            secrets,
            num_blocks=len(dataset.blocks),
            groups=groups,
            spill=spill,
        )
    )
    try:
        _run_to_end(pipeline)
    except Exception as error:
        raise _one_line(error, on_engine=spill is None) from error


def _run_to_end(pipeline: beam.Pipeline) -> None:
    """Runs a pipeline; an engine is told to give it up if this process is stopped."""
    result = pipeline.run()
    try:
        result.wait_until_finish()
    except BaseException:
        with contextlib.suppress(Exception):
            result.cancel()
        raise


def _one_line(error: Exception, on_engine: bool) -> Exception:
    """The InputError that a worker raised, however Beam hands it over.

    That is as itself, as another error or as a traceback, with the step at its end.
    What an engine says itself is cut to its first line.
    """
    text = f"{type(error).__name__}: {error}"
    found = re.findall(r"InputError: (.*?)(?: \[while running .*)?$", text, re.M)
    if found:
        return InputError(found[-1])
    if not on_engine:
        return error
    return InputError(
        f"Expected the engine to finish the job: {text.splitlines()[0].rstrip('.')}. "
        f"See what it logged; then {AGAIN}"
    )


def write_batches(
    *,
    dataset: Dataset,
    layout: Layout,
    out: StrPath,
    key_file: StrPath | None = None,
    memory_limit: int = DEFAULT_MEMORY_LIMIT,
    scratch: StrPath | None = None,
    options: PipelineOptions | None = None,
) -> Manifest:
    """Writes the batches of ``layout`` to ``out``, resuming an unfinished same job.

    Args:
      dataset: From ``list_blocks``.
      layout: From ``make_layout``.
      out: An empty or new folder, or that of the same job, unfinished; on this machine
        or in a store.
      key_file: The sampling key; made if missing.  By default in ``out``/private, if
        that is on this machine.
      memory_limit: Bytes for the local runner; engines have their own.
      scratch: A folder on this machine for the local runner's shuffle.  By default it
        is in ``out``/private or, if that is in a store, among temporary files.
      options: Beam's options; without a runner, Beam's in-process runner.

    Returns:
      The manifest, which is also written.

    Raises:
      InputError: before any work, for anything that the user can mend.
    """
    options = options or PipelineOptions([])  # not those of this process
    storage.use_options(options)
    key = None if key_file is None else absolute(key_file)
    root = absolute(out)
    try:
        threads = (
            local_threads(layout, dataset, memory_limit) if is_local(options) else 0
        )
        key_path, batches_id = open_job(root, layout, dataset, key)
        folder = _spill_folder(root, scratch, batches_id)
        with lock_job(root) as check_lock:
            if pending := pending_groups(root, layout):
                _report_written(layout, pending)
                secrets = _secrets(layout, dataset, root, key_path)
                with (
                    _local_shuffle(folder, threads)
                    if threads
                    else contextlib.nullcontext()
                ) as spill:
                    _run_pipeline(
                        layout, dataset, root, secrets, pending, spill, options
                    )
            check_lock()
            manifest = finish_job(root, layout, dataset, batches_id)
            storage.delete_folder(folder)
            return manifest
    except OSError as error:
        raise storage_error(error) from error


def _report_written(layout: Layout, pending: list[int]) -> None:
    written = set(range(layout.num_groups)) - set(pending)
    progress.advance("steps", sum(len(layout.steps(group)) for group in written))


def _boot_id() -> str:
    """Names this boot of the machine: spills are not flushed, so that none is trusted
    after a power loss."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def _spill_folder(out: str, scratch: StrPath | None, batches_id: str) -> str:
    """Where the local shuffle of a job is kept, also by the next try.

    Raises:
      InputError: in a store.
    """
    if scratch is None and not is_remote(out):
        return join(out, PRIVATE_NAME, SPILL_NAME)
    place = tempfile.gettempdir() if scratch is None else absolute(scratch)
    if is_remote(place):
        raise InputError(f"Expected --scratch {place} to be on this machine.")
    return join(place, f"dpsgd-{SPILL_NAME}-{batches_id}")


@contextlib.contextmanager
def _local_shuffle(folder: str, num_threads: int) -> Iterator[Spill]:
    """Makes the folder of the local shuffle, and holds it locked.

    What other boots of this machine left there is removed.

    Raises:
      InputError: another process has it or, among temporary files, it is another
        user's.
    """
    storage.make_folder(folder)
    found = os.lstat(folder)
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise InputError(
            f"Expected {folder} to be a folder of this user. Name another --scratch."
        )
    os.chmod(folder, 0o700)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        boot = _boot_id()
        storage.make_folder(join(folder, boot))
        for other in storage.names(folder) - {boot}:
            storage.delete_folder(join(folder, other))
        yield Spill(folder=join(folder, boot), num_threads=num_threads)
    except BlockingIOError:
        raise InputError(
            f"Expected no other job to use {folder}. Wait for it."
        ) from None
    finally:
        os.close(descriptor)


def _secrets(layout: Layout, dataset: Dataset, out: str, key_file: str) -> Secrets:
    """Leaves for the workers what derives from the key and from all blocks together."""
    rows = [block.rows for block in dataset.blocks]
    boundaries = find_boundaries(layout.plan, read_key_file(key_file), rows)
    if boundaries is None:
        return Secrets(key_file=key_file)
    path, data = join(out, PRIVATE_NAME, BOUNDARIES_NAME), io.BytesIO()
    np.save(data, boundaries, allow_pickle=False)
    write_atomically(path, data.getvalue(), mode=0o600)
    return Secrets(key_file=key_file, boundaries_file=path)


def pending_groups(out: StrPath, layout: Layout) -> list[int]:
    """Returns the groups that an open job has still to write."""
    if storage.exists(join(out, MANIFEST_NAME)):
        return []  # killed while it cleaned up
    done = _finished(out, layout)
    return [group for group in range(layout.num_groups) if group not in done]


def finish_job(
    out: StrPath, layout: Layout, dataset: Dataset, batches_id: str
) -> Manifest:
    """Writes checksums and manifest of an open job, and removes what else it left.

    Args:
      out: The folder that ``open_job`` was given; so are ``layout`` and ``dataset``.
      batches_id: From ``open_job``.

    Raises:
      InputError: not every file is there.
    """
    if not storage.exists(join(out, MANIFEST_NAME)):
        _write_manifest(out, layout, dataset, batches_id)
    _clean(out)
    return read_manifest(out)


def _write_manifest(
    out: StrPath, layout: Layout, dataset: Dataset, batches_id: str
) -> None:
    done = _finished(out, layout)
    if len(done) < layout.num_groups:
        # Some releases of Beam report success while files are missing.
        raise InputError(
            f"Expected {layout.num_groups} batch files in {out}; {len(done)} are "
            "there. Run the same command again to finish."
        )
    files = tuple(layout.file(group) for group in range(layout.num_groups))
    manifest = Manifest(
        plan=layout.plan,
        columns=layout.columns,
        physical_batch_size=layout.physical_batch_size,
        batches_id=batches_id,
        dataset=dataset.description,
        files=files,
    )
    checksums = {file.name: done[group] for group, file in enumerate(files)}
    write_manifest(out, manifest, checksums)


def _clean(out: StrPath) -> None:
    """Leaves of a job with a manifest what is to stay; does nothing the second time."""
    private = join(out, PRIVATE_NAME)
    storage.delete_folder(join(private, FILES_NAME))
    storage.delete_folder(join(private, SPILL_NAME))
    # Temporary files of processes that were killed.
    names = (KEY_NAME, JOB_NAME, CHECKSUMS_NAME, BOUNDARIES_NAME, OWNER_NAME)
    for folder, prefixes in ((out, ("batches-", MANIFEST_NAME)), (private, names)):
        begun = tuple(f".{prefix}" for prefix in prefixes)
        for name in storage.sizes(folder):
            if name.startswith(begun):
                storage.delete(join(folder, name))
    # Last: while job.json is there, the same command goes on from here.
    for name in (BOUNDARIES_NAME, OWNER_NAME, JOB_NAME):
        storage.delete(join(private, name))
