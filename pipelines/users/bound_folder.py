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
from pipelines.batches.columns import row_bytes
from pipelines.batches.manifest import DATASET_METADATA_KEY
from pipelines.files.folders import make_private_folder
from pipelines.files.output_folder import check_output
from pipelines.inputs import unfinished_job
from pipelines.inputs.bounded import BOUNDED, KEY_LABEL, ROWS, USERS, Bounded
from pipelines.inputs.known_input import KnownInput, know_input
from pipelines.inputs.parquet_blocks import (
    RowGroups,
    description_of,
    list_row_groups,
    numeric_columns,
)
from pipelines.sampling.keys import commitment, read_or_create_key_file
from pipelines.users.bound_job import (
    DATA,
    ENTRY,
    FOLDERS,
    KEPT_ROW,
    BoundJob,
    BoundSettings,
)
from pipelines.users.user_ids import check_type
from pipelines.users.user_records import records_schema

#: Maximum number of rows in a run, unless one row group has more.
RUN_ROWS = 1 << 20
#: Bytes of a run or a part in memory, and how often a task holds it: half of what a
#: thread has.  Not a share of --memory-limit, on which no file may depend.
TASK_BYTES = 128 << 20
_COPIES = 4
_MOST_PARTS = 1 << 12
_JOB, _KEY = "job.json", "private.key"


def open_job(
    pattern: str,
    out: str | os.PathLike[str],
    settings: BoundSettings,
    *,
    key_file: str | os.PathLike[str] | None,
) -> tuple[BoundJob, pathlib.Path]:
    """Makes or resumes the folder of a job; returns the job and the path of ``out``.

    Args:
      pattern: Parquet: a file, a folder or a glob.
      out: New or empty folder of this machine, or one that every worker mounts.
      settings: Which rows are kept.
      key_file: File of the key that chooses rows; made if missing.  None for a key that
        is removed with ``OUT.unfinished``.

    Raises:
      InputError: before any work, for anything that the user can fix.
    """
    groups = list_row_groups(pattern)
    _check_columns(groups, settings, pattern)
    sizes = _sizes(groups, settings)
    final, work = open_work(out)
    key_path = os.path.abspath(work / _KEY if key_file is None else key_file)
    key = read_or_create_key_file(key_path)
    known = know_input(key, groups)
    _begin_or_continue(work, settings, known, sizes)
    job = BoundJob(
        settings=settings,
        blocks=groups.blocks,
        known=known,
        names=tuple(_kept(groups.schema, settings).names),
        arrow_schema=_schema_of(groups.schema, settings, commitment(key, KEY_LABEL))
        .serialize()
        .to_pybytes(),
        work=str(work),
        key_file=key_path,
        **sizes,
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
    metadata = {DATASET_METADATA_KEY: json.dumps(told).encode()}
    rows = _kept(found, settings).with_metadata(metadata)
    if settings.sampled == ROWS:
        return rows
    return records_schema(rows, settings.max_examples_per_user)


def _kept(found: pa.Schema, settings: BoundSettings) -> pa.Schema:
    """Returns the schema without the ids."""
    fields = [field for field in found if field.name != settings.user_column]
    return pa.schema(fields, found.metadata)


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
    records_schema(_kept(groups.schema, settings), most)
    return groups


def _sizes(groups: RowGroups, settings: BoundSettings) -> dict[str, int]:
    """Returns the sizes of tasks, which depend on the input and the settings alone.

    Raises:
      InputError: users are sampled, and batches cannot hold their records.
    """
    row, most = ENTRY.itemsize, settings.max_examples_per_user
    if settings.sampled == USERS:
        columns = numeric_columns(records_schema(_kept(groups.schema, settings), most))
        row = max(row, KEPT_ROW["user"].itemsize + row_bytes(columns) // most)
    rows = max(1, TASK_BYTES // (_COPIES * row))
    num_rows = sum(groups.files.values())
    return {
        "run_rows": min(RUN_ROWS, rows),
        "num_parts": min(_MOST_PARTS, 1 + num_rows // rows),
    }


def _begin_or_continue(
    work: pathlib.Path,
    settings: BoundSettings,
    known: KnownInput,
    sizes: dict[str, int],
) -> None:
    job = {**dataclasses.asdict(settings), "input": known.input_id, **sizes}
    unfinished_job.begin_or_continue(work / _JOB, job, "input, settings or key")


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
