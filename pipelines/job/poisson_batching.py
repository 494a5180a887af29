"""The job: from Parquet to a folder of verified batches, resumable.

Nothing is written before every option, the input's columns and the key are checked.
The same command finishes a job that was killed: sampled blocks and complete files are
not made again, and the result is byte-identical to that of an undisturbed run.  See
also ``job_folder`` and ``transforms``.

On the local runner memory stays within ``memory_limit``, whatever the size of the data.
In a Python worker of an engine it stays within ``sizing.worker_bytes``.

Public: plan and layout.  Sensitive: the key and ``private/``.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners import create_runner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from accounting.core.plan import POISSON, TRUNCATED_POISSON, DpSgdPlan
from accounting.core.validation import InputError, check_choice
from pipelines.batches.folder import PRIVATE_NAME
from pipelines.core.batches.manifest import Manifest
from pipelines.core.choices import BlockSpan, make_sampler
from pipelines.core.files import locks
from pipelines.core.threads import in_order, num_cores
from pipelines.files import outputs, storage
from pipelines.files.key_sources import read_key_file
from pipelines.files.storage import StrPath, absolute, is_remote, join
from pipelines.inputs.parquet_blocks import Dataset, know_input, list_blocks
from pipelines.job import job_folder, runtime
from pipelines.job.batch_settings import BatchSettings
from pipelines.job.engine_tasks import run_to_end
from pipelines.job.packing import Layout
from pipelines.job.runtime import storage_error
from pipelines.job.sizing import DEFAULT_MEMORY_LIMIT, local_threads, make_layout
from pipelines.job.spill import BLOCK_PREFIX, Spill, blocks_per_file
from pipelines.job.transforms import Secrets, write_groups

#: Beam's in-process runner, which holds what it groups in memory.
LOCAL = "FnApiRunner"
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
            "environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and so on)."
        )
    runner = values.get("runner")
    try:
        # Beam knows a runner by several names.
        name = type(create_runner(LOCAL if runner is None else runner)).__name__
    except (ValueError, ImportError) as error:
        raise InputError(
            f"Expected runner={runner!r} to be one that Beam has here: "
            f"{type(error).__name__}."
        ) from None
    if values.get("direct_num_workers", 1) != 1:
        # Beam 2.77 loses elements of more than a megabyte between such workers.
        raise InputError(
            f"Expected direct_num_workers={values['direct_num_workers']} to be 1: "
            "Beam's local runner loses data between workers. One worker uses all cores."
        )
    return name


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
    """Writes the batches of ``layout`` to ``out``, or resumes the same unfinished job.

    Args:
      dataset: From ``list_blocks``.
      layout: From ``make_layout``.
      out: Empty or new folder, or that of the same unfinished job; local or in a store.
      key_file: File of the sampling key; made if missing.  By default in
        ``out``/private, if that is on this machine.
      memory_limit: Memory of this process in bytes; workers of an engine ignore it.
      scratch: Folder for the spill, which every worker reaches; by default in
        ``out``/private or, locally with ``out`` in a store, a temporary one.
      options: Beam's options; without a runner, Beam's in-process runner.

    Raises:
      InputError: before any work, for anything that the user can fix.
    """
    options = options or PipelineOptions([])  # not those of this process
    root, key = absolute(out), None if key_file is None else absolute(key_file)
    try:
        local = runner_of(options) == LOCAL
        place = spill_place(root, scratch, local)
        # Before what asks how large its blocks are.
        job_folder.check_dataset(layout, dataset)
        threads = local_threads(layout, dataset, memory_limit) if local else 1
        key_path, batches_id = job_folder.open_job(root, layout, dataset, key)
        folder = _spill_folder(root, place, batches_id)
        with job_folder.lock_job(root):
            if pending := job_folder.pending_groups(root, layout):
                secrets = _secrets(layout, dataset, root, key_path)
                with contextlib.ExitStack() as held:
                    if local:
                        spill = held.enter_context(_local_spill(folder, threads))
                        left = sum(len(layout.steps(group)) for group in pending)
                        runtime.advance(runtime.STEPS, layout.plan.num_steps - left)
                    else:
                        spill = shared_spill(folder, layout, dataset)
                        held.enter_context(_counted(layout, dataset, root, spill))
                    runner = FnApiRunner() if local else None
                    pipeline = beam.Pipeline(runner, options=options)
                    write_groups(
                        pipeline, layout, root, secrets, dataset=dataset,
                        spill=spill, groups=pending,
                    )  # fmt: skip
                    run_to_end(pipeline)
            return job_folder.finish_job(root, layout, dataset, batches_id, folder)
    except OSError as error:
        raise storage_error(error) from error


def _counted(
    layout: Layout, dataset: Dataset, out: str, spill: Spill
) -> AbstractContextManager[None]:
    """Reports the progress of workers that are other processes, by their files."""

    def count() -> dict[str, int]:
        sampled = spill.blocks_per_file * _num_files(spill.folder, BLOCK_PREFIX)
        steps = layout.steps_per_group * _num_files(out, "batches-")
        return {
            runtime.STEPS: min(steps, layout.plan.num_steps),
            runtime.BLOCKS: min(sampled, len(dataset.blocks)),
        }

    return runtime.poll(count, _REMOTE_SECONDS if is_remote(out) else _SECONDS)


def _num_files(folder: str, prefix: str) -> int:
    return sum(name.startswith(prefix) for name in storage.names(folder))


def spill_place(out: str, scratch: StrPath | None, local: bool) -> str:
    """Returns the folder for spills; jobs share it, unless it is ``out``.

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
        raise InputError(f"Expected --scratch {scratch} to be on this machine.")
    return absolute(scratch)


