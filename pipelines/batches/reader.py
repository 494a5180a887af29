"""Reads the batches of a folder in step order, without Beam and without TensorFlow.

Formal guarantees:
  - Those of ``pipelines.core.batches.reader``: every record is compared with its
    digest, and every step and part is yielded once.

Public: the manifest.  Sensitive: every yielded batch.

Example:

    for batch in read_batches("batches"):
        batch.step, batch.columns["label"], batch.weight
"""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.batches.stored import stored
from pipelines.core.batches.batch_format import PhysicalBatch
from pipelines.core.batches.share import ALL, Share
from pipelines.files.paths import StrPath


def read_batches(
    directory: StrPath, *, first_step: int = 0, share: Share = ALL
) -> Iterator[PhysicalBatch]:
    """Yields every physical batch of steps ``first_step`` and later, in step order.

    Args:
      directory: Folder that ``dpsgd batches`` wrote, local or in a store.
      first_step: First step to read; a resumed run passes its number of finished steps.
      share: The parts of one of several workers, if not all.

    Raises:
      InputError: missing, changed, incomplete or repeated data, or ``first_step`` is
        out of range.
    """
    return stored(directory).batches(first_step=first_step, share=share)
