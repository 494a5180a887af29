"""The record of an unfinished job, which decides whether its folder may be continued.

Formal guarantees:
  - The same job continues; another one is refused and leaves the record as it is.
  - The record holds a digest of the job's description, not the description.

Sensitive: the description.
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
      **found: Values to record beside the digest, as JSON.
    """
    wanted = {"job": fingerprint(job), **found}
    write_atomically(path, pretty_json(wanted), mode=0o600)


def check(
    path: pathlib.Path, job: Mapping[str, Any], depends_on: str
) -> dict[str, Any]:
    """Returns the record in a folder, which must be that of the given job.

    Args:
      path: Path of the record, in the folder of the job.
      job: Description of the job, as for ``record``.
      depends_on: Parts of the description, in words for the message.

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
    """Returns the record of a job; writes it if there is none.

    Args:
      path: Path of the record, in the folder of the job.
      job: Description of the job, as for ``record``.
      depends_on: Parts of the description, in words for the message.
      **found: As for ``record``; an existing record keeps its own.

    Raises:
      InputError: the record is of another job.
    """
    if not path.exists():
        record(path, job, **found)
    return check(path, job, depends_on)
