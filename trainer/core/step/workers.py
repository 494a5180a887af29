"""The processes that take each private step together, as one of them sees them.

The core knows a run of one worker; several are ``trainer.claims.worker_group``.
All workers make the same calls in the same order.

Formal guarantees of every implementation:
  - ``sum`` is exact, and returns the same bits to every worker.
  - A worker that is lost, or that another one disagrees with, is an error at all
    others, never a smaller sum.
  - An error within a step that one worker reports to ``settle_step`` is raised at all
    workers.
  - ``settle_step`` accepts a step only if the workers together have its parts 0, 1,
    ..., each once, as many as the plan says.

Public: rank and count.  Sensitive: values, parts and keys.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from accounting.core.validation import InputError

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakenStep:
    """What a worker says of a step that it took.

    Attributes:
      step: Index of the step, from 0.
      parts: Indexes of this worker's parts, in any order.  Sensitive.
      parts_per_step: Number of parts of every step; None if it depends on the data.
      signal_number: Number of a stop signal that this worker received; None for none.
      failure: Error of this worker within the step; None for none.
    """

    step: int
    parts: Sequence[int]
    parts_per_step: int | None
    signal_number: int | None = None
    failure: InputError | None = None


class Workers(abc.ABC):
    """The workers of a run, as one of them sees it.

    Attributes:
      rank: Rank of this worker, from 0.
      count: Number of workers, at least 1.
    """

    rank: int
    count: int

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes, evaluates and reports for all."""
        return self.rank == 0

    @abc.abstractmethod
    def fail(self, status: int = 2) -> None:
        """Makes the end of this process end all workers, with an exit status."""

    @abc.abstractmethod
    def sum(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of all workers' ``values``.  Sensitive.

        Args:
          values: int64 array of the same shape at every worker; may be overwritten.
        """

    @abc.abstractmethod
    def together(self, work: Callable[[], _Result]) -> _Result:
        """Returns ``work()`` when all workers have finished theirs.

        Args:
          work: Work of this worker, which does not communicate.

        Raises:
          InputError: raised by the work of this worker or of another.
        """

    @abc.abstractmethod
    def chiefs(self, value: bytes) -> bytes:
        """Returns the chief's ``value`` at every worker.

        Args:
          value: Value of this worker; only the chief's counts.
        """

    @abc.abstractmethod
    def compare(self, values: Mapping[str, Any]) -> None:
        """Accepts workers with the same values.

        Args:
          values: JSON values by name; each field of an object is compared by itself.

        Raises:
          InputError: names the first value that differs, and the workers.
        """

    @abc.abstractmethod
    def settle_step(self, taken: TakenStep) -> int | None:
        """Accepts a step if the workers together have each of its parts once.

        Returns:
          Number of a stop signal that a worker received; None for none.

        Raises:
          InputError: a worker failed, or a part is missing, or is there twice.
        """


class Alone(Workers):
    """The only worker of a run."""

    rank = 0
    count = 1

    def fail(self, status: int = 2) -> None:
        """Does nothing: there are no others."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Returns its argument."""
        return values

    def together(self, work: Callable[[], _Result]) -> _Result:
        """Returns ``work()``."""
        return work()

    def chiefs(self, value: bytes) -> bytes:
        """Returns its argument."""
        return value

    def compare(self, values: Mapping[str, Any]) -> None:
        """Accepts everything; arguments as for `Workers.compare`."""

    def settle_step(self, taken: TakenStep) -> int | None:
        """Returns the signal; errors as of `Workers.settle_step`."""
        if taken.failure is not None:
            raise taken.failure
        count = taken.parts_per_step or max(1, len(taken.parts))
        if sorted(taken.parts) != [*range(count)]:
            raise InputError(
                f"Expected the batches to have each part of step {taken.step} once; "
                "they do not. Make the batches again, or restore them."
            )
        return taken.signal_number
