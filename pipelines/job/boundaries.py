"""The boundaries of a shuffle on disk: searched once, authenticated, resumed.

A search draws every rank of every epoch twice, which takes hours for billions of rows.
Its result stays in the job's private folder until the batches are written.

Formal guarantees:
  - The boundaries that are read are those that were found, bit for bit, for the same
    sampling key, plan, layout and data set.  Any other file (cut short, edited, of
    another job) is not used.
  - A search whose result is stored is not done again.
  - Memory stays within ``search_bytes`` plus twice ``boundaries_bytes`` of ``shuffle``.

Public: the file's path, and ``batches_id``.  Sensitive: its contents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Sequence

import numpy as np

from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from pipelines.core.keys import KEY_BYTES, derive
from pipelines.files.storage import new_file, read_bytes
from pipelines.job import progress
from pipelines.sampling import shuffle

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
        if not shuffle.num_epochs_drawn(plan):
            return shuffle.empty_boundaries(plan)
        found = self.stored(plan, sampling_key)
        if found is None:
            raise InputError(
                f"Expected {self.path} to be as the job wrote it. Run the same command "
                "again: it makes the file anew."
            )
        return found

    def stored(self, plan: DpSgdPlan, sampling_key: bytes) -> np.ndarray | None:
        """Returns what ``store`` wrote, or None; arguments as for ``load``."""
        try:
            data = read_bytes(self.path)
        except FileNotFoundError:
            return None
        found, seal = memoryview(data)[:-KEY_BYTES], data[-KEY_BYTES:]
        mac = self._mac(sampling_key)
        mac.update(found)
        if not hmac.compare_digest(mac.digest(), seal):
            return None
        return np.frombuffer(found, _WORD).reshape(-1, plan.steps_per_epoch - 1, 2)

    def store(self, boundaries: np.ndarray, sampling_key: bytes) -> None:
        """Replaces the file.

        Args:
          boundaries: From `shuffle.find_boundaries`.  Sensitive.
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
    """Searches the boundaries, unless the file holds them.

    Args:
      file: The file, which may be missing.
      plan: Plan of a shuffling sampler.
      sampling_key: Secret, 32 bytes.
      blocks: (name, number of rows) of every block in the data set.
      num_threads: Number of threads that draw ranks.
    """
    if not shuffle.num_epochs_drawn(plan):
        return
    if file.stored(plan, sampling_key) is not None:
        _advance(shuffle.num_block_passes(plan, len(blocks)))
        return
    found = shuffle.find_boundaries(
        plan, sampling_key, blocks, num_threads=num_threads, advance=_advance
    )
    file.store(found, sampling_key)


def _advance(passes: int) -> None:
    progress.advance(progress.BOUNDARIES, passes)
