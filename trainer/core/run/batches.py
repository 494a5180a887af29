"""The batches of a folder as tensors, in step order.

Formal guarantees:
  - They are the batches of the manifest and of the record of the run, byte for byte,
    also if the folder was replaced since that was read.
  - Elements are exactly those of ``StoredBatches.batches``, which checks digests, steps
    and parts, and raises InputError; no element is yielded before the digest of its
    record is compared with the checksum.
  - The order is the file order: no shuffle, no repeat, no dropped remainder.

Background threads read, hash and decode while a batch is trained on.

Public: the manifest.  Sensitive: every element.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Iterator
from typing import Any

from accounting.core.validation import InputError
from pipelines.core.batches.batch_format import PhysicalBatch
from pipelines.core.batches.manifest import Manifest, digest_of_seal
from pipelines.core.batches.ranges import ALL, Share
from pipelines.core.batches.stored import StoredBatches
from trainer.core.step.noise import SEEDS
from trainer.core.tf_compat import tf

#: Number of physical batches that are decoded ahead of training.
_PREFETCH = 4

Element = dict[str, Any]


def element_spec(
    manifest: Manifest, seeds: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Returns the ``tf.TensorSpec`` structure of one physical batch.

    Args:
      manifest: Manifest of the batches.
      seeds: Shape of an example's seeds; None for no seeds.
    """
    size = manifest.physical_batch_size
    columns = {
        column.name: tf.TensorSpec((size, *column.shape), column.dtype)
        for column in manifest.columns
    }
    if seeds is not None:
        columns[SEEDS] = tf.TensorSpec((size, *seeds), tf.uint32)
    return {
        "columns": columns,
        "weight": tf.TensorSpec((size,), tf.float32),
        "step": tf.TensorSpec((), tf.int64),
        "part": tf.TensorSpec((), tf.int64),
    }  # fmt: skip


class BatchSource:
    """Iterates over batches as dicts of tensors.

    A batch has ``columns`` (name -> tensor), ``weight`` (1 real, 0 padding), and the
    integers ``step`` and ``part``.  A step is one or more consecutive elements.

    Args:
      stored: The batches.
      manifest: Manifest of the batches.
      first_step: Step to start at.
      share: The parts of one of several workers; a step may then have no element.
      records: ``records_id`` of the batches of the run; empty without a run.

    Raises:
      InputError: while it iterates, as ``StoredBatches.batches``; or the folder holds
        others.
    """

    def __init__(
        self,
        stored: StoredBatches,
        manifest: Manifest,
        *,
        first_step: int = 0,
        share: Share = ALL,
        records: str = "",
    ) -> None:
        self._stored = stored
        self._manifest = manifest
        self._first_step = first_step
        self._share = share
        self._records = records

    def __iter__(self) -> Iterator[Element]:
        # tf.data would copy each record to TensorFlow and parse it again, which costs
        # more than all of this.
        return _ahead(map(_element, self._batches()))

    def _batches(self) -> Iterator[PhysicalBatch]:
        stored = self._stored
        manifest, checksums = stored.manifest(), stored.checksums()
        records = digest_of_seal(checksums.seal.hex())
        is_other = manifest.batches_id != self._manifest.batches_id
        if is_other or self._records not in ("", records):
            raise InputError(
                f"Expected {stored.place} to hold the batches that the run was "
                "checked with; there are others now. Restore them, or begin a new run "
                "in another folder."
            )
        # These, and not those that are there a moment later.
        return stored.batches(
            manifest, checksums, first_step=self._first_step, share=self._share
        )


def _element(batch: PhysicalBatch) -> Element:
    return {
        "columns": {name: tf.constant(value) for name, value in batch.columns.items()},
        "weight": tf.constant(batch.weight),
        "step": batch.step,
        "part": batch.part,
    }


def _ahead(elements: Iterator[Element]) -> Iterator[Element]:
    """Yields the elements, prefetched by a thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = collections.deque(
            pool.submit(next, elements, None) for _ in range(_PREFETCH)
        )
        while (element := waiting.popleft().result()) is not None:
            waiting.append(pool.submit(next, elements, None))
            yield element
