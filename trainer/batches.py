"""The batches of a folder as a ``tf.data`` pipeline, in step order.

Formal guarantees:
  - The dataset yields exactly what ``pipelines.reader.read_batches`` yields, which
    checks digests, steps and parts as they pass; what it refuses raises its InputError.
  - The order is the file order: no shuffle, no repeat, no dropped remainder.

Public: the manifest.  Sensitive: every element.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from pipelines.batch_format import PhysicalBatch
from pipelines.manifest import Manifest
from pipelines.reader import read_batches
from trainer.tf_privacy import tf

#: Physical batches that are read while one is trained on.
_PREFETCH = 4


def element_spec(manifest: Manifest) -> dict[str, Any]:
    """Returns the ``tf.TensorSpec`` structure of one physical batch."""
    size = manifest.physical_batch_size
    return {
        "columns": {
            column.name: tf.TensorSpec((size, *column.shape), column.dtype)
            for column in manifest.columns
        },
        "weight": tf.TensorSpec((size,), tf.float32),
        "step": tf.TensorSpec((), tf.int64),
        "part": tf.TensorSpec((), tf.int64),
    }  # fmt: skip


def _element(batch: PhysicalBatch) -> dict[str, Any]:
    return {
        "columns": dict(batch.columns),
        "weight": batch.weight,
        "step": batch.step,
        "part": batch.part,
    }


class BatchSource:
    """Iterates over the elements of ``dataset``, with errors a user can read.

    Elements are dicts: ``columns`` (name -> tensor), ``weight`` (1 real, 0 padding),
    ``step`` and ``part``.  A step is one element or more, in a row.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        manifest: Manifest,
        *,
        first_step: int = 0,
    ) -> None:
        self._directory = directory
        self._first_step = first_step
        self._error: Exception | None = None
        self.dataset = tf.data.Dataset.from_generator(
            self._generate, output_signature=element_spec(manifest)
        ).prefetch(_PREFETCH)

    def _generate(self) -> Iterator[dict[str, Any]]:
        # tf.data wraps an exception into one of its own, with a stack trace in its
        # text: __iter__ raises the one that was kept here.
        try:
            for batch in read_batches(self._directory, first_step=self._first_step):
                yield _element(batch)
        except Exception as error:
            self._error = error
            raise

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self.dataset
        except tf.errors.OpError:
            if self._error is None:
                raise
            raise self._error from None
