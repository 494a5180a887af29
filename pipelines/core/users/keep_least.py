"""The rows of each user that are kept: those with the least priorities.

Formal guarantees, for priorities that are independent and uniform (as those of
``draw_priorities`` are, for a uniform secret key, up to the PRF assumption on ChaCha20
and keyed BLAKE2b):
  - at most: no user has more than ``most`` rows left; one with fewer keeps them all.
  - uniform choice: of a user with more, each set of ``most`` rows is equally likely.
  - any order: which rows are kept does not depend on the order of arrival, unless two
    rows of a user share a priority, with probability 2**-64 per pair.
  - in two rounds: keeping the least of each part, and then the least of those, keeps
    the same rows as one round.

Sensitive: everything.

References:
  Map-Reduce's combiner: Dean and Ghemawat (2004), section 4.3.
"""

from __future__ import annotations

import numpy as np

from pipelines.core.keys import derive
from pipelines.core.streams import Stream


def draw_priorities(key: bytes, label: str, num_rows: int) -> np.ndarray:
    """Returns the priorities of the rows of a block, uint64 of shape (rows,).

    Args:
      key: Secret key of the data set, 32 bytes.
      label: Label of the block, unique within the data set.
      num_rows: Number of rows in the block.
    """
    return Stream(derive(key, "rows of users", label)).words(num_rows)


def keep_least(users: np.ndarray, priorities: np.ndarray, most: int) -> np.ndarray:
    """Returns which rows are kept, bool of shape (rows,).

    Args:
      users: User of each row, uint64.
      priorities: Priority of each row, uint64.
      most: Maximum number of rows kept per user, at least 1.
    """
    kept = np.ones(len(users), bool)
    order = np.lexsort((priorities, users))
    sorted_users = users[order]
    # A row is left out if the user of the row ``most`` places before is the same.
    kept[order[most:][sorted_users[most:] == sorted_users[:-most]]] = False
    return kept
