"""What an audit is asked to do: frozen, public, checked before any work."""

from __future__ import annotations

import dataclasses

from accounting import sampler_registry
from accounting.neighboring_relation import MOST_EXAMPLES_PER_USER
from accounting.plan import DpSgdPlan
from accounting.validation import InputError, check_choice, check_float, check_int

MECHANISM = "mechanism"
TRAINER = "trainer"
LEVELS = (MECHANISM, TRAINER)
#: Trials by default: about a minute at most, on a few hundred steps.
TRIALS = {MECHANISM: 20_000, TRAINER: 8192}
_MOST_TRIALS = 10**8
#: More noise does not fit on the grid of integers on which it is added.
LARGEST_NOISE = 2.0**17


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
      max_examples_per_user: k of the claim: examples that a user has at most.
      canary_rows: Examples of the canary user; k if None.  With more it is what the
        claim is worth if nobody bounds users.
      rows_per_record: Rows of an example that is a user; None where examples are rows.
      bounded: Whether `dpsgd bound` is part of the trainer level, as of a run whose
        unit is a user.

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
    max_examples_per_user: int = 1
    canary_rows: int | None = None
    rows_per_record: int | None = None
    bounded: bool = False

    def __post_init__(self) -> None:
        check_choice("level", self.level, LEVELS)
        check_float("confidence", self.confidence, above=0.5, below=1.0)
        check_float("noise_multiplier", self.noise_multiplier, at_most=LARGEST_NOISE)
        check_int("trials", self.num_trials, at_least=100, at_most=_MOST_TRIALS)
        check_int("max_examples_per_user", self.max_examples_per_user, at_least=1)
        most = min(self.plan.num_examples, MOST_EXAMPLES_PER_USER)
        check_int("canary_rows", self.num_canary_rows, at_least=1, at_most=most)
        if self.rows_per_record is not None and self.canary_rows is not None:
            raise InputError(
                f"Expected no canary_rows={self.canary_rows} where an example is a "
                "user: it holds all rows of one. Leave it out."
            )
        self.claimed(self.plan)

    @property
    def num_canary_rows(self) -> int:
        """Examples of the canary."""
        rows = self.canary_rows
        return self.max_examples_per_user if rows is None else rows

    @property
    def is_of_users(self) -> bool:
        """Whether canaries are users, with one row or more."""
        return self.bounded or max(self.max_examples_per_user, self.num_canary_rows) > 1

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
