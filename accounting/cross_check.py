"""A second opinion on an epsilon: the plan's ``DpEvent``, and dp_accounting's answer.

No privacy claim depends on it.  Of truncated batches it is asked about the steps
without a cap, whose cost is added: our own bound is smaller where the cap is tight.

Formal guarantees:
  - ``ask`` asks about the plan's own mechanism, with its sampling probability rounded
    up, or refuses the plan.
  - It leaves every privacy loss to dp_accounting.  Only the probability of truncation
    is ours.

References:
  Chua et al. (2024), arXiv:2411.04205, Theorem 3.3, for the truncation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import dp_accounting
from dp_accounting import pld

from accounting.core import sampler_registry
from accounting.core.claim import Theorem
from accounting.core.neighboring_relation import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    REPLACE_SPECIAL,
    brought,
)
from accounting.core.numerics import epsilon_after_cost
from accounting.core.plan import CYCLIC_POISSON, DETERMINISTIC, POISSON, DpSgdPlan
from accounting.core.samplers.poisson import probability
from accounting.core.validation import InputError

#: Spacing of dp_accounting's grid of privacy losses.
_INTERVAL = 1e-4


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
    if theorem is not None:
        raise InputError(
            f"Expected no --cross-check of {theorem.name}: dp_accounting has no event "
            f"for {theorem.name}. Omit --cross-check."
        )
    ask(plan, 1.0, neighboring_relation, max_examples_per_user)


def second_opinion(plan: DpSgdPlan, *, delta: float, **asked: Any) -> SecondOpinion:
    """Returns dp_accounting's epsilon of a plan.

    Args:
      plan: How batches are made.
      delta: In (0, 1).
      **asked: Noise, relation and privacy unit, as for `accountant.epsilon`.

    Raises:
      InputError: dp_accounting has no event for the plan.

    Example:
      >>> plan = DpSgdPlan(sampler="poisson", num_examples=60_000,
      ...                  expected_batch_size=600, num_steps=1000)
      >>> found = second_opinion(plan, noise_multiplier=1.1, delta=1e-5)
      >>> round(found.epsilon, 2)
      1.52
    """
    question = ask(plan, **asked)
    relation = dp_accounting.NeighboringRelation[question.relation]
    accountant: Any = pld.PLDAccountant(relation, _INTERVAL).compose(question.event)
    epsilon_of = accountant.get_epsilon
    if question.cost is not None:
        epsilon_of = functools.partial(
            epsilon_after_cost, question.cost, accountant.get_epsilon
        )
    return SecondOpinion(
        source=_source(),
        event=question.text,
        epsilon=float(epsilon_of(delta)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventQuestion:
    """What dp_accounting is asked about a plan.

    Attributes:
      event: A ``DpEvent``.
      relation: dp_accounting's neighbouring relation with the plan's dominating pairs.
      cost: Epsilon -> what truncation adds to dp_accounting's delta; None for nothing.
      text: The question in words.
    """

    event: Any
    relation: str
    cost: Callable[[float], float] | None
    text: str


def ask(
    plan: DpSgdPlan,
    noise_multiplier: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> EventQuestion:
    """Returns the question to which dp_accounting's answer is the epsilon of a plan.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the question is about a user.

    Raises:
      InputError: the installed dp_accounting has no event for the plan.
    """
    unit = neighboring_relation, max_examples_per_user
    brought(plan.sampler, *unit)  # refuses what is not accounted for
    truncation = sampler_registry.get(plan.sampler).truncation
    cost, formula, untruncated = None, "", plan
    if truncation is not None:
        cost = functools.partial(truncation.delta, plan)
        formula = f" plus {truncation.formula}"
        untruncated = truncation.without(plan)
    event, relation = _event(untruncated, noise_multiplier, *unit)
    asked = pld.PLDAccountant(dp_accounting.NeighboringRelation[relation])
    if event is None or not asked.supports(event):
        raise InputError(
            f"Expected no --cross-check of sampler={plan.sampler!r}, {unit[0]}, "
            f"max_examples_per_user={unit[1]}: {_source()} has no event for it. Omit "
            "--cross-check."
        )
    return EventQuestion(
        event=event, relation=relation, cost=cost, text=f"{event}{formula}"
    )


def _source() -> str:
    return f"dp-accounting {metadata.version('dp-accounting')}"


def _event(
    plan: DpSgdPlan, noise_multiplier: float, relation: str, count: int
) -> tuple[Any, str]:
    """Returns the event of a plan or None, and the relation with its pairs."""
    if plan.sampler == DETERMINISTIC:
        # An example is used once per epoch, by a sum of this sensitivity.
        sensitivity = 2 if relation == REPLACE_ONE else count
        step = dp_accounting.GaussianDpEvent(noise_multiplier / sensitivity)
        whole = dp_accounting.SelfComposedDpEvent(step, plan.num_epochs)
        return whole, ADD_OR_REMOVE_ONE
    other = REPLACE_ONE if relation == REPLACE_ONE else ADD_OR_REMOVE_ONE
    if plan.sampler not in (POISSON, CYCLIC_POISSON) or count > 1:
        return None, other
    step = dp_accounting.PoissonSampledDpEvent(
        probability(plan),  # rounded up
        dp_accounting.GaussianDpEvent(noise_multiplier),
    )
    return dp_accounting.SelfComposedDpEvent(step, plan.num_group_steps), other
