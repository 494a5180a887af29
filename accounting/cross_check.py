"""A second opinion on an epsilon: the plan's ``DpEvent``, and dp_accounting's answer.

No privacy claim depends on it.  Answers differ where theorems do: dp_accounting takes
the number of examples of a truncated step for exact, ours is an upper bound on it.
"""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any

from dp_accounting import pld

from accounting import events
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.numerics.calibration import epsilon_after_cost
from accounting.core.plan import DpSgdPlan
from accounting.core.theorem import Theorem
from accounting.core.validation import InputError

#: Spacing of dp_accounting's grid of privacy losses.
_INTERVAL = 1e-4
#: The same, where a point of the grid is costly.
_SLOW_INTERVAL = 5e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondOpinion:
    """What dp_accounting says.

    Attributes:
      source: Its name and version.
      event: The event that it was asked about, in words.
      epsilon: Its epsilon; infinite if it proves nothing.
    """

    source: str
    event: str
    epsilon: float

    def to_text(self) -> str:
        """Returns the opinion as a line of text."""
        return (
            f"  cross-check {self.source}: epsilon {self.epsilon:.6g} of {self.event}"
        )


def check_theorem(theorem: Theorem | None) -> None:
    """Refuses a method with accounting of its own.

    Raises:
      InputError: dp_accounting has no event for it.
    """
    if theorem is not None:
        raise InputError(
            f"Expected no --cross-check of {theorem.name}: dp_accounting has no event "
            f"for {theorem.name}. Omit --cross-check."
        )


def check_plan(
    plan: DpSgdPlan,
    theorem: Theorem | None,
    neighboring_relation: str,
    max_examples_per_user: int,
) -> None:
    """Refuses, before any work, a plan of which dp_accounting has no event.

    Args:
      plan: How batches are made.
      theorem: The theorem of a method with accounting of its own; None for DP-SGD's.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the privacy unit is a user.

    Raises:
      InputError: it has none.
    """
    check_theorem(theorem)
    events.ask(
        plan,
        noise_multiplier=1.0,
        neighboring_relation=neighboring_relation,
        max_examples_per_user=max_examples_per_user,
    )


def second_opinion(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> SecondOpinion:
    """Returns dp_accounting's epsilon of a plan.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: In (0, 1).
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the privacy unit is a user.

    Raises:
      InputError: dp_accounting has no event for the plan.

    Example:
      >>> plan = DpSgdPlan(sampler="poisson", num_examples=60_000,
      ...                  expected_batch_size=600, num_steps=1000)
      >>> found = second_opinion(plan, noise_multiplier=1.1, delta=1e-5)
      >>> round(found.epsilon, 2)
      1.52
    """
    question = events.ask(
        plan,
        noise_multiplier=noise_multiplier,
        neighboring_relation=neighboring_relation,
        max_examples_per_user=max_examples_per_user,
    )
    spacing = _SLOW_INTERVAL if question.slow else _INTERVAL
    accountant: Any = pld.PLDAccountant(question.relation, spacing)
    return SecondOpinion(
        source=f"dp-accounting {metadata.version('dp-accounting')}",
        event=question.text,
        epsilon=epsilon_of(question, accountant.compose(question.event), delta),
    )


def epsilon_of(question: events.EventQuestion, accountant: Any, delta: float) -> float:
    """Returns the epsilon of a composed accountant, after the cost of truncation.

    Args:
      question: What was composed.
      accountant: dp_accounting's.
      delta: In (0, 1).
    """
    if question.cost is None:
        return float(accountant.get_epsilon(delta))
    return epsilon_after_cost(question.cost, accountant.get_epsilon, delta)
