"""Keyed digests by which workers know the data set, and which reveal nothing about it.

Formal guarantees, up to the PRF assumption on keyed BLAKE2b:
  - ``check_block`` accepts a block only if every field (place, name and rows) equals
    that of the data set's block with the same ordinal; ``is_listed`` accepts its file
    only with the same footer, which holds the types of the columns.
  - Every digest of the input that is sent to workers is keyed.
  - One sampling key gives independent choices for two inputs that differ in the names,
    the rows or the footers of their files: choices derive from ``data_set_key``.
    Footers hold types, sizes and, unless the writer omitted them, statistics, but no
    rows: inputs with equal names and footers count as the same.
  - A worker that reads another key than the job's is refused.

Public: everything here except the keys.
"""

from __future__ import annotations

import dataclasses

from accounting.core.validation import InputError
from pipelines.core.keys import commitment, derive
from pipelines.inputs.parquet_blocks import Block, Listing

#: A block of another data set passes with probability 2**-128.
_TAG_BYTES = 16


@dataclasses.dataclass(frozen=True)
class KnownInput:
    """The digests that are sent to the workers.  Public.

    Attributes:
      input_id: Commitment to the sampling key and the digest of the input.
      tags: Keyed digests: first one that identifies the key; then, for each block,
        that of the block and that of the footer of its file.
    """

    input_id: str
    tags: bytes = dataclasses.field(repr=False)

    def data_set_key(self, sampling_key: bytes) -> bytes:
        """Returns the key from which all choices for this data set derive.  Secret.

        Raises:
          InputError: the sampling key is not that of the job.
        """
        key = derive(sampling_key, "data set", self.input_id)
        if self.tags[:_TAG_BYTES] != _tag(key, "key"):
            raise InputError(
                "Expected the key file of this worker to hold the key of this job. "
                "Let every worker read the same file, then run the job again."
            )
        return key

    def check_block(self, data_set_key: bytes, block: object) -> None:
        """Refuses an element that is not a block of the data set.

        Args:
          data_set_key: From ``KnownInput.data_set_key``.
          block: Element that a worker received.

        Raises:
          InputError: it is not a block, or one of another data set.
        """
        if not isinstance(block, Block):
            raise not_a_block(block)
        if self._tag_of(block, 0) != _block_tag(data_set_key, block):
            raise InputError(
                f"Expected block {block.label} to be one of the given data set: its "
                "place, name, rows or columns differ. Write "
                "`beam.Create(dataset.blocks)` with that data set alone."
            )

    def is_listed(self, data_set_key: bytes, block: Block, footer: str) -> bool:
        """Returns whether the file of a block is the one that was listed.

        Args:
          data_set_key: From ``KnownInput.data_set_key``.
          block: Block that ``check_block`` accepted.
          footer: Current ``footer_digest`` of its file.
        """
        return self._tag_of(block, 1) == _footer_tag(data_set_key, block, footer)

    def _tag_of(self, block: Block, which: int) -> bytes:
        start = (1 + 2 * block.ordinal + which) * _TAG_BYTES
        return self.tags[start : start + _TAG_BYTES] if block.ordinal >= 0 else b""


def know_input(sampling_key: bytes, dataset: Listing) -> KnownInput:
    """Returns the keyed digests that workers need of a data set.

    Args:
      sampling_key: Secret, 32 bytes.
      dataset: From ``list_blocks`` or ``list_row_groups``.
    """
    input_id = commitment(sampling_key, "input", dataset.digest)
    key = derive(sampling_key, "data set", input_id)
    tags = [_tag(key, "key")]
    for block in dataset.blocks:
        tags.append(_block_tag(key, block))
        tags.append(_footer_tag(key, block, dataset.footers[block.name]))
    return KnownInput(input_id, b"".join(tags))


def not_a_block(element: object) -> InputError:
    """Returns the error for an element that is not a block."""
    return InputError(
        f"Expected a block in place of a {type(element).__name__}. Write "
        "`pipeline | beam.Create(dataset.blocks) | PoissonBatches(...)`, which reads "
        "the rows itself."
    )


def _tag(data_set_key: bytes, *labels: str | int) -> bytes:
    return derive(data_set_key, "tag", *labels)[:_TAG_BYTES]


def _block_tag(data_set_key: bytes, block: Block) -> bytes:
    return _tag(data_set_key, "block", *dataclasses.astuple(block))


def _footer_tag(data_set_key: bytes, block: Block, footer: str) -> bytes:
    return _tag(data_set_key, "footer", block.ordinal, footer)
