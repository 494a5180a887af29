"""Settings of a batch job: frozen, public, checked before any work."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from accounting.core import sampler_registry
from accounting.core.plan import CYCLIC, TRUNCATED_POISSON, DpSgdPlan, steps_and_epochs
from accounting.core.validation import InputError, check_float

if TYPE_CHECKING:
    from accounting.bands import Bands

#: For ``processes.call``: makes batches of (source, folder, settings).
MAKE_BATCHES = "pipelines.job.quiet_batches:make_batches"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How to sample a data set, and how to lay batches out.  All public.

    Attributes:
      expected_batch_size: Expected number of examples per step, at least 1.
      sampler: Name of a sampler, such as one of ``accounting.core.plan.SAMPLERS``.
      num_epochs: Rounds of n/b steps; None if ``num_steps`` is given.
      num_steps: Number of steps; None if ``num_epochs`` is given.
      truncated_batch_size: Cap on the examples of a truncated step; None for the
        smallest cap that costs no epsilon.
      bands: Groups of the examples of a cyclic sampler, which it makes of Poisson
        sampling; 1 or None for no groups.
      epsilon: Largest epsilon that the batches are meant for, which sets that cap.
      delta: Smallest delta, which sets that cap; 0.1 / examples if None.
      physical_batch_size: Rows per record; None for one record per step, or the fewest
        equal ones of at most 8,192 rows and 64 MiB.

    Raises:
      InputError: an epsilon that is not positive, or a cap without truncation.
    """

    expected_batch_size: int
    sampler: str = TRUNCATED_POISSON
    num_epochs: int | None = None
    num_steps: int | None = None
    truncated_batch_size: int | None = None
    bands: int | None = None
    epsilon: float = 8.0
    delta: float | None = None
    physical_batch_size: int | None = None

    def __post_init__(self) -> None:
        check_float("epsilon", self.epsilon, above=0)
        given = self.truncated_batch_size
        if given is not None and not self._truncates:
            raise InputError(
                f"Expected --truncated-batch-size={given} with a sampler that "
                f"truncates, such as {TRUNCATED_POISSON}; sampler is {self.sampler}."
            )
        if self.bands == 1 and not sampler_registry.rules(self.sampler).cyclic:
            object.__setattr__(self, "bands", None)  # frozen
        if self.bands is None:
            return
        object.__setattr__(self, "sampler", CYCLIC.get(self.sampler, self.sampler))
        if not sampler_registry.rules(self.sampler).cyclic:
            raise InputError(
                f"Expected --bands={self.bands} with {' or '.join(CYCLIC)}; sampler is "
                f"{self.sampler}. Leave it out."
            )

    @property
    def _truncates(self) -> bool:
        return sampler_registry.rules(self.sampler).truncates

    def with_best_bands(
        self, num_examples: int, *, epsilon: float, **others: Any
    ) -> tuple[BatchSettings, Bands]:
        """Returns settings with the number of bands by the rule, and what it gains.

        Args:
          num_examples: Slots of the data set.
          epsilon: Epsilon of the run.
          **others: As of `bands.best_bands`.
        """
        from accounting.bands import best_bands

        found = best_bands(**self._sizes(num_examples), epsilon=epsilon, **others)
        return dataclasses.replace(self, bands=found.bands), found

    def _sizes(self, num_examples: int) -> dict[str, Any]:
        """Returns what bands and cap are chosen for, beside epsilon."""
        num_steps, _ = self._steps_and_epochs(num_examples)
        return {
            "num_examples": num_examples,
            "expected_batch_size": self.expected_batch_size,
            "num_steps": num_steps,
            "delta": 0.1 / num_examples if self.delta is None else self.delta,
        }

    def _steps_and_epochs(self, num_examples: int) -> tuple[int, int]:
        return steps_and_epochs(
            num_examples,
            self.expected_batch_size,
            epochs=self.num_epochs,
            num_steps=self.num_steps,
        )

    def plan(self, num_examples: int) -> DpSgdPlan:
        """Returns the plan for a data set of ``num_examples`` slots.

        Example:
          >>> BatchSettings(expected_batch_size=20, sampler="poisson", num_epochs=3,
          ...               ).plan(400).num_steps
          60

        Raises:
          InputError: both or neither of steps and epochs, or an impossible plan.
        """
        num_steps, num_epochs = self._steps_and_epochs(num_examples)
        cap = self.truncated_batch_size
        if cap is None and self._truncates:
            from accounting.core.accountant import smallest_truncated_batch_size

            cap = smallest_truncated_batch_size(
                **self._sizes(num_examples),
                epsilon=self.epsilon,
                sampler=self.sampler,
                bands=self.bands,
            )
        return DpSgdPlan(
            sampler=self.sampler,
            num_examples=num_examples,
            expected_batch_size=self.expected_batch_size,
            num_steps=num_steps,
            num_epochs=num_epochs,
            truncated_batch_size=cap,
            bands=self.bands,
        )
