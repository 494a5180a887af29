"""The processes that take each private step together, and how they communicate.

A step needs two operations: a sum of integers, which does not depend on the order of
its terms, and a gather of bytes.  All workers make the same calls in the same order.

Formal guarantees of every implementation:
  - ``sum`` is exact, and returns the same bits to every worker.
  - ``gather`` returns the value of worker r at index r, to every worker.
  - A lost worker is an error at all others, never a smaller sum.

Public: rank and count.  Sensitive: summed and gathered values.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Workers(Protocol):
    """The workers of a run, as one of them sees it."""

    @property
    def rank(self) -> int:
        """Rank of this worker, from 0; the chief has 0."""

    @property
    def count(self) -> int:
        """Number of workers, at least 1."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of all workers' ``values``.  Sensitive.

        Args:
          values: int64 array of the same shape at every worker; may be overwritten.
        """

    def gather(self, value: bytes) -> list[bytes]:
        """Returns the ``value`` of every worker, by rank.

        Args:
          value: Bytes of any number, which may differ between workers.
        """


class Alone:
    """The only worker of a run."""

    rank = 0
    count = 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Returns its argument."""
        return values

    def gather(self, value: bytes) -> list[bytes]:
        """Returns its argument in a list of one."""
        return [value]
