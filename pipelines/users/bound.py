"""Bounding users: the steps of a job, on threads of this process or on an engine.

Formal guarantees:
  - Those of ``bound_job``, of ``tasks``, and of ``unfinished`` for the folder.
  - The folder names the table that its rows are from: see `source_table`.
"""

from __future__ import annotations

import dataclasses
import functools
import os

from accounting.core.validation import InputError, check_int
from pipelines.core.threads import num_cores
from pipelines.files.unfinished import Unfinished, unfinished_folder
from pipelines.inputs.source_table import keep_table, table_of
from pipelines.job.runtime.tasks import Runtime, Step
from pipelines.users.bound_folder import (
    begin_or_continue,
    check_input,
    check_room,
    open_job,
)
from pipelines.users.bound_job import BoundJob, BoundSettings
from pipelines.users.user_records import gather, gathered_path, write_users

#: Names of the steps, in order; users are gathered only if they are sampled.
READ, CHOOSE, GATHER, WRITE = STEPS = ("read ids", "choose", "gather", "write")

DEFAULT_MEMORY_LIMIT = 2 << 30
#: Bytes per thread, for a run and a row group of a wide table.
LEAST_MEMORY = 256 << 20


def bound(
    pattern: str,
    out: str | os.PathLike[str],
    settings: BoundSettings,
    *,
    key_file: str | os.PathLike[str] | None = None,
    memory_limit: int = DEFAULT_MEMORY_LIMIT,
    runtime: Runtime | None = None,
) -> None:
    """Writes the table without ids, with at most k rows of each user.

    Args:
      pattern: Parquet: a file, a folder or a glob.
      out: New or empty folder; the same one resumes a killed job.
      settings: Which rows are kept.
      key_file: File of the key that chooses rows; made if missing.  None for a
        temporary key, removed when the job ends.
      memory_limit: Memory for the threads of this process, in bytes: ``LEAST_MEMORY``
        for each.  No file depends on it.
      runtime: Where the tasks of ``STEPS`` run; workers of an engine must reach input,
        output and key under the same paths.  By default threads of this process.

    Raises:
      InputError: before any work, for anything that the user can fix; later for a table
        that changes, missing ids, or too few slots.
    """
    runtime = runtime or Runtime()
    threads = threads_for(memory_limit, runtime.num_threads)
    runtime = dataclasses.replace(runtime, num_threads=threads)
    groups = check_input(pattern, settings)
    with unfinished_folder(out) as folder:
        if begin_or_continue(folder, settings, groups.digest, key_file):
            folder.finish()
            return
        source = table_of(groups)
        job = open_job(folder, groups, settings, key_file)
        for step in steps(job):
            if step.name == WRITE and not job.settings.has_users:
                _check_room(folder, job)
            runtime.run(step)
        if job.settings.has_users:  # users are counted in the written files
            _check_room(folder, job)
        keep_table(folder.data, source)
        folder.finish()


def steps(job: BoundJob) -> list[Step]:
    """Returns the steps of a job, in order."""
    runs, parts = job.runs, range(job.num_parts)
    first = [
        Step(name=READ, task=job.list_ids, items=runs, output=job.ids_path),
        Step(name=CHOOSE, task=job.choose, items=parts, output=job.kept_path),
    ]
    if not job.settings.has_users:
        last = Step(name=WRITE, task=job.write, items=runs, output=job.run_output)
        return [*first, last]
    gathering, writing = (
        functools.partial(each, job) for each in (gather, write_users)
    )
    gathered = functools.partial(gathered_path, job)
    return [
        *first,
        Step(name=GATHER, task=gathering, items=runs, output=gathered),
        Step(name=WRITE, task=writing, items=parts, output=job.output),
    ]


def _check_room(folder: Unfinished, job: BoundJob) -> None:
    """Checks that the public number of slots suffices, or leaves nothing of a job."""
    try:
        check_room(job)
    except InputError:
        folder.give_up()
        raise


def threads_for(memory_limit: int, wanted: int | None) -> int:
    """Returns the number of threads of this process that fit into memory.

    Args:
      memory_limit: Memory in bytes.
      wanted: Number of threads that the user asks for; None for all cores.

    Raises:
      InputError: too little memory for one, or a number below 1.
    """
    check_int("memory_limit", memory_limit, at_least=LEAST_MEMORY)
    if wanted is not None:
        check_int("num_threads", wanted, at_least=1)
    return max(1, min(wanted or num_cores(), memory_limit // LEAST_MEMORY))
