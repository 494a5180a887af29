"""Synthetic clicks of synthetic users, as prepared Parquet with a column of ids.

Criteo's text has no column for ids.  So rows are written as `dpsgd prepare` makes them
from the text, with one more column: ``USER``.

The m users have ranks, and the one of rank r has about ``mean * (m / r)**(2/3) / 3``
rows: a heavy tail, of index 1.5.  All rows of a user share some categories and a taste,
a term of the log-odds of a click that no column reveals.  A second row of a user is
therefore less informative than a row of another user.  All seeds share one
distribution, with different users.

Formal guarantees:
  - Row i is a function of (seed, number of users, i) alone, for one version of NumPy.
  - The number of users is public: ``rows / rows_per_user``; some have no row.
  - Memory does not depend on the number of rows or of users.
  - ``out`` appears complete or not at all.

Everything here is public, as in ``tables.synthetic``.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from accounting.core.validation import check_float
from pipelines.core.keys import derive
from pipelines.core.users.hashing import GOLDEN, mix
from pipelines.files.key_files import insecure_key
from pipelines.tables.synthetic import (
    BLOCK_ROWS,
    COLUMNS,
    TEXT,
    InCommon,
    Progress,
    SynthOptions,
    synth_generator,
    synthetic_rows,
    write_part,
)

#: Column of the ids.
USER = "user"
#: Categories that all rows of a user share.
_PROFILE = (1, 5, 13, 16, 22)
#: Scale of the logistic distribution of tastes: standard deviation 0.9 in the log-odds.
_TASTE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthUserOptions(SynthOptions):
    """What to write.  All fields are public.

    Attributes:
      rows_per_user: Mean number of rows of a user, at least 1.

    Raises:
      InputError: a value out of bounds.
    """

    rows_per_user: float

    def __post_init__(self) -> None:
        SynthOptions.__post_init__(self)
        check_float("--rows-per-user", self.rows_per_user, at_least=1)

    @property
    def num_users(self) -> int:
        """Number of users, with or without rows."""
        return max(1, round(self.num_rows / self.rows_per_user))


class Users:
    """Users of rows, and what the rows of one user share.

    Args:
      seed: Seed of the users.
      num_users: Number of users.
    """

    def __init__(self, *, seed: int, num_users: int) -> None:
        self._seed, self._num_users = seed, num_users

    def of_block(self, number: int) -> np.ndarray:
        """Returns the users of a block, int64 in [0, num_users), the busiest first."""
        uniform = synth_generator("users", number, seed=self._seed).random(BLOCK_ROWS)
        # The share of users up to rank r in all rows is (r / num_users)**(1/3).
        users = (uniform * uniform * uniform * self._num_users).astype(np.int64)
        return np.minimum(users, self._num_users - 1)

    def in_common(self, number: int) -> InCommon:
        """Returns what the rows of a block share with other rows of their users."""
        users = self.of_block(number)
        uniform = {each: self._uniform(users, each) for each in _PROFILE}
        taste = self._uniform(users, "taste")
        return InCommon(
            uniform=uniform, log_odds=_TASTE * (np.log(taste) - np.log1p(-taste))
        )

    def _uniform(self, users: np.ndarray, label: str | int) -> np.ndarray:
        """Returns a number in (0, 1) for each user."""
        key = derive(insecure_key(self._seed), "synth", "user", label)
        salt = np.frombuffer(key[:8], "<u8")[0]
        words = mix(mix(users.astype(np.uint64) * np.uint64(GOLDEN) ^ salt))
        return ((words >> np.uint64(12)) + 0.5) / 2.0**52


def write_synth_users(
    out: str | os.PathLike[str],
    options: SynthUserOptions,
    *,
    on_progress: Progress = lambda *_: None,
) -> pathlib.Path:
    """Writes ``out/part-00000.tsv``, with a header, and returns its path.

    Arguments as for ``write_synth``.
    """
    users = Users(seed=options.seed, num_users=options.num_users)

    def write(path: pathlib.Path) -> Iterator[int]:
        rows = synthetic_rows(
            options.num_rows, seed=options.seed, in_common=users.in_common
        )
        with open(path, "wb") as file:
            file.write(("\t".join((*COLUMNS, USER)) + "\n").encode())
            for number, table in enumerate(rows):
                ids = pa.array(users.of_block(number)[: len(table)])
                pa_csv.write_csv(table.append_column(USER, ids), file, TEXT)
                yield len(table)

    return write_part(out, options, "part-00000.tsv", write, on_progress)
