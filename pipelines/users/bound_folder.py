"""The folder of a job that bounds users: opened, resumed, and renamed to ``out``.

Formal guarantees:
  - Only footers are read before every setting and the columns are checked.
  - An unfinished job resumes only with the same input, settings and key.
  - Only this user may enter the folders.

Public: settings.  Sensitive: everything in the folders.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from accounting.validation import InputError
from pipelines.batches.manifest import DATASET_METADATA_KEY
from pipelines.files.folders import make_private_folder
from pipelines.files.output_folder import check_output
from pipelines.inputs import unfinished_job
from pipelines.inputs.bounded import BOUNDED, KEY_LABEL, ROWS, Bounded
from pipelines.inputs.known_input import KnownInput, know_input
from pipelines.inputs.parquet_blocks import RowGroups, description_of, list_row_groups
from pipelines.sampling.keys import commitment, read_or_create_key_file
from pipelines.users.bound_job import DATA, ENTRY, FOLDERS, BoundJob, BoundSettings
from pipelines.users.user_ids import check_type
from pipelines.users.user_records import records_schema

#: Bytes per row of a part that sorting needs.
_SORT_BYTES = 4 * ENTRY.itemsize
_MOST_PARTS = 1 << 12
_JOB, _KEY = "job.json", "private.key"


def open_job(
    pattern: str,
    out: str | os.PathLike[str],
    settings: BoundSettings,
    *,
    key_file: str | os.PathLike[str] | None,
    part_bytes: int,
) -> tuple[BoundJob, pathlib.Path]:
    """Makes or resumes the folder of a job; returns the job and the path of ``out``.

    Args:
      pattern: Parquet: a file, a folder or a glob.
      out: New or empty folder of this machine, or one that every worker mounts.
      settings: Which rows are kept.
      key_file: File of the key that chooses rows; made if missing.  None for a key that
        is removed with ``OUT.unfinished``.
      part_bytes: Memory of a task that chooses rows, in bytes.

    Raises:
      InputError: before any work, for anything that the user can fix.
    """
    groups = list_row_groups(pattern)
    _check_columns(groups, settings, pattern)
    final, work = open_work(out)
    key_path = os.path.abspath(work / _KEY if key_file is None else key_file)
    key = read_or_create_key_file(key_path)
    num_rows = sum(groups.files.values())
    num_parts = min(_MOST_PARTS, 1 + num_rows * _SORT_BYTES // part_bytes)
    known = know_input(key, groups)
    job = BoundJob(
        settings=settings,
        blocks=groups.blocks,
        known=known,
        names=tuple(_kept_names(groups.schema, settings)),
        arrow_schema=_schema_of(groups.schema, settings, commitment(key, KEY_LABEL))
        .serialize()
        .to_pybytes(),
        num_parts=_begin(work, settings, known, num_parts),
        work=str(work),
        key_file=key_path,
    )
    for name in FOLDERS:
        make_private_folder(work / name, remedy="Name another --out.")
    return job, final


def open_work(out: str | os.PathLike[str]) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the path of ``out`` and the folder of the job, which it makes.

    Raises:
      InputError: they cannot be made.
    """
    final = pathlib.Path(os.path.realpath(check_output(out)))
    work = final.with_name(f"{final.name}.unfinished")
    make_private_folder(work, remedy="Name another --out.")
    return final, work


def _schema_of(found: pa.Schema, settings: BoundSettings, key: str) -> pa.Schema:
    """Returns the schema of the output files."""
    note = Bounded(**dataclasses.asdict(settings), key=key)
    told = {**description_of(found, "--input"), BOUNDED: note.to_json()}
    fields = [found.field(name) for name in _kept_names(found, settings)]
    rows = pa.schema(fields, {DATASET_METADATA_KEY: json.dumps(told).encode()})
    if settings.sampled == ROWS:
        return rows
    return records_schema(rows, settings.max_examples_per_user)


def _kept_names(found: pa.Schema, settings: BoundSettings) -> list[str]:
    return [name for name in found.names if name != settings.user_column]


def _check_columns(groups: RowGroups, settings: BoundSettings, pattern: str) -> None:
    names, column = groups.schema.names, settings.user_column
    if column not in names:
        raise missing_column(column, names, pattern)
    check_type(column, groups.schema.field(column).type)
    if BOUNDED in description_of(groups.schema, pattern):
        raise InputError(
            f"Expected --input {pattern} not to be bounded already. Give the table "
            "that `dpsgd bound` read."
        )


def missing_column(column: str, names: Sequence[str], place: str) -> InputError:
    """Returns the error for a table without a column of ids.

    Args:
      column: Name that the user gave.
      names: Names of the table's columns.
      place: The table, for messages.
    """
    return InputError(
        f"Expected --user-column {column} to be a column of {place}; it has "
        f"{', '.join(names)}."
    )


def check_table(pattern: str, user_column: str, most: int) -> RowGroups:
    """Returns the row groups of a table that can be bounded and made into batches.

    Args:
      pattern: Parquet: a file, a folder or a glob.
      user_column: Column of the ids.
      most: Maximum number of rows in a record.

    Raises:
      InputError: as in `open_job`, or a column that batches cannot hold.
    """
    groups = list_row_groups(pattern)
    settings = BoundSettings(
        user_column=user_column, max_examples_per_user=1, num_examples=1
    )
    _check_columns(groups, settings, pattern)
    names = _kept_names(groups.schema, settings)
    fields = [groups.schema.field(name) for name in names]
    records_schema(pa.schema(fields, groups.schema.metadata), most)
    return groups


def _begin(
    work: pathlib.Path, settings: BoundSettings, known: KnownInput, num_parts: int
) -> int:
    """Begins or continues a job; returns its number of parts."""
    job = {**dataclasses.asdict(settings), "input": known.input_id}
    found = unfinished_job.begin_or_continue(
        work / _JOB, job, "input, settings or key", parts=num_parts
    )
    return int(found["parts"])


def check_room(job: BoundJob) -> None:
    """Checks that the public number of slots suffices.

    Args:
      job: Job with all rows chosen or, if users are sampled, with all files written.

    Raises:
      InputError: it does not; the message has no count.
    """
    found = _num_users(job) if job.has_users else job.num_kept()
    if found > job.settings.num_examples:
        what = "users" if job.has_users else "rows that are kept"
        raise InputError(
            f"Expected num_examples={job.settings.num_examples} to be at least the "
            f"{what}. Give a larger public number, such as the rows of the whole table,"
            f" after `rm -r {job.work}`."
        )


def _num_users(job: BoundJob) -> int:
    files = job.folder(DATA).glob("*.parquet")
    return sum(pq.read_metadata(file).num_rows for file in files)


def finish(job: BoundJob, final: pathlib.Path) -> None:
    """Gives the folder its name, and removes the unfinished one.

    Args:
      job: Job with all tasks done.
      final: Path from ``open_job``.
    """
    os.rename(pathlib.Path(job.work, DATA), final)
    shutil.rmtree(job.work)
