"""Keyed digests by which workers know the data set, and which reveal nothing about it.

Formal guarantees, up to the PRF assumption on keyed BLAKE2b:
  - ``is_listed`` accepts the file of a block only with the footer that was listed,
    which holds the types of the columns and the rows of every row group.
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

#: Another file passes with probability 2**-128.
_TAG_BYTES = 16


@dataclasses.dataclass(frozen=True)
class KnownInput:
    """The digests that are sent to the workers.  Public.

    Attributes:
      input_id: Commitment to the sampling key and the digest of the input.
      tags: Keyed digests: first one that identifies the key; then, for each block,
        that of the footer of its file.
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

    def is_listed(self, data_set_key: bytes, block: Block, footer: str) -> bool:
        """Returns whether the file of a block is the one that was listed.

        Args:
          data_set_key: From ``KnownInput.data_set_key``.
          block: Block of the data set.
          footer: Current ``footer_digest`` of its file.
        """
        start = (1 + block.ordinal) * _TAG_BYTES
        listed = self.tags[start : start + _TAG_BYTES]
        return listed == _footer_tag(data_set_key, block, footer)


def know_input(sampling_key: bytes, dataset: Listing) -> KnownInput:
    """Returns the keyed digests that workers need of a data set.

    Args:
      sampling_key: Secret, 32 bytes.
      dataset: From ``list_blocks`` or ``list_row_groups``.
    """
    input_id = commitment(sampling_key, "input", dataset.digest)
    key = derive(sampling_key, "data set", input_id)
    footers = dataset.footers
    listed = (_footer_tag(key, block, footers[block.name]) for block in dataset.blocks)
    return KnownInput(input_id, b"".join([_tag(key, "key"), *listed]))


def _tag(data_set_key: bytes, *labels: str | int) -> bytes:
    return derive(data_set_key, "tag", *labels)[:_TAG_BYTES]


def _footer_tag(data_set_key: bytes, block: Block, footer: str) -> bytes:
    return _tag(data_set_key, "footer", block.ordinal, footer)
