"""The job: from Parquet to a folder of verified batches, resumable.

    OUT/private/job.json     what is being made; its presence means unfinished
    OUT/private/files/       checksums of finished files, until the manifest is written
    OUT/private/spill/       the local runner's shuffle, until then
    OUT/private/boundaries.npy  of a shuffle, the ranks that start its steps, until then

Formal guarantees:
  - Nothing is written before every option, the input's columns and the key are checked.
  - Existing output is never replaced: a folder that is neither empty nor the unfinished
    state of the very same job (plan, layout, input, key) is refused.
  - A job that was killed is finished by the same command; blocks that were sampled and
    files that were complete are not made again, and the result is byte-identical to an
    undisturbed run.
  - On the local runner memory stays within ``memory_limit``, whatever the size of the
    data: the shuffle goes through files, and the input is read once.

Public: plan and layout.  Sensitive: the key and ``private/``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import math
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners import create_runner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from accounting.plan import DpSgdPlan, fingerprint
from accounting.validation import InputError, check_int
from pipelines import progress
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
    write_atomically,
    write_manifest,
)
from pipelines.parquet_blocks import Dataset
from pipelines.sampling import check_sampler, find_boundaries
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
def lock_job(out: pathlib.Path) -> Iterator[None]:
    """Holds an open job locked; the lock goes with the process, however it ends."""
    with open(out / PRIVATE_NAME / JOB_NAME, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(file.fileno()).st_nlink:  # finished before it was locked
                raise OSError
        except OSError:
            raise InputError(
                f"Expected no other job to write {out}. Wait for it, or "
                "choose another --out."
            ) from None
        yield


def check_out(out: pathlib.Path) -> None:
    """Refuses a folder that holds anything but an unfinished job.

    Raises:
      InputError: what the folder holds.
    """
    if (out / PRIVATE_NAME / JOB_NAME).exists():
        return  # unfinished: open_job compares it with this job
    if (out / MANIFEST_NAME).exists():
        raise InputError(
            f"Expected --out {out} to be empty; it holds finished batches."
        )
    if out.exists() and not (out.is_dir() and _is_fresh(out)):
        raise InputError(f"Expected --out {out} to be an empty or new folder.")


def _is_fresh(out: pathlib.Path) -> bool:
    """Whether a folder holds nothing, or what a job does before its state is there."""
    if any(path.name != PRIVATE_NAME for path in out.iterdir()):
        return False
    private = out / PRIVATE_NAME
    names = [path.name for path in private.iterdir()] if private.is_dir() else []
    begun = (f".{KEY_NAME}.", f".{JOB_NAME}.")
    return all(name == KEY_NAME or name.startswith(begun) for name in names)


def open_job(
    out: pathlib.Path, layout: Layout, dataset: Dataset, key_file: pathlib.Path | None
) -> tuple[pathlib.Path, str]:
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
    private = out / PRIVATE_NAME
    path = private / JOB_NAME
    if key_file is not None:
        key = read_or_create_key_file(key_file)
    # Batches are sensitive, and so is the size of a file where a step is not capped.
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    private.mkdir(mode=0o700, exist_ok=True)
    if key_file is None:
        key_file = private / KEY_NAME
        key = read_or_create_key_file(key_file)
    state = {
        "layout": fingerprint(_layout_json(layout)),
        "input": dataset.digest,
        "key": commitment(key, "job"),
    }
    if not path.exists():
        write_atomically(path, pretty_json(state), mode=0o600)
    _check_same_job(out, read_json(path), state)
    batches_id = commitment(key, "batches", state["layout"], state["input"])
    return key_file, batches_id


def _layout_json(layout: Layout) -> dict[str, Any]:
    fields = dataclasses.asdict(layout)
    return {**fields, "plan": layout.plan.to_json()}


def _check_same_job(out: pathlib.Path, found: Any, state: dict[str, str]) -> None:
    names = {"layout": "options or columns", "input": "input", "key": "sampling key"}
    for field, name in names.items():
        if not isinstance(found, dict) or found.get(field) != state[field]:
            raise InputError(
                f"Expected the unfinished job in --out {out} to have the same {name}. "
                "Finish it with its own options, or choose another --out."
            )


def _finished(out: pathlib.Path, layout: Layout) -> dict[int, FileChecksum]:
    """Groups whose file is complete, with the checksums that their writers left."""
    done = {}
    for group in range(layout.num_groups):
        name = layout.file(group).name
        path = pathlib.Path(checksum_path(str(out), name))
        with contextlib.suppress(FileNotFoundError):
            checksum = FileChecksum(**json.loads(path.read_bytes()))
            if (out / name).stat().st_size == checksum.size:
                done[group] = checksum
    return done


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
    out: pathlib.Path,
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
            str(out),
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
    out: str | os.PathLike[str],
    key_file: str | os.PathLike[str] | None = None,
    memory_limit: int = DEFAULT_MEMORY_LIMIT,
    options: PipelineOptions | None = None,
) -> Manifest:
    """Writes the batches of ``layout`` to ``out``, resuming an unfinished same job.

    Args:
      dataset: From ``list_blocks``.
      layout: From ``make_layout``.
      out: An empty or new folder, or that of the same job, unfinished.
      key_file: The sampling key; made if missing.  By default in ``out``/private.
      memory_limit: Bytes for the local runner; engines have their own.
      options: Beam's options; without a runner, Beam's in-process runner.

    Returns:
      The manifest, which is also written.

    Raises:
      InputError: before any work, for anything that the user can mend.
    """
    try:
        return _write_batches(
            dataset, layout, pathlib.Path(out), _path(key_file), memory_limit, options
        )
    except OSError as error:
        raise storage_error(error) from error


def _write_batches(
    dataset: Dataset,
    layout: Layout,
    root: pathlib.Path,
    key_file: pathlib.Path | None,
    memory_limit: int,
    options: PipelineOptions | None,
) -> Manifest:
    options = options or PipelineOptions([])  # not those of this process
    spill = None
    if is_local(options):
        threads = local_threads(layout, dataset, memory_limit)
        folder = root / PRIVATE_NAME / SPILL_NAME / _boot_id()
        spill = Spill(folder=str(folder), num_threads=threads)
    key_path, batches_id = open_job(root, layout, dataset, key_file)
    with lock_job(root):
        if pending := pending_groups(root, layout):
            written = set(range(layout.num_groups)) - set(pending)
            progress.advance("steps", sum(len(layout.steps(g)) for g in written))
            if spill:
                _make_spill_folder(pathlib.Path(spill.folder))
            secrets = _secrets(layout, dataset, root, key_path)
            _run_pipeline(layout, dataset, root, secrets, pending, spill, options)
        return finish_job(root, layout, dataset, batches_id)


def _boot_id() -> str:
    """Names this boot of the machine: spills are not flushed, so that none is trusted
    after a power loss."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def _make_spill_folder(folder: pathlib.Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.parent.chmod(0o700)
    for other in folder.parent.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def _secrets(
    layout: Layout, dataset: Dataset, out: pathlib.Path, key_file: pathlib.Path
) -> Secrets:
    """Leaves for the workers what derives from the key and from all blocks together."""
    rows = [block.rows for block in dataset.blocks]
    boundaries = find_boundaries(layout.plan, read_key_file(key_file), rows)
    if boundaries is None:
        return Secrets(key_file=str(key_file))
    path, data = out / PRIVATE_NAME / BOUNDARIES_NAME, io.BytesIO()
    np.save(data, boundaries, allow_pickle=False)
    write_atomically(path, data.getvalue(), mode=0o600)
    return Secrets(key_file=str(key_file), boundaries_file=str(path))


