"""A job that bounds users: its input and settings checked, its folder opened.

Formal guarantees:
  - Only footers are read before every setting and the columns are checked.
  - An unfinished job resumes only with the same input, settings and key.
  - Those of ``unfinished``.

Public: settings.  Sensitive: everything in the folders.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shlex

import pyarrow as pa
import pyarrow.parquet as pq

from accounting.core.validation import InputError
from pipelines.core.batches.columns import row_bytes
from pipelines.core.keys import commitment
from pipelines.core.users.bounded import BOUNDED, KEY_LABEL, ROWS, USERS, Bounded
from pipelines.files.folders import make_private_folder
from pipelines.files.key_files import read_or_create_key_file
from pipelines.files.paths import is_remote
from pipelines.files.unfinished import Unfinished
from pipelines.inputs.input_files import find_files
from pipelines.inputs.known_input import know_input
from pipelines.inputs.parquet_blocks import (
    DATASET_METADATA_KEY,
    RowGroups,
    description_of,
    list_row_groups,
    numeric_columns,
)
from pipelines.tables.columns import refusal
from pipelines.tables.schema.column_kinds import User
from pipelines.tables.table_files import CSV, TSV, kind_of_file
from pipelines.users.bound_job import (
    DATA,
    ENTRY,
    FOLDERS,
    IDS,
    KEPT_ROW,
    BoundJob,
    BoundSettings,
)
from pipelines.users.user_records import records_schema

#: Maximum number of rows in a run, unless one row group has more.
RUN_ROWS = 1 << 20
#: Bytes of a run or a part in memory, and how often a task holds it: half of what a
#: thread has.  Not a share of --memory-limit, on which no file may depend.
TASK_BYTES = 128 << 20
_COPIES = 4
_MOST_PARTS = 1 << 12


def key_path(
    folder: Unfinished, key_file: str | os.PathLike[str] | None
) -> pathlib.Path:
    """Returns the path of the key that chooses rows.

    Args:
      folder: Folder of the job.
      key_file: The user's file; None for a key that is removed with the folder.
    """
    path = folder.work / "private.key" if key_file is None else key_file
    return pathlib.Path(os.path.abspath(path))


def commitment_to(key_file: str | os.PathLike[str] | None) -> str:
    """Returns a commitment to the user's key, made if missing; else empty."""
    if key_file is None:
        return ""
    return commitment(read_or_create_key_file(key_file), "job of bounded users")


def begin_or_continue(
    folder: Unfinished,
    settings: BoundSettings,
    listed: str,
    key_file: str | os.PathLike[str] | None,
) -> bool:
    """Records a new job, or resumes it; returns whether only its clean-up is left.

    Args:
      folder: Folder of the job.
      settings: Which rows are kept.
      listed: Digest of the files of the input.
      key_file: As for ``key_path``.

    Raises:
      InputError: another job is unfinished there, or the key is refused.
    """
    job = {
        **dataclasses.asdict(settings),
        "input": listed,
        "key": commitment_to(key_file),
        "sizes": [RUN_ROWS, TASK_BYTES, _COPIES, _MOST_PARTS],
    }
    return folder.begin_or_continue(job, "input, settings or key") is not None


def open_job(
    folder: Unfinished,
    groups: RowGroups,
    settings: BoundSettings,
    key_file: str | os.PathLike[str] | None,
) -> BoundJob:
    """Returns the job, with its folders and its key.

    Args:
      folder: Folder of the job, begun.
      groups: From ``check_table``.
      settings: Which rows are kept.
      key_file: As for ``key_path``.

    Raises:
      InputError: the key is refused, or that of a resumed job is gone.
    """
    path = key_path(folder, key_file)
    if (folder.work / IDS).exists() and not path.exists():  # ids are of that key
        folder.refuse_another("key and ids")
    key = read_or_create_key_file(path)
    for name in FOLDERS:
        make_private_folder(folder.work / name, remedy="Name another --out.")
    return BoundJob(
        settings=settings,
        blocks=groups.blocks,
        known=know_input(key, groups),
        names=tuple(_kept(groups.schema, settings).names),
        arrow_schema=_schema_of(groups, settings, key).serialize().to_pybytes(),
        work=str(folder.work),
        key_file=str(path),
        **_sizes(groups, settings),
    )


