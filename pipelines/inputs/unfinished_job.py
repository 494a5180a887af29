"""The record of an unfinished job, by which its folder continues that job and no other.

Formal guarantees:
  - The same job continues; another one is refused, and the record stays.

Public: the record, which has digests alone.  Sensitive: what is digested.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from accounting.plan import fingerprint
from accounting.validation import InputError
from pipelines.batches.manifest import pretty_json, read_json
from pipelines.files.storage import write_atomically


def record(path: pathlib.Path, job: Mapping[str, Any], **found: Any) -> None:
    """Writes the record of a new job, which only this user may read.

    Args:
      path: Path of the record, in the folder of the job.
      job: Description of the job, as JSON; its digest is recorded.
      **found: Values that the job keeps when it continues, as JSON.
    """
    wanted = {"job": fingerprint(job), **found}
    write_atomically(path, pretty_json(wanted), mode=0o600)


def check(
    path: pathlib.Path, job: Mapping[str, Any], depends_on: str
) -> dict[str, Any]:
    """Returns the record of a job, which must be of this one.

    Args:
      path: Path of the record, in the folder of the job.
      job: Description of the job, as for ``record``.
      depends_on: What of a job is in its description, in words.

    Raises:
      InputError: no record, or one of another job.
    """
    found = read_json(path, remedy=f"Remove {path.parent}, or name another --out.")
    if not isinstance(found, dict) or found.get("job") != fingerprint(job):
        raise InputError(
            f"Expected {path.parent} to be of the same job: its {depends_on} were "
            "others. Give those again to finish it, or remove the folder."
        )
    return found


def begin_or_continue(
    path: pathlib.Path, job: Mapping[str, Any], depends_on: str, **found: Any
) -> dict[str, Any]:
    """Returns the record of a job, which is written if there is none.

    Args:
      path: Path of the record, in the folder of the job.
      job: Description of the job, as for ``record``.
      depends_on: What of a job is in its description, in words.
      **found: Values that a new job records.

    Raises:
      InputError: the record is of another job.
    """
    if not path.exists():
        record(path, job, **found)
    return check(path, job, depends_on)
