"""The rows of each user that are kept: those with the least priorities.

``draw_priorities`` gives each row a priority; the query ``least_rows`` says which are
kept.  The query is text, which DuckDB runs over three numbers of each row.

Formal guarantees, for a uniform secret key and up to the PRF assumption on ChaCha20 and
keyed BLAKE2b:
  - at most: no user has more than ``most`` rows left; one with fewer keeps them all.
  - uniform choice: of a user with more, each set of ``most`` rows is equally likely,
    and choices of different users are independent.
  - pure function: a priority depends on the key and the place of the row alone.  Which
    rows are kept depends on the users and priorities in order of the places alone: not
    on how rows are cut into files or blocks, on threads, memory, or order of arrival.

*Proof.*  Words of a stream at different places are independent and uniform in
[0, 2**64).  A row is kept if fewer than ``most`` rows of its user precede it in the
order of (priority, place), which is total: places differ.  Of a user with n rows this
keeps min(n, ``most``), the first of a permutation that is uniform if no two priorities
are equal.  Two of a user are with probability 2**-64 per pair.

Sensitive: everything.

References:
  Charles et al. (2024), arXiv:2407.07737, on bounding contributions of users.
"""

from __future__ import annotations

import numpy as np

from pipelines.core.keys import Stream, derive

_BLOCK_WORDS = 8


def draw_priorities(key: bytes, first: int, num_rows: int) -> np.ndarray:
    """Returns the priorities of consecutive rows, uint64 of shape (rows,).

    Args:
      key: Secret key of the rows, 32 bytes: no other table may use it.
      first: Place of the first row in the table.
      num_rows: Number of rows.
    """
    blocks, skipped = divmod(first, _BLOCK_WORDS)
    stream = Stream(derive(key, "rows of users"), first_block=blocks)
    return stream.words(skipped + num_rows)[skipped:]


def least_rows(rows: str, most: int) -> str:
    """Returns the query for the kept rows: (place, is_first), in any order.

    Exactly one kept row of each user is first.

    Args:
      rows: Table of rows: (user_number, priority, place).
      most: Maximum number of rows kept per user, at least 1.
    """
    return f"""
        select place, ordinal = 1 as is_first
        from (
            select place, row_number() over (
                partition by user_number order by priority, place
            ) as ordinal
            from {rows}
        )
        where ordinal <= {int(most)}
    """
