"""Ids of users as 64-bit numbers, by a keyed hash that is the same on every engine.

Formal guarantees, for the texts that ``pipelines.tables.cells.ids`` makes of ids:
  - equal texts have equal numbers, in whatever file or block they come.
  - a user shares a number with one of m others with probability of nearly m * 2**-64,
    over the secret key.  The two then count as one user: fewer of their rows are kept,
    and what hides one hides them as a pair.

Sensitive: ids, and the numbers, which reveal who has many rows.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipelines.core.keys import derive
from pipelines.core.users.hashing import AFTER, hash_fields, mix, words_of


def hash_ids(texts: pa.LargeStringArray, key: bytes) -> np.ndarray:
    """Returns the number of each row's user, uint64 of shape (rows,).

    Args:
      texts: One text for each id, without nulls.
      key: Secret, 32 bytes.
    """
    first, second = np.frombuffer(derive(key, "user ids", "text")[:16], "<u8")
    _, offsets, data = texts.buffers()
    edges = np.frombuffer(offsets, np.int64)[texts.offset :][: len(texts) + 1]
    text = b"" if data is None else data[: int(edges[-1])].to_pybytes()
    hashes = hash_fields(words_of(text + AFTER), edges[:-1], edges[1:], first)
    return mix(hashes ^ second)
