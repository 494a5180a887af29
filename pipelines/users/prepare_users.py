"""A raw table to numeric Parquet, and its users bounded: ``prepare``, then ``bound``.

    OUT.unfinished/table/         the prepared table, with ids
    OUT.unfinished/summary.json   its summary
    OUT.unfinished/private.key    the key that chooses rows, unless the user named one
    OUT.unfinished/bound.digest   digest of the settings that bound users, and the key
    OUT.unfinished/SPLIT/         bounded rows, until they are in data/
    OUT.unfinished/data/          becomes OUT; this and the rest as in ``unfinished``

Formal guarantees:
  - The rows of a user are in one split, unless the schema says ``cut_users``.
  - OUT/train holds at most ``max_examples_per_user`` rows of each user, and the note
    about it, with the guarantees of ``bound_job``.  All held-out rows are kept, or with
    ``bound_held_out`` at most so many of each user, and the note: always rows.
  - The id is gone: no file of OUT holds it.
  - Nothing is read before every setting is checked.
  - Those of ``unfinished``: a killed job goes on; rows that are refused leave nothing,
    and the prepared table is kept if only the number of slots is too small.

Public: options and settings.  Sensitive: everything read and written.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq

from accounting.core.plan import fingerprint
from accounting.core.validation import InputError
from pipelines.core.users.bounded import ROWS, USERS
from pipelines.files.folders import make_private_folder
from pipelines.files.json_files import pretty_json, read_json
from pipelines.files.storage import write_atomically
from pipelines.files.unfinished import (
    Unfinished,
    is_made,
    is_resumable,
    unfinished_folder,
)
from pipelines.inputs.source_table import KEPT_NAME, read_from
from pipelines.job.runtime.tasks import Runtime
from pipelines.tables.convert import SPLITS, PrepareSummary
from pipelines.tables.job import prepare_job
from pipelines.tables.prepared_files import new_table, write_record
from pipelines.tables.raw_files import list_files
from pipelines.tables.table_format import TableOptions, prepared_schema
from pipelines.users import bound
from pipelines.users.bound_folder import commitment_to, key_path
from pipelines.users.bound_job import BoundSettings
from pipelines.users.user_records import records_schema

_TRAIN = SPLITS[0]
_TABLE = "table"
_REMEDY = "Name another --out."

#: Name of a step of ``bound`` here: the preparation has steps of the same names.
_OF_USERS = {step: f"users: {step}" for step in bound.STEPS}
#: Names of the steps, in order.
STEPS = (*prepare_job.STEPS, *_OF_USERS.values())


def prepare_users(
    pattern: str,
    out: str | os.PathLike[str],
    options: TableOptions,
    settings: BoundSettings,
    *,
    bound_held_out: bool = False,
    key_file: str | os.PathLike[str] | None = None,
    memory_limit: int = bound.DEFAULT_MEMORY_LIMIT,
    runtime: Runtime | None = None,
) -> PrepareSummary:
    """Prepares a table whose schema has a column of users, and bounds them.

    Args:
      pattern: CSV, TSV or Parquet: a file, a folder or a glob.
      out: New or empty folder; the same one resumes a killed job.
      options: Options of the table.
      settings: Which rows are kept for training.
      bound_held_out: Whether held-out rows are bounded, too.
      key_file: File of the key that chooses rows; made if missing.  None for a
        temporary key.
      memory_limit: As for ``bound.bound``.
      runtime: As for ``prepare_job.prepare``.

    Returns:
      Summary of the table before users are bounded.  Sensitive.

    Raises:
      InputError: before any work, for anything that the user can fix; later for
        malformed rows, files that change, or too few slots.
    """
    runtime = runtime or Runtime()
    bound.threads_for(memory_limit, runtime.num_threads)  # too little is refused

    def of_users(step: str, done: int, total: int) -> None:
        runtime.on_progress(_OF_USERS[step], done, total)

    schema = prepared_schema(options.schema)
    most = settings.max_examples_per_user if settings.sampled == USERS else 1
    records_schema(schema, most)  # refuses names, and records that are too large
    held_out = _of_rows(settings) if bound_held_out else settings
    options = dataclasses.replace(options, with_users=True)
    files = [dataclasses.asdict(each) for each in list_files(pattern, partitions=True)]
    job = {"files": files, "options": repr(options)}
    with unfinished_folder(out) as folder:
        done = folder.begin_or_continue(job, "input, schema or options")
        if done is None:
            key = commitment_to(key_file)  # a key is refused before any work
            told = {**_told(settings, bound_held_out), "key": key}
            done = _prepared(folder, pattern, options, runtime)
            bound_rows = functools.partial(
                bound.bound,
                key_file=key_path(folder, key_file),
                memory_limit=memory_limit,
                runtime=dataclasses.replace(runtime, on_progress=of_users),
            )
            _check_same(folder, told)
            for split in SPLITS:
                rows = folder.work / _TABLE / split
                if split == _TRAIN:
                    _bounded(folder, split, bound_rows, settings)
                elif bound_held_out and _has_rows(rows):
                    _bounded(folder, split, bound_rows, held_out)
                else:
                    _drop_ids(rows, folder.data / split, schema)
            told = {
                **options.settings,
                **_told(settings, bound_held_out),
                **read_from(each["path"] for each in files),
            }
            write_record(folder.data, schema, told)
        folder.finish(done)
    return PrepareSummary.from_json(done)


def _prepared(
    folder: Unfinished, pattern: str, options: TableOptions, runtime: Runtime
) -> dict[str, Any]:
    """Prepares the table unless it was done, and returns the summary."""
    path, table = folder.work / "summary.json", folder.work / _TABLE
    if not path.exists():
        if is_made(table):
            shutil.rmtree(table)  # killed before its summary was written
        try:
            found = prepare_job.prepare(pattern, table, options, runtime=runtime)
        except InputError:
            if not is_resumable(table):  # there is nothing to go on with
                folder.give_up()
            raise
        write_atomically(path, pretty_json(dataclasses.asdict(found)), mode=0o600)
    summary: dict[str, Any] = read_json(path)
    return summary


def _check_same(folder: Unfinished, told: dict[str, Any]) -> None:
    """Refuses other settings of users, or another key, than rows were bounded by."""
    path, digest = folder.work / "bound.digest", fingerprint(told).encode()
    if not (folder.data / _TRAIN).exists() and not is_made(folder.work / _TRAIN):
        write_atomically(path, digest, mode=0o600)
    if path.read_bytes() != digest:
        folder.refuse_another("settings of users or key")


def _bounded(
    folder: Unfinished,
    split: str,
    bound_rows: Callable[..., None],
    settings: BoundSettings,
) -> None:
    """Bounds users of the rows of a split unless it was done."""
    bounded, target = folder.work / split, folder.data / split
    if target.exists():
        return
    if not is_made(bounded):
        try:
            bound_rows(str(folder.work / _TABLE / split), bounded, settings)
        except InputError:  # too few slots: other parts have to have more, too
            for done in folder.data.iterdir():
                shutil.rmtree(done)
            raise
    # The record of all parts says what they are of.
    (bounded / KEPT_NAME).unlink(missing_ok=True)
    os.rename(bounded, target)


def _told(settings: BoundSettings, bound_held_out: bool) -> dict[str, Any]:
    """Returns the settings of users as JSON."""
    also = {"bound_held_out": True} if bound_held_out else {}
    return {**dataclasses.asdict(settings), **also}


def _of_rows(settings: BoundSettings) -> BoundSettings:
    """Returns how held-out rows are bounded, of which an example is always a row."""
    if settings.sampled != USERS:
        return settings
    slots = settings.num_examples * settings.max_examples_per_user
    return dataclasses.replace(settings, sampled=ROWS, num_examples=slots)


def _has_rows(folder: pathlib.Path) -> bool:
    return any(pq.read_metadata(each).num_rows for each in folder.glob("*.parquet"))


def _drop_ids(source: pathlib.Path, target: pathlib.Path, schema: Any) -> None:
    """Copies the files of a split without the ids."""
    make_private_folder(target, remedy=_REMEDY)
    for path in sorted(source.glob("*.parquet")):
        if (target / path.name).exists():
            continue
        with (
            pq.ParquetFile(path, page_checksum_verification=True) as rows,
            new_table(target / path.name, schema) as writer,
        ):
            for group in range(rows.num_row_groups):
                found = rows.read_row_group(group, columns=schema.names)
                found = found.replace_schema_metadata(schema.metadata)
                writer.write_table(found, row_group_size=len(found))
