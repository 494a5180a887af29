"""The processes that take one private step together, and what they exchange.

A step needs two operations of them: a sum of integers, which is the same whatever the
order of its terms, and a gather of bytes.  Every worker calls both in the same order,
once each; all of them get the same answer.

Formal guarantees of every implementation:
  - ``sum`` is exact, and returns the same bits to every worker.
  - ``gather`` returns the value of worker r at place r, to every worker.
  - A worker that is lost is an error everywhere, never a smaller sum.

Public: rank and count.  Sensitive: what is summed, and what is gathered.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Workers(Protocol):
    """The workers of a run, as one of them sees it."""

    @property
    def rank(self) -> int:
        """Of this worker, from 0; the chief's is 0."""

    @property
    def count(self) -> int:
        """Of the workers, at least 1."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of every worker's ``values``.  Sensitive.

        Args:
          values: int64, of the same shape at every worker; may be overwritten.
        """

    def gather(self, value: bytes) -> list[bytes]:
        """Returns the ``value`` of every worker, by rank.

        Args:
          value: Value of any length.
        """


class Alone:
    """One worker, which has nobody to ask."""

    rank = 0
    count = 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Returns its argument."""
        return values

    def gather(self, value: bytes) -> list[bytes]:
        """Returns its argument, as that of all workers."""
        return [value]