def _spill_folder(out: str, place: str, batches_id: str) -> str:
    """Returns the folder of a job's spill, the same when the job is resumed.

    Raises:
      InputError: another user, who may know the public ``batches_id``, has made it.
    """
    if place == out:
        return join(out, PRIVATE_NAME, job_folder.SPILL_NAME)
    folder = join(place, f"dpsgd-{job_folder.SPILL_NAME}-{batches_id}")
    outputs.make_private_folder(folder, follow=False)
    return folder


def shared_spill(folder: str, layout: Layout, dataset: Dataset) -> Spill:
    """Makes a folder for the spill of several workers.

    Its files are flushed to the disk, so that they are complete after a power loss.

    Args:
      folder: Folder of the job's spill.
      layout: Layout of the job.
      dataset: Input of the job.
    """
    count = blocks_per_file(layout, dataset)
    # Another release may choose another number for the same job.
    flushed = join(folder, f"flushed-{count}")
    for each in (folder, flushed):
        storage.make_folder(each)
    return Spill(folder=flushed, blocks_per_file=count)


@contextlib.contextmanager
def _local_spill(folder: str, num_threads: int) -> Iterator[Spill]:
    """Makes and locks the folder of a local spill; removes files of other boots.

    Raises:
      InputError: another process has the lock, or the folder belongs to another user.
    """
    outputs.make_private_folder(folder, follow=False)
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


def _secrets(layout: Layout, dataset: Dataset, out: str, key_file: str) -> Secrets:
    """Returns where workers find their secrets, after the search for a shuffle's order.

    The ranks that start its steps stay in ``out``/private until the batches are there.
    """
    if not layout.plan.num_shuffles:
        return Secrets(key_file=key_file)
    sampling_key, num_threads = read_key_file(key_file), num_cores()
    key = know_input(sampling_key, dataset).data_set_key(sampling_key)

    def run(
        function: Callable[[BlockSpan], Any], blocks: Sequence[BlockSpan]
    ) -> Iterator[Any]:
        for found in in_order(pool, function, blocks, num_threads + 1):
            runtime.advance(runtime.STARTS)
            yield found

    with ThreadPoolExecutor(num_threads) as pool:
        sampler = make_sampler(layout.plan, key, dataset.blocks, run)
    path = join(out, PRIVATE_NAME, job_folder.STARTS_NAME)
    starts = np.array(sampler.starts, "<u8").tobytes()
    storage.write_atomically(path, starts, mode=0o600)
    return Secrets(key_file=key_file, starts=path)


