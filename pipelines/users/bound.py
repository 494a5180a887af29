"""Bounding users: the steps of a job, on threads of this process or on an engine.

Formal guarantees:
  - Those of ``bound_job``, and of ``unfinished`` for the folder.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from accounting.plan import fingerprint
from accounting.validation import InputError, check_int
from pipelines.files.threads import in_order, num_cores
from pipelines.files.unfinished import Unfinished, unfinished_folder
from pipelines.users.bound_folder import (
    begin_or_continue,
    check_input,
    check_room,
    open_job,
)
from pipelines.users.bound_job import BoundJob, BoundSettings
from pipelines.users.bound_steps import TEXT, WRITE, steps
from pipelines.users.text_tables import is_text, list_text, write_text

#: ``on_progress(step, tasks done, tasks in all)``.
Progress = Callable[[str, int, int], None]
#: Calls a task with every item.
RunTasks = Callable[[Callable[[Any], None], Sequence[Any]], None]

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
    num_threads: int | None = None,
    run_tasks: RunTasks | None = None,
    on_progress: Progress = lambda *_: None,
) -> None:
    """Writes the table without ids, with at most k rows of each user.

    Args:
      pattern: Parquet, CSV or TSV: a file, a folder or a glob.
      out: New or empty folder; the same one resumes a killed job.
      settings: Which rows are kept.
      key_file: File of the key that chooses rows; made if missing.  None for a
        temporary key, removed when the job ends.
      memory_limit: Memory for the threads of this process, in bytes: ``LEAST_MEMORY``
        for each.  No file depends on it.
      num_threads: Number of threads of this process; by default its cores.
      run_tasks: Runs tasks on the workers of an engine, which must reach input, output
        and key under the same paths; None for threads of this process.
      on_progress: Called after each task of this process.

    Raises:
      InputError: before any work, for anything that the user can fix; later for a table
        that changes, missing ids, or too few slots.
    """
    threads = threads_for(memory_limit, num_threads)

    def run(name: str, task: Callable[[Any], None], items: Sequence[Any]) -> None:
        if run_tasks is not None:
            run_tasks(task, items)
            return
        on_progress(name, 0, len(items))
        with ThreadPoolExecutor(threads) as pool:
            for done, _ in enumerate(in_order(pool, task, items, threads), start=1):
                on_progress(name, done, len(items))

    files = list_text(pattern, settings) if is_text(pattern) else ()
    groups = None if files else check_input(pattern, settings)
    listed = fingerprint([dataclasses.asdict(file) for file in files])
    with unfinished_folder(out) as folder:
        digest = groups.digest if groups else listed
        if begin_or_continue(folder, settings, digest, key_file):
            folder.finish()
            return
        if groups is None:
            table = write_text(files, folder.work, functools.partial(run, TEXT))
            groups = check_input(table, settings)
        job = open_job(folder, groups, settings, key_file)
        for name, task, items in steps(job):
            if name == WRITE and not job.has_users:
                _check_room(folder, job)
            run(name, task, items)
        if job.has_users:  # users are counted in the written files
            _check_room(folder, job)
        folder.finish()


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
