"""Settings of an audit."""

from __future__ import annotations

import dataclasses

from accounting.core import sampler_registry
from accounting.core.neighboring_relation import MOST_EXAMPLES_PER_USER, REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_float, check_int
from trainer.settings.setting import check_declared, setting

#: Default number of trials: about a minute at most, for a few hundred steps.
TRIALS = 20_000
_MOST_TRIALS = 10**8
#: More noise does not fit the integer grid on which it is added.
LARGEST_NOISE = 2.0**17


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """An audit.  All public.

    Attributes:
      plan: Plan by which the batches are really made.
      noise_multiplier: Noise multiplier of the run, above 0.
      delta: Delta of the claim, in (0, 1).
      claim: Test the epsilon of this sampler at the same noise.  [default: that of the
        audited sampler]
      trials: Number of trials.  [default: 20,000]
      confidence: Probability that a true claim is not called violated.
      max_examples_per_user: k of the claim: largest number of examples of a user.
      neighboring_relation: Relation of the claim, where the claimed sampler is that of
        ``plan``; another one is accounted for under zero-out.
      canary_rows: Examples of the canary user.  With more than the claim allows, the
        audit shows what happens if users are not bounded.  [default: as many as it
        allows]
      rows_per_record: Rows per user if examples are users; None if they are rows.
      bounded: Whether the privacy unit is a user, also one with a single row.
    """

    plan: DpSgdPlan
    noise_multiplier: float
    delta: float
    claim: str | None = setting(None, choices=sampler_registry.names)
    trials: int | None = setting(None, at_least=100, at_most=_MOST_TRIALS)
    confidence: float = setting(0.999, above=0.5, below=1.0)
    max_examples_per_user: int = 1
    neighboring_relation: str = REPLACE_SPECIAL
    canary_rows: int | None = setting(None)
    rows_per_record: int | None = None
    bounded: bool = False

    def __post_init__(self) -> None:
        check_declared(self)
        check_float("noise_multiplier", self.noise_multiplier, at_most=LARGEST_NOISE)
        check_int("max_examples_per_user", self.max_examples_per_user, at_least=1)
        most = min(self.plan.num_examples, MOST_EXAMPLES_PER_USER)
        check_int("canary_rows", self.num_canary_rows, at_least=1, at_most=most)
        if self.rows_per_record is not None and self.canary_rows is not None:
            raise InputError(
                f"canary_rows={self.canary_rows} does not apply where an example is a "
                "user, with all rows of one. Omit it."
            )
        claimed_plan(self.plan, self.claim)  # refuses a claim without its cap

    @property
    def num_canary_rows(self) -> int:
        """Number of examples of the canary."""
        rows = self.canary_rows
        return self.max_examples_per_user if rows is None else rows

    @property
    def is_of_users(self) -> bool:
        """Whether canaries are users, with one row or more."""
        return self.bounded or max(self.max_examples_per_user, self.num_canary_rows) > 1

    @property
    def num_trials(self) -> int:
        """Number of all trials."""
        return TRIALS if self.trials is None else self.trials

    @property
    def claimed(self) -> DpSgdPlan:
        """The plan with the claimed sampler; raises as `claimed_plan`."""
        return claimed_plan(self.plan, self.claim)


def claimed_plan(plan: DpSgdPlan, claim: str | None) -> DpSgdPlan:
    """Returns the plan whose epsilon is claimed.

    Args:
      plan: Plan by which the batches are really made.
      claim: Claimed sampler; None for that of the plan.

    Raises:
      InputError: the claimed sampler needs a cap.
    """
    if claim is None or claim == plan.sampler:
        return plan
    if sampler_registry.rules(claim).truncates:
        raise InputError(
            f"--claim {claim} needs a cap, and these batches have none. Take --claim "
            "poisson, whose epsilon is that of a large cap."
        )
    return dataclasses.replace(plan, sampler=claim, truncated_batch_size=None)