def _path(path: str | os.PathLike[str] | None) -> pathlib.Path | None:
    return None if path is None else pathlib.Path(path).absolute()


def pending_groups(out: pathlib.Path, layout: Layout) -> list[int]:
    """Returns the groups that an open job has still to write."""
    if (out / MANIFEST_NAME).exists():
        return []  # killed while it cleaned up
    done = _finished(out, layout)
    return [group for group in range(layout.num_groups) if group not in done]


def finish_job(
    out: pathlib.Path, layout: Layout, dataset: Dataset, batches_id: str
) -> Manifest:
    """Writes checksums and manifest of an open job, and removes what else it left.

    Args:
      out: The folder that ``open_job`` was given; so are ``layout`` and ``dataset``.
      batches_id: From ``open_job``.

    Raises:
      InputError: not every file is there.
    """
    if not (out / MANIFEST_NAME).exists():
        _write_manifest(out, layout, dataset, batches_id)
    _clean(out)
    return read_manifest(out)


def _write_manifest(
    out: pathlib.Path, layout: Layout, dataset: Dataset, batches_id: str
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


def _clean(out: pathlib.Path) -> None:
    """Leaves of a job with a manifest what is to stay; does nothing the second time."""
    private = out / PRIVATE_NAME
    shutil.rmtree(private / "files", ignore_errors=True)
    shutil.rmtree(private / SPILL_NAME, ignore_errors=True)
    (private / BOUNDARIES_NAME).unlink(missing_ok=True)
    # Temporary files of processes that were killed.
    names = (KEY_NAME, JOB_NAME, CHECKSUMS_NAME, BOUNDARIES_NAME)
    for folder, prefixes in ((out, ("batches-", MANIFEST_NAME)), (private, names)):
        for prefix in prefixes:
            for leftover in folder.glob(f".{prefix}*"):
                leftover.unlink()
    # Last: while it is there, the same command goes on from here.
    (private / JOB_NAME).unlink(missing_ok=True)
