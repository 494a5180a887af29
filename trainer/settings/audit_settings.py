"""What an audit is asked to do: frozen, public, checked before any work."""

from __future__ import annotations

import dataclasses

from accounting import sampler_registry
from accounting.plan import DpSgdPlan
from accounting.validation import InputError, check_choice, check_float, check_int

MECHANISM = "mechanism"
TRAINER = "trainer"
LEVELS = (MECHANISM, TRAINER)
#: Trials by default: about a minute at most, on a few hundred steps.
TRIALS = {MECHANISM: 20_000, TRAINER: 8192}
_MOST_TRIALS = 10**8


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """What is audited, and how.  All public.

    Attributes:
      plan: How the batches are really made.
      noise_multiplier: Of the run; above 0.
      delta: Of the claim, in (0, 1).
      claim: Sampler whose epsilon is claimed; that of ``plan`` if None.
      l2_norm_clip: Of the run; for the trainer level.
      level: One of ``LEVELS``.
      trials: In all; ``TRIALS`` of the level if None.
      confidence: That a true claim is not called violated, in (0.5, 1).

    Raises:
      InputError: name, value, bound, remedy.
    """

    plan: DpSgdPlan
    noise_multiplier: float
    delta: float
    claim: str | None = None
    l2_norm_clip: float = 1.0
    level: str = MECHANISM
    trials: int | None = None
    confidence: float = 0.999

    def __post_init__(self) -> None:
        check_choice("level", self.level, LEVELS)
        check_float("confidence", self.confidence, above=0.5, below=1.0)
        check_int("trials", self.num_trials, at_least=100, at_most=_MOST_TRIALS)
        self.claimed(self.plan)

    @property
    def num_trials(self) -> int:
        """Trials in all."""
        return TRIALS[self.level] if self.trials is None else self.trials

    def claimed(self, plan: DpSgdPlan) -> DpSgdPlan:
        """Returns ``plan`` as it is said to be.

        Raises:
          InputError: the claim is of a sampler that needs a cap, and there is none.
        """
        return claimed_plan(plan, self.claim)


def claimed_plan(plan: DpSgdPlan, claim: str | None) -> DpSgdPlan:
    """Returns a plan as it is said to be.

    Args:
      plan: How batches are really made.
      claim: Sampler that they are said to be of; None if it is that of the plan.

    Raises:
      InputError: the claim is of a sampler that needs a cap, and there is none.
    """
    if claim is None or claim == plan.sampler:
        return plan
    if sampler_registry.rules(claim).truncates:
        raise InputError(
            f"Expected no --claim {claim} for batches that have no cap: take "
            "--claim poisson, whose epsilon is that of a large cap."
        )
    return dataclasses.replace(plan, sampler=claim, truncated_batch_size=None)
