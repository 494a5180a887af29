"""How many rows of each user are kept, which ones, and the note that says so.

`draw_priorities` gives each row a priority.  `least_rows` returns a query that keeps
the rows of each user with the least priorities; DuckDB runs it over three numbers of
each row.  `dpsgd prepare` writes a note about the bound (`Bounded`) into the metadata
of its Parquet files, from where the note passes to batches, runs and privacy
statements.

Formal guarantees of the note:
  - The number of slots is the public number that the user gave, not the number of rows,
    which depends on how many rows each user has.
  - No step draws from slots without rows; neighbouring data sets may have rows in them.

Formal guarantees of the choice, for a uniform secret key and up to the PRF assumption
on ChaCha20 and keyed BLAKE2b:
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
are equal.  Each pair of rows of a user has equal priorities with probability 2**-64.

Public: the note.  Sensitive: everything else.

References:
  Charles et al. (2024), arXiv:2407.07737, on bounding contributions of users.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from accounting.core.neighboring_relation import MOST_EXAMPLES_PER_USER
from accounting.core.validation import InputError, check_int, header, read_fields
from pipelines.core.keys import Stream, derive

#: Key of the description of a data set; see ``manifest.DATASET_METADATA_KEY``.
BOUNDED = "bounded"

#: Label of the commitments to the key that chooses rows.
KEY_LABEL = "key of choices"

_HEADER: Any = {"format_name": "dpsgd-bounded", "version": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserBound:
    """How many rows of each user are kept.

    Attributes:
      user_column: Column of the ids: whole numbers or text.
      max_examples_per_user: Maximum number of rows kept per user.
      num_examples: Slots: a public upper bound on the kept rows.

    Raises:
      InputError: a number is below 1, or ``max_examples_per_user`` is larger than any
        proof covers.
    """

    user_column: str
    max_examples_per_user: int
    num_examples: int

    def __post_init__(self) -> None:
        check_int(
            "max_examples_per_user",
            self.max_examples_per_user,
            at_least=1,
            at_most=MOST_EXAMPLES_PER_USER,
            remedy="No epsilon is proven for more rows of a user. Keep fewer.",
        )
        check_int("num_examples", self.num_examples, at_least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded(UserBound):
    """The note about a bound that was applied; the data set no longer holds the ids.

    Attributes:
      key: Commitment to the key that chose rows, then one to key and table.  So the
        notes of two tables differ, which together may hold more rows of a user.
    """

    key: str = ""

    @property
    def unit(self) -> str:
        """The privacy unit, in words."""
        most = self.max_examples_per_user
        rows = "row" if most == 1 else "rows"
        return (
            f"one user, of whom `dpsgd prepare` kept at most {most} {rows}, at random"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict, with ``format`` and ``version``."""
        return {**header(**_HEADER), **dataclasses.asdict(self)}

    @classmethod
    def of(cls, description: dict[str, Any]) -> Bounded | None:
        """Returns the note in a data set's description, or None if it has none.

        Raises:
          InputError: the note has another version, or is damaged.
        """
        if BOUNDED not in description:
            return None
        found = read_fields(
            description[BOUNDED],
            [field.name for field in dataclasses.fields(cls)],
            kind="note about bounded users",
            remedy="Use the release that wrote it, or run `dpsgd prepare` again.",
            **_HEADER,
        )
        try:
            return cls(**found)
        except TypeError:
            raise InputError(
                "Expected a complete note about bounded users. Run `dpsgd prepare` "
                "again."
            ) from None


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
    """Returns the query for the places of the kept rows, in any order.

    Args:
      rows: Table of rows: (user_number, priority, place).
      most: Maximum number of rows kept per user, at least 1.
    """
    return f"""
        select place
        from (
            select place, row_number() over (
                partition by user_number order by priority, place
            ) as ordinal
            from {rows}
        )
        where ordinal <= {int(most)}
    """
