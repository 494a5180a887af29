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

from pipelines.manifest import Manifest
from pipelines.reader import read_records
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


def _parse(record: Any, manifest: Manifest) -> dict[str, Any]:
    """Decodes one record in TensorFlow's own code: no row passes through Python."""
    spec = element_spec(manifest)
    names = [column.name for column in manifest.columns]
    features: dict[str, Any] = {
        name: tf.io.FixedLenFeature((), tf.string) for name in (*names, "weight")
    }
    for name in ("step", "part"):
        features[name] = tf.io.FixedLenFeature((), tf.int64)
    parsed = tf.io.parse_single_example(record, features)

    def decode(name: str, kind: Any) -> Any:
        return tf.reshape(tf.io.decode_raw(parsed[name], kind.dtype), kind.shape)

    return {
        "columns": {name: decode(name, spec["columns"][name]) for name in names},
        "weight": decode("weight", spec["weight"]),
        "step": parsed["step"],
        "part": parsed["part"],
    }


def _options() -> Any:
    options = tf.data.Options()
    # TensorFlow would parallelise the decoding and, told to be deterministic, undo it
    # with an error message on the terminal.
    options.experimental_optimization.map_parallelization = False
    return options


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
        records = tf.data.Dataset.from_generator(
            self._generate, output_signature=tf.TensorSpec((), tf.string)
        )
        # Prefetched twice: reading, decoding and training each have a thread.
        batches = records.prefetch(_PREFETCH).map(
            lambda record: _parse(record, manifest)
        )
        self.dataset = batches.prefetch(_PREFETCH).with_options(_options())

    def _generate(self) -> Iterator[bytes]:
        # tf.data wraps an exception into one of its own, with a stack trace in its
        # text: __iter__ raises the one that was kept here.
        try:
            yield from read_records(self._directory, first_step=self._first_step)
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
