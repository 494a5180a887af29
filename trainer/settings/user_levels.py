"""Settings of a comparison of ways to sample the data of users."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from accounting.core.validation import InputError, check_choice, check_int
from pipelines.core.users.bounded import SAMPLED, USERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """A way to sample: at most k rows per user, as rows or as users.  All public.

    Attributes:
      sampled: One of ``SAMPLED``: whether a step samples rows or users.
      max_examples_per_user: k.
      num_examples: Slots: a public bound on the number of kept rows or, if users are
        sampled, of users.
      rows_per_step: Expected rows per step if rows are sampled.
    """

    sampled: str
    max_examples_per_user: int
    num_examples: int
    rows_per_step: int

    @property
    def name(self) -> str:
        """Name of its table."""
        return f"{self.sampled}-k{self.max_examples_per_user}"

    @property
    def has_users(self) -> bool:
        """Whether the examples are users."""
        return self.sampled == USERS

    @property
    def examples_per_user(self) -> int:
        """Largest number of examples of a user."""
        return 1 if self.has_users else self.max_examples_per_user


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserLevels:
    """A comparison of sampling rows or users, and of bounds per user.  All public.

    Attributes:
      user_column: Column of the ids of users.
      max_examples_per_user: Compared values of k.
      num_users: Public bound on the number of users.
      num_examples: Public bounds on the number of kept rows, one per k; if empty,
        ``num_users`` times k, or the number of rows of the table if that is less.
      sampled: Compared values of ``SAMPLED``.
    """

    user_column: str
    max_examples_per_user: tuple[int, ...]
    num_users: int
    num_examples: tuple[int, ...] = ()
    sampled: tuple[str, ...] = SAMPLED

    def __post_init__(self) -> None:
        most, slots = self.max_examples_per_user, self.num_examples
        for name in self.sampled:
            check_choice("sampled", name, SAMPLED)
        if not (most and self.sampled):
            raise InputError("Expected rows or users, and numbers of rows; got none.")
        for count in most:
            check_int("max_examples_per_user", count, at_least=1)
        check_int("num_users", self.num_users, at_least=1)
        for number in slots:
            check_int("num_examples", number, at_least=1)
        if slots and len(slots) != len(most):
            raise InputError(
                f"Expected num_examples to be {len(most)} numbers, one for each of "
                f"max_examples_per_user; got {len(slots)}. Give as many, or omit them."
            )

    def levels(self, num_rows: int, rows_per_step: int) -> Iterator[tuple[Level, int]]:
        """Yields every way to sample, with its expected batch size.

        For each k, rows and users have the same sampling probability.

        Args:
          num_rows: Number of rows of the whole table.
          rows_per_step: Expected batch size if rows are sampled.
        """
        for place, most in enumerate(self.max_examples_per_user):
            slots = min(num_rows, self.num_users * most)
            if self.num_examples:
                slots = self.num_examples[place]
            for sampled in self.sampled:
                number = self.num_users if sampled == USERS else slots
                level = Level(
                    sampled=sampled,
                    max_examples_per_user=most,
                    num_examples=number,
                    rows_per_step=rows_per_step,
                )
                yield level, max(1, round(rows_per_step * number / slots))