def make_batches(source: str, out: str, settings: BatchSettings) -> Manifest:
    """Makes batches in this process, or resumes the same unfinished job.

    Args:
      source: Parquet: a folder, a file or a glob.
      out: Empty or new folder, or the unfinished folder of the same job.
      settings: How to sample.

    Raises:
      InputError: before any work, for anything that the user can fix.
    """
    dataset = list_blocks(source)
    plan = settings.plan(dataset.num_examples)
    layout = make_layout(plan, dataset, settings.physical_batch_size)
    return write_batches(dataset=dataset, layout=layout, out=out)


@beam.typehints.with_output_types(str)
class PoissonBatches(beam.PTransform):
    """Samples rows and writes the batches of a whole training run.

    Applied to a pipeline.  Output: the names of the files written.  Once the pipeline
    has ended, ``finish`` writes the manifest.

    Args:
      plan: How batches are sampled; ``poisson`` or ``truncated-poisson``.
      dataset: From ``list_blocks``.
      out: Empty or new folder, or that of the same unfinished job, at the same path on
        every worker.
      key_file: File of the sampling key, mode 0600, at the same path on every worker;
        made if missing.  By default in ``out``/private.
      physical_batch_size: Number of rows per record; by default a step is one record,
        or several if it is large.

    Raises:
      InputError: another sampler, a size out of range, or ``dataset`` of another type.

    Example:
      >>> batches = PoissonBatches(plan, dataset, "batches")  # doctest: +SKIP
      >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:  # doctest: +SKIP
      ...     _ = pipeline | batches
      >>> manifest = batches.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        plan: DpSgdPlan,
        dataset: Dataset,
        out: StrPath,
        *,
        key_file: StrPath | None = None,
        physical_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        check_choice("sampler", plan.sampler, (POISSON, TRUNCATED_POISSON))
        if not isinstance(dataset, Dataset):
            raise InputError(
                f"Expected dataset to be list_blocks(folder), not a "
                f"{type(dataset).__name__}."
            )
        self._layout = make_layout(plan, dataset, physical_batch_size)
        self._dataset = dataset
        self._out = absolute(out)
        self._key_file = None if key_file is None else absolute(key_file)

    def expand(self, begin: beam.pvalue.PBegin) -> beam.PCollection:
        """Opens the folder and wires the groups that are not written yet.

        Raises:
          InputError: there is a step before, or the folder, the key or the options of
            the pipeline are refused.
        """
        if not isinstance(begin, beam.pvalue.PBegin):
            raise InputError(
                "Expected no step before the batches: they read the data set "
                "themselves. Write `pipeline | PoissonBatches(plan, dataset, ...)`."
            )
        runner_of(begin.pipeline.options)  # refuses runners that may lose elements
        key_file, _ = self._open()
        folder = join(self._out, PRIVATE_NAME, job_folder.SPILL_NAME)
        return write_groups(
            begin,
            self._layout,
            self._out,
            Secrets(key_file=key_file),
            dataset=self._dataset,
            spill=shared_spill(folder, self._layout, self._dataset),
            groups=job_folder.pending_groups(self._out, self._layout),
        )

    def finish(self) -> Manifest:
        """Writes the manifest, once the pipeline has ended.

        Raises:
          InputError: the pipeline did not write every file.
        """
        _, batches_id = self._open()
        with job_folder.lock_job(self._out):
            return job_folder.finish_job(
                self._out, self._layout, self._dataset, batches_id
            )

    def _open(self) -> tuple[str, str]:
        return job_folder.open_job(
            self._out, self._layout, self._dataset, self._key_file
        )
