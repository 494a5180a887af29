"""Whose batches a folder holds: the first private run on them marks it.

    OUT/private/used_by.json    digest of the run's random id, and its folder; never
                                replaced

Rows are drawn once for all runs on the same batches, and nothing is proven for such
runs together; the sum of their epsilons is too small.  Two runs of 1,000 steps on
1,000 of a million rows each, both (1, 1e-6)-private, have at delta 2e-6 an epsilon of
at least 4.1 together: noise of the same steps may be averaged.

If several runs ask for one folder, also at once, `take` gives it to one of them, for
good; that run may ask again, in any process.  `check` writes nothing, and refuses what
`take` would refuse now.  Where nothing can be written, `take` refuses nothing, and says
so.  A copy that was made before the first run, and batches that were sampled again by
the same key, are not noticed here: `dpsgd account` refuses to add up such runs.

Sensitive: the file.
"""

from __future__ import annotations

import hashlib

from accounting.core.validation import InputError, header, read_fields
from pipelines.batches.folder import PRIVATE_NAME
from pipelines.core.files.local_files import find
from pipelines.files import storage
from pipelines.files.storage import StrPath

NAME = "used_by.json"
_HEADER = header(1, "dpsgd-used-by")


def check(batches: StrPath, run_id: str) -> None:
    """Refuses batches that another run has taken.

    Args:
      batches: Folder of the batches, here or in a store.
      run_id: Random id of the run; empty before it has one.  Sensitive.

    Raises:
      InputError: another run has taken the batches, or the mark cannot be read.
    """
    path = storage.join(batches, PRIVATE_NAME, NAME)
    if find(path, storage.read_bytes) is None:
        return
    mark = read_fields(
        storage.read_json(path), ["run", "folder"], kind=f"mark in {path}",
        version=_HEADER["version"], format_name=_HEADER["format"],
    )  # fmt: skip
    if mark["run"] != _digest(run_id):
        raise InputError(
            f"Expected batches={batches} to be of this run alone; the run begun in "
            f"{mark['folder']} has used them, and nothing is proven for two runs on "
            "the same batches together. Make others by `dpsgd batches`, or accept that "
            "by --batches-used-before (in Python batches_used_before=True)."
        )


def take(
    batches: StrPath, run_id: str, folder: StrPath, *, shared: bool = False
) -> str:
    """Marks batches as those of a run, before its first noise is drawn.

    Args:
      batches: Folder of the batches, here or in a store.
      run_id: Random id of the run.  Sensitive; its digest is kept.
      folder: Folder of the run, here or in a store, for messages.
      shared: Whether another run may have taken them.

    Returns:
      A sentence that says why the batches could not be marked; empty if they were.

    Raises:
      InputError: as for `check`, unless batches may be ``shared``.
    """
    path = storage.join(batches, PRIVATE_NAME, NAME)
    mark = {**_HEADER, "run": _digest(run_id), "folder": storage.absolute(folder)}
    try:
        storage.create(path, storage.pretty_json(mark), mode=0o600)
    except OSError as error:
        if find(path, storage.read_bytes) is None:
            return (
                f"{path} cannot be written ({error.strerror}), so that nobody is "
                "warned who trains on these batches again: nothing is proven for two "
                "runs on them together."
            )
    if not shared:
        check(batches, run_id)
    return ""


def _digest(run_id: str) -> str:
    return hashlib.sha256(run_id.encode()).hexdigest()