def _schema_of(groups: RowGroups, settings: BoundSettings, key: bytes) -> pa.Schema:
    """Returns the schema of the output files."""
    chosen_by = commitment(key, KEY_LABEL) + commitment(key, KEY_LABEL, groups.digest)
    note = Bounded(**dataclasses.asdict(settings), key=chosen_by)
    told = {**description_of(groups.schema, "--input"), BOUNDED: note.to_json()}
    metadata = {DATASET_METADATA_KEY: json.dumps(told).encode()}
    rows = _kept(groups.schema, settings).with_metadata(metadata)
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
        raise InputError(
            f"Expected --user-column {column} to be a column of {pattern}; it has "
            f"{', '.join(names)}."
        )
    kind = groups.schema.field(column).type
    if refusal(User(), kind) is not None:
        raise InputError(
            f"Expected user column {column} of type {kind} to hold integers or text. "
            f"Cast it, for example by `table.astype({{{column!r}: str}})` in pandas."
        )
    if BOUNDED in description_of(groups.schema, pattern):
        raise InputError(
            f"Expected --input {pattern} not to be bounded already. Give the table "
            "that `dpsgd bound` read."
        )


def refuse_text(pattern: str, user_column: str) -> None:
    """Refuses CSV and TSV, which do not say which columns are numbers.

    Args:
      pattern: A file, a folder or a glob.
      user_column: Column of the ids.

    Raises:
      InputError: with the commands that take them.
    """
    if is_remote(pattern):
        return
    found = find_files(pattern, suffix="", partitions=True).files
    if any(kind_of_file(path) not in (CSV, TSV) for path, _ in found):
        return
    table, column = shlex.quote(pattern), shlex.quote(user_column)
    raise InputError(
        f"Expected --input {pattern} to be Parquet beside --user-column: text does not "
        f"say which columns are numbers. `dpsgd schema {table} --user {column} --label "
        "LABEL` writes schema.toml, to be completed. `dpsgd prepare --schema "
        f"schema.toml --input {table} --out data` then bounds users itself or, with "
        "--keep-users, makes data/train and data/test for this command."
    )


def check_input(pattern: str, settings: BoundSettings) -> RowGroups:
    """Returns the row groups of a table that can be bounded.

    Args:
      pattern: Parquet: a file, a folder or a glob.
      settings: Which rows are kept.

    Raises:
      InputError: for anything that the user can fix.
    """
    refuse_text(pattern, settings.user_column)
    groups = list_row_groups(pattern)
    _check_columns(groups, settings, pattern)
    _sizes(groups, settings)  # refuses records that are too large
    return groups


def check_table(pattern: str, user_column: str, most: int) -> RowGroups:
    """Returns the row groups of a table that can be bounded and made into batches.

    Args:
      pattern: Parquet: a file, a folder or a glob.
      user_column: Column of the ids.
      most: Maximum number of rows in a record.

    Raises:
      InputError: as in ``check_input``, or a column that batches cannot hold.
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


def check_room(job: BoundJob) -> None:
    """Checks that the public number of slots suffices.

    Args:
      job: Job with all rows chosen or, if users are sampled, with all files written.

    Raises:
      InputError: it does not; the message has no count.
    """
    found = _num_users(job) if job.settings.has_users else job.num_kept()
    if found > job.settings.num_examples:
        what = "users" if job.settings.has_users else "rows that are kept"
        raise InputError(
            f"Expected num_examples={job.settings.num_examples} to be at least the "
            f"{what}. Give a larger public number, such as the rows of the whole table."
        )


def _num_users(job: BoundJob) -> int:
    files = job.folder(DATA).glob("*.parquet")
    return sum(pq.read_metadata(file).num_rows for file in files)
