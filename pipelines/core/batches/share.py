"""Which parts of a step belong to a worker: part p to worker p mod W."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Share:
    """The parts of one worker.

    Attributes:
      rank: Rank of the worker, from 0.
      count: Number of workers.

    Example:
      >>> [part for part in range(7) if Share(rank=1, count=3).has(part)]
      [1, 4]
    """

    rank: int = 0
    count: int = 1

    def has(self, part: int) -> bool:
        """Whether a part of a step belongs to this worker."""
        return part % self.count == self.rank


#: The share of a single worker.
ALL = Share()
