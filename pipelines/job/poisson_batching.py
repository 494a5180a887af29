"""The job: from Parquet to a folder of verified batches, resumable.

Formal guarantees:
  - Nothing is written before every option, the input's columns and the key are checked.
  - The same command finishes a job that was killed: sampled blocks and complete files
    are not made again, and the result is byte-identical to that of an undisturbed run.
  - On the local runner memory stays within ``memory_limit``, whatever the size of the
    data; on any runner so does the search for the boundaries of a shuffle.  In a Python
    worker of an engine it stays within ``sizing.worker_bytes``.
  - Rows go through files unless ``choose_shuffle`` decides otherwise.
  - Those of ``job_folder`` and ``transforms``.

Public: plan and layout.  Sensitive: the key and ``private/``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import uuid
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners import create_runner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from accounting.core.validation import InputError, check_choice
from pipelines.batches.folder import PRIVATE_NAME
from pipelines.core.batches.manifest import Manifest
from pipelines.core.files import locks
from pipelines.files import outputs, storage
from pipelines.files.key_sources import read_key_file
from pipelines.files.storage import StrPath, absolute, is_remote, join
from pipelines.inputs.known_input import know_input
from pipelines.inputs.parquet_blocks import Dataset, list_blocks
from pipelines.job import progress
from pipelines.job.batch_settings import BatchSettings
from pipelines.job.boundaries import BoundariesFile, complete
from pipelines.job.engine_tasks import run_to_end
from pipelines.job.job_folder import (
    BOUNDARIES_NAME,
    SPILL_NAME,
    check_dataset,
    check_out,
    finish_job,
    lock_job,
    num_steps_written,
    open_job,
    pending_groups,
)
from pipelines.job.packing import Layout
from pipelines.job.runtime import storage_error
from pipelines.job.sizing import (
    DEFAULT_MEMORY_LIMIT,
    local_threads,
    make_layout,
    search_threads,
)
from pipelines.job.spill import BLOCK_PREFIX, FanIn, Spill, choose_fan_in
from pipelines.job.steps.map_step import Secrets
from pipelines.job.transforms import WriteBatches

#: Beam's in-process runner, which holds what it groups in memory.
LOCAL = "FnApiRunner"
#: How rows travel from map to reduce; see ``choose_shuffle``.
AUTO, FILES, ENGINE = SHUFFLES = ("auto", "files", "engine")
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
#: Seconds between two counts of the files of an engine.
_SECONDS, _REMOTE_SECONDS = 1.0, 15.0


def runner_of(options: PipelineOptions) -> str:
    """Returns the name of the runner; refuses options that would be misunderstood.

    Raises:
      InputError: no such runner, several workers of the local one, or an option of
        Beam's client for S3, which is not used.
    """
    values = options.get_all_options()
    if of_s3 := [n for n in options.get_all_options(drop_default=True) if "s3_" in n]:
        raise InputError(
            f"Expected no --{of_s3[0]}: every process finds its stores by its "
            "environment. Set AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and so on, also for "
            "the workers of an engine."
        )
    runner = values.get("runner")
    try:
        # Beam knows a runner by several names.
        name = type(create_runner(LOCAL if runner is None else runner)).__name__
    except (ValueError, ImportError) as error:
        raise InputError(
            f"Expected runner={runner!r} to be one that Beam has here: "
            f"{type(error).__name__}. Omit --runner to use this process."
        ) from None
    if values.get("direct_num_workers", 1) != 1:
        # Beam 2.77 loses elements of more than a megabyte between such workers.
        raise InputError(
            f"Expected direct_num_workers={values['direct_num_workers']} to be 1: "
            "Beam's local runner loses data between workers. One worker uses all cores."
        )
    return name


def _run_pipeline(write: WriteBatches, options: PipelineOptions, local: bool) -> None:
    pipeline = beam.Pipeline(FnApiRunner() if local else None, options=options)
    _ = pipeline | "WriteBatches" >> write
    run_to_end(pipeline)


def write_batches(
    *,
    dataset: Dataset,
    layout: Layout,
    out: StrPath,
    key_file: StrPath | None = None,
    memory_limit: int = DEFAULT_MEMORY_LIMIT,
    shuffle: str = AUTO,
    scratch: StrPath | None = None,
    options: PipelineOptions | None = None,
) -> Manifest:
    """Writes the batches of ``layout`` to ``out``, or resumes the same unfinished job.

    Args:
      dataset: From ``list_blocks``.
      layout: From ``make_layout``.
      out: Empty or new folder, or that of the same unfinished job; local or in a store.
      key_file: File of the sampling key; made if missing.  By default in
        ``out``/private, if that is on this machine.
      memory_limit: Memory of this process in bytes; workers of an engine ignore it.
      shuffle: How rows travel from map to reduce, as in ``choose_shuffle``.
      scratch: Folder for a shuffle through files, which every worker reaches; by
        default in ``out``/private or, locally with ``out`` in a store, a temporary one.
      options: Beam's options; without a runner, Beam's in-process runner.

    Raises:
      InputError: before any work, for anything that the user can fix.
    """
    options = options or PipelineOptions([])  # not those of this process
    root, key = absolute(out), None if key_file is None else absolute(key_file)
    try:
        local = (runner := runner_of(options)) == LOCAL
        place = spill_place(root, scratch, local)
        shuffle = choose_shuffle(shuffle, runner)
        check_dataset(layout, dataset)  # before what asks how large its blocks are
        searching = search_threads(layout.plan, dataset, memory_limit)
        threads = local_threads(layout, dataset, memory_limit) if local else 1
        key_path, batches_id = open_job(root, layout, dataset, key)
        folder = _spill_folder(root, place, batches_id)
        fan_in = None if local else choose_fan_in(layout, dataset)
        with lock_job(root):
            if pending := pending_groups(root, layout):
                secrets = _secrets(
                    layout, dataset, root, key_path,
                    batches_id=batches_id, num_threads=searching,
                )  # fmt: skip
                with (
                    _open_shuffle(shuffle, folder, fan_in, threads) as spill,
                    _progress(layout, dataset, root, pending, spill, local),
                ):
                    write = WriteBatches(
                        layout, root, secrets, dataset=dataset,
                        groups=pending, spill=spill,
                    )  # fmt: skip
                    _run_pipeline(write, options, local)
            return finish_job(root, layout, dataset, batches_id, folder)
    except OSError as error:
        raise storage_error(error) from error


@contextlib.contextmanager
def _progress(
    layout: Layout,
    dataset: Dataset,
    out: str,
    pending: list[int],
    spill: Spill | None,
    local: bool,
) -> Iterator[None]:
    """Reports the progress of the workers."""
    if local:
        written = set(range(layout.num_groups)) - set(pending)
        done = sum(len(layout.steps(group)) for group in written)
        progress.advance(progress.STEPS, done)
        yield
        return

    def count() -> dict[str, int]:
        done = {progress.STEPS: num_steps_written(out, layout)}
        if spill:
            names = storage.names(spill.folder)
            files = sum(name.startswith(BLOCK_PREFIX) for name in names)
            sampled = files * spill.fan_in.blocks_per_file
            done[progress.BLOCKS] = min(sampled, len(dataset.blocks))
        return done

    with progress.poll(count, _REMOTE_SECONDS if is_remote(out) else _SECONDS):
        yield


def choose_shuffle(shuffle: str, runner: str) -> str:
    """Returns how rows travel from map to reduce: FILES or ENGINE.

    Args:
      shuffle: FILES, ENGINE, or AUTO: ENGINE on Dataflow, whose shuffle is a separate
        service, otherwise FILES.
      runner: Name of Beam's runner.

    Raises:
      InputError: none of the three, or ENGINE on the local runner.
    """
    check_choice("shuffle", shuffle, SHUFFLES)
    if runner == LOCAL and shuffle == ENGINE:
        raise InputError(
            "Expected --shuffle engine with a --runner: the local runner would hold "
            "all rows in memory. Leave it out."
        )
    if shuffle != AUTO:
        return shuffle
    return ENGINE if "Dataflow" in runner else FILES


def spill_place(out: str, scratch: StrPath | None, local: bool) -> str:
    """Returns the folder for shuffles; jobs share it, unless it is ``out``.

    Args:
      out: Folder of the job.
      scratch: Folder that the user named, if any.
      local: Whether the local runner runs the job.

    Raises:
      InputError: ``scratch`` is in a store, on the local runner.
    """
    if scratch is None:
        return tempfile.gettempdir() if local and is_remote(out) else out
    if local and is_remote(scratch):
        raise InputError(
            f"Expected --scratch {scratch} to be on this machine. Name a folder here, "
            "or omit it."
        )
    return absolute(scratch)


def _spill_folder(out: str, place: str, batches_id: str) -> str:
    """Returns the folder of a job's shuffle, the same when the job is resumed.

    Raises:
      InputError: another user, who may know the public ``batches_id``, has made it.
    """
    if place == out:
        return join(out, PRIVATE_NAME, SPILL_NAME)
    folder = join(place, f"dpsgd-{SPILL_NAME}-{batches_id}")
    _own_folder(folder)
    return folder


def _own_folder(folder: str) -> None:
    """Makes a private folder, even in a folder that other users write to."""
    outputs.make_private_folder(folder, follow=False, remedy="Name another --scratch.")


def _open_shuffle(
    shuffle: str, folder: str, fan_in: FanIn | None, num_threads: int
) -> contextlib.AbstractContextManager[Spill | None]:
    """Opens the folder of a shuffle; yields None if rows travel through the engine.

    Args:
      shuffle: FILES or ENGINE.
      folder: Folder of the job's shuffle.
      fan_in: Fan-in of the shuffle; None on the local runner.
      num_threads: Number of threads of the local runner.
    """
    if fan_in is None:
        return _local_shuffle(folder, num_threads)
    spill = None if shuffle == ENGINE else shared_spill(folder, fan_in)
    return contextlib.nullcontext(spill)


def shared_spill(folder: str, fan_in: FanIn) -> Spill:
    """Makes a folder for the shuffle of several workers.

    Its files are flushed to the disk, so that they are complete after a power loss.

    Args:
      folder: Folder of the job's shuffle.
      fan_in: From ``choose_fan_in``.
    """
    # Another release may choose another fan-in for the same job.
    name = "-".join(map(str, ("flushed", *dataclasses.astuple(fan_in))))
    flushed = join(folder, name)
    for each in (folder, flushed):
        storage.make_folder(each)
    return Spill(folder=flushed, fan_in=fan_in)


@contextlib.contextmanager
def _local_shuffle(folder: str, num_threads: int) -> Iterator[Spill]:
    """Makes and locks the folder of the local shuffle; removes files of other boots.

    Raises:
      InputError: another process has the lock, or the folder belongs to another user.
    """
    _own_folder(folder)
    with locks.locked(folder, folder):
        boot = _boot_id()
        storage.make_folder(join(folder, boot))
        for other in storage.names(folder) - {boot, locks.LOCK_NAME}:
            storage.delete_folder(join(folder, other))
        yield Spill(folder=join(folder, boot), num_threads=num_threads, flush=False)


def _boot_id() -> str:
    """Returns the id of this boot; files that are not flushed belong to one."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def _secrets(
    layout: Layout,
    dataset: Dataset,
    out: str,
    key_file: str,
    *,
    batches_id: str,
    num_threads: int,
) -> Secrets:
    """Returns where workers find their secrets, after the search for boundaries."""
    if not layout.plan.num_shuffles:
        return Secrets(key_file=key_file)
    rows = [(block.rows.name, block.rows.num_rows) for block in dataset.blocks]
    path = join(out, PRIVATE_NAME, BOUNDARIES_NAME)
    file = BoundariesFile(path=path, batches_id=batches_id)
    sampling_key = read_key_file(key_file)
    key = know_input(sampling_key, dataset).data_set_key(sampling_key)
    complete(file, layout.plan, key, rows, num_threads=num_threads)
    return Secrets(key_file=key_file, boundaries=file)


def make_batches(source: str, out: str, settings: BatchSettings) -> Manifest:
    """Makes batches in this process, or resumes the same unfinished job.

    Args:
      source: Parquet: a folder, a file or a glob.
      out: Empty or new folder, or the unfinished folder of the same job.
      settings: How to sample.

    Raises:
      InputError: before any work, for anything that the user can fix.
    """
    dataset, layout = open_input(source, out, settings)
    return write_batches(dataset=dataset, layout=layout, out=out)


def open_input(
    source: str, out: str, settings: BatchSettings
) -> tuple[Dataset, Layout]:
    """Returns a data set and the layout of its batches.

    Arguments as for ``make_batches``, which raises the same errors.
    """
    dataset = list_blocks(source)
    plan = settings.plan(dataset.num_examples)
    layout = make_layout(plan, dataset, settings.physical_batch_size)
    check_out(out)
    return dataset, layout
