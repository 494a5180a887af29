"""A raw table to numeric Parquet, and its users bounded: ``prepare``, then ``bound``.

    OUT.unfinished/job.json      digest of the table, its schema and options
    OUT.unfinished/bound.json    digest of the settings that bound users
    OUT.unfinished/private.key   the key that chooses rows, unless the user named one
    OUT.unfinished/table/        the prepared table, with ids
    OUT.unfinished/data/         becomes OUT

Formal guarantees:
  - The rows of a user are in one split, unless the schema says ``cut_users``.
  - OUT/train holds at most ``max_examples_per_user`` rows of each user, and the note
    about it, with the guarantees of ``bound_job``.  All held-out rows are kept.
  - The id is gone: no file of OUT holds it.
  - Nothing is read before every setting is checked.  The same command resumes a killed
    one; one with another table, schema, option or setting is refused.
  - ``out`` appears complete or not at all; only this user may enter it.

Public: options and settings.  Sensitive: everything read and written.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq

from pipelines.batches.manifest import pretty_json, read_json
from pipelines.files.folders import make_private_folder
from pipelines.files.storage import write_atomically
from pipelines.inputs import unfinished_job
from pipelines.inputs.bounded import USERS
from pipelines.sampling.keys import read_or_create_key_file
from pipelines.tables.convert import SPLITS, PrepareSummary
from pipelines.tables.prepared_files import file_record, new_table, write_record
from pipelines.tables.raw_files import list_files
from pipelines.tables.table_format import TableOptions, prepared_schema
from pipelines.users.bound_folder import open_work
from pipelines.users.bound_job import BoundSettings
from pipelines.users.user_records import records_schema

_TRAIN, *_HELD_OUT = SPLITS
_REMEDY = "Name another --out."

#: Prepares a table: (pattern, folder, options) -> summary.
PrepareTable = Callable[[str, pathlib.Path, TableOptions], PrepareSummary]
#: Bounds users: (pattern, folder, settings, key_file=...).
BoundTable = Callable[..., None]


def prepare_users(
    pattern: str,
    out: str | os.PathLike[str],
    options: TableOptions,
    settings: BoundSettings,
    *,
    key_file: str | os.PathLike[str] | None,
    prepare_table: PrepareTable,
    bound_table: BoundTable,
) -> PrepareSummary:
    """Prepares a table whose schema has a column of users, and bounds them.

    Args:
      pattern: CSV, TSV or Parquet: a file, a folder or a glob.
      out: New or empty folder; the same one resumes a killed job.
      options: Options of the table.
      settings: Which rows are kept for training.
      key_file: File of the key that chooses rows; made if missing.  None for a
        temporary key.
      prepare_table: ``convert.prepare`` or ``prepare_job.prepare_on``, as a partial.
      bound_table: ``bound.bound``, as a partial.

    Returns:
      Summary of the table before users are bounded.  Sensitive.

    Raises:
      InputError: before any work, for anything that the user can fix; later for
        malformed rows, files that change, or too few slots.
    """
    schema = prepared_schema(options.schema)
    most = settings.max_examples_per_user if settings.sampled == USERS else 1
    records_schema(schema, most)  # refuses names, and records that are too large
    options = dataclasses.replace(options, with_users=True)
    files = [dataclasses.asdict(each) for each in list_files(pattern, partitions=True)]
    final, work = open_work(out)
    key = work / "private.key" if key_file is None else pathlib.Path(key_file)
    read_or_create_key_file(key)
    _begin_or_continue(work / "job.json", {"files": files, "options": repr(options)})
    table, data = work / "table", work / "data"
    summary = _prepared(work, lambda: prepare_table(pattern, table, options))
    make_private_folder(data, remedy=_REMEDY)
    for split in _HELD_OUT:
        _drop_ids(table / split, data / split, schema)
    if not (data / _TRAIN).exists():
        (work / "bound.json").unlink(missing_ok=True)
        _begin_or_continue(work / "bound.json", dataclasses.asdict(settings))
        bound_table(str(table / _TRAIN), data / _TRAIN, settings, key_file=key)
    _begin_or_continue(work / "bound.json", dataclasses.asdict(settings))
    records = {
        str(path.relative_to(data)): file_record(path)
        for path in sorted(data.glob("*/*.parquet"))
    }
    told = {**options.settings, **dataclasses.asdict(settings)}
    write_record(data, schema, told, records)
    os.rename(data, final)
    shutil.rmtree(work)
    return summary


def _begin_or_continue(path: pathlib.Path, job: dict[str, Any]) -> None:
    unfinished_job.begin_or_continue(path, job, "input, schema, options or settings")


def _prepared(
    work: pathlib.Path, prepare: Callable[[], PrepareSummary]
) -> PrepareSummary:
    """Prepares the table unless it was done, and returns the summary."""
    path = work / "summary.json"
    if not path.exists():
        # Without a summary the table may be incomplete.
        shutil.rmtree(work / "table", ignore_errors=True)
        found = pretty_json(dataclasses.asdict(prepare()))
        write_atomically(path, found, mode=0o600)
    return PrepareSummary(**read_json(path))


def _drop_ids(source: pathlib.Path, target: pathlib.Path, schema: Any) -> None:
    """Copies the files of a split without the ids."""
    make_private_folder(target, remedy=_REMEDY)
    for path in sorted(source.glob("*.parquet")):
        if (target / path.name).exists():
            continue
        with (
            pq.ParquetFile(path, page_checksum_verification=True) as rows,
            new_table(target / path.name, schema, source) as writer,
        ):
            for group in range(rows.num_row_groups):
                found = rows.read_row_group(group, columns=schema.names)
                found = found.replace_schema_metadata(schema.metadata)
                writer.write_table(found, row_group_size=len(found))
