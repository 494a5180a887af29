"""The boundaries of a shuffle on disk: searched once, authenticated, resumed.

A search draws every rank of every epoch twice, which takes hours for billions of rows.
Its result stays in the job's private folder until the batches are written.

Formal guarantees:
  - The boundaries that are read are those that were found, bit for bit, for the same
    sampling key, plan, layout and data set.  Any other file (cut short, edited, of
    another job) is not used.
  - A stored epoch is not searched again.  A killed job loses at most the epochs that it
    finished within ``_SECONDS``, and the one in progress.
  - Memory stays within ``search_bytes`` plus twice ``boundaries_bytes`` of ``shuffle``.

Public: the file's path, and ``batches_id``.  Sensitive: its contents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import time
from collections.abc import Sequence

import numpy as np

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.keys import KEY_BYTES, derive
from pipelines.files.storage import new_file, read_bytes
from pipelines.job import progress
from pipelines.sampling import shuffle

#: Seconds between two stores of the epochs found so far.
_SECONDS = 60.0
_WORD = np.dtype("<u8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundariesFile:
    """The file of the boundaries of a job.

    Attributes:
      path: File of mode 0600, or in a store.
      batches_id: Commitment to the key, plan, layout and data set.
    """

    path: str
    batches_id: str

    def load(self, plan: DpSgdPlan, sampling_key: bytes) -> np.ndarray:
        """Returns the boundaries, as `shuffle.find_boundaries` does.  Sensitive.

        Args:
          plan: Plan of the job.
          sampling_key: Secret, 32 bytes.

        Raises:
          InputError: the file is not the one that the job wrote.
        """
        found = self.load_epochs(plan, sampling_key)
        if len(found) < len(shuffle.empty_boundaries(plan)):
            raise InputError(
                f"Expected {self.path} to be as the job wrote it. Run the same command "
                "again: it makes the file anew."
            )
        return found

    def load_epochs(self, plan: DpSgdPlan, sampling_key: bytes) -> np.ndarray:
        """Returns the boundaries of the stored epochs; arguments as for ``load``.

        Returns:
          uint64, shape (epochs, steps_per_epoch - 1, 2).  Sensitive.
        """
        if not shuffle.num_epochs_drawn(plan):
            return shuffle.empty_boundaries(plan)
        shape = (-1, plan.steps_per_epoch - 1, 2)
        nothing = np.empty((0, *shape[1:]), _WORD)
        try:
            data = read_bytes(self.path)
        except FileNotFoundError:
            return nothing
        found, seal = memoryview(data)[:-KEY_BYTES], data[-KEY_BYTES:]
        mac = self._mac(sampling_key)
        mac.update(found)
        if not found or not hmac.compare_digest(mac.digest(), seal):
            return nothing
        return np.frombuffer(found, _WORD).reshape(shape)

    def store(self, boundaries: np.ndarray, sampling_key: bytes) -> None:
        """Replaces the file.

        Args:
          boundaries: Boundaries of the first epochs, as ``load_epochs`` returns them.
          sampling_key: Secret, 32 bytes.
        """
        mac = self._mac(sampling_key)
        with new_file(self.path, mode=0o600) as write:
            for epoch in boundaries:  # one at a time bounds the copy
                data = epoch.astype(_WORD, copy=False).tobytes()
                mac.update(data)
                write(data)
            write(mac.digest())

    def _mac(self, sampling_key: bytes) -> hashlib.blake2b:
        key = derive(sampling_key, "boundaries", self.batches_id)
        return hashlib.blake2b(key=key, digest_size=KEY_BYTES)


def complete(
    file: BoundariesFile,
    plan: DpSgdPlan,
    sampling_key: bytes,
    blocks: Sequence[tuple[str, int]],
    *,
    num_threads: int,
) -> None:
    """Searches the boundaries of all epochs that the file does not hold yet.

    Args:
      file: The file, which may be missing.
      plan: Plan of a shuffling sampler.
      sampling_key: Secret, 32 bytes.
      blocks: (name, number of rows) of every block in the data set.
      num_threads: Number of threads that draw ranks.
    """
    found = shuffle.empty_boundaries(plan)
    known = file.load_epochs(plan, sampling_key)
    found[: len(known)] = known
    first_epoch = len(known)
    del known  # so that memory holds only one copy
    epoch_passes = shuffle.num_block_passes(plan, len(blocks)) // len(found)
    _advance(first_epoch * epoch_passes)
    if first_epoch == len(found):
        return
    kept = time.monotonic()
    for epoch, ranks in shuffle.search_epochs(
        plan, sampling_key, blocks, first_epoch=first_epoch,
        num_threads=num_threads, advance=_advance,
    ):  # fmt: skip
        found[epoch] = ranks
        if time.monotonic() - kept >= _SECONDS:
            file.store(found[: epoch + 1], sampling_key)
            kept = time.monotonic()
    file.store(found, sampling_key)


def _advance(passes: int) -> None:
    progress.advance(progress.BOUNDARIES, passes)
