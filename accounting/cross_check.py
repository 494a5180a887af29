"""A second opinion on an epsilon: the plan's ``DpEvent``, and dp_accounting's answer.

No privacy claim depends on it.  `ask` describes the plan's own mechanism as an event,
with its sampling probability rounded up, or refuses the plan.  dp_accounting computes
every privacy loss.  Truncated batches are asked about without their cap, and our bound
on the cost of the cap is added; the accountant's bound is smaller if the cap is tight.

References:
  Chua et al. (2024), arXiv:2411.04205, Theorem 3.3, for the truncation.
"""

from __future__ import annotations

import dataclasses
import functools
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
_SOURCE = f"dp-accounting {metadata.version('dp-accounting')}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondOpinion:
    """What dp_accounting says.

    Attributes:
      source: Name and version of dp_accounting.
      event: The event that it was asked about, in words.
      epsilon: Its epsilon; infinite if it proves nothing.
    """

    source: str
    event: str
    epsilon: float

    def to_text(self) -> str:
        """Returns the opinion as a line of text."""
        found = f"epsilon {self.epsilon:.6g} of {self.event}"
        return f"  cross-check {self.source}: {found}"


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
    event, other = ask(plan, **asked)
    epsilon_of, text = other.compose(event).get_epsilon, str(event)
    if (truncation := sampler_registry.get(plan.sampler).truncation) is not None:
        cost = functools.partial(truncation.delta, plan)
        epsilon_of = functools.partial(epsilon_after_cost, cost, epsilon_of)
        text += f" plus {truncation.formula}"
    return SecondOpinion(source=_SOURCE, event=text, epsilon=float(epsilon_of(delta)))


def ask(
    plan: DpSgdPlan,
    noise_multiplier: float,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
    theorem: Theorem | None = None,
) -> tuple[Any, Any]:
    """Returns the event of a plan without a cap, and an accountant for it.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the question is about a user.
      theorem: The theorem of a method with accounting of its own; None for DP-SGD's.

    Raises:
      InputError: the installed dp_accounting has no event for the plan.
    """
    if theorem is not None:
        raise InputError(
            f"Expected no --cross-check of {theorem.name}: dp_accounting has no event "
            f"for {theorem.name}. Omit --cross-check."
        )
    unit = neighboring_relation, max_examples_per_user
    brought(plan.sampler, *unit)  # refuses what is not accounted for
    truncation = sampler_registry.get(plan.sampler).truncation
    untruncated = plan if truncation is None else truncation.without(plan)
    event, relation = _event(untruncated, noise_multiplier, *unit)
    other: Any = pld.PLDAccountant(
        dp_accounting.NeighboringRelation[relation], _INTERVAL
    )
    if event is None or not other.supports(event):
        raise InputError(
            f"Expected no --cross-check of sampler={plan.sampler!r}, {unit[0]}, "
            f"max_examples_per_user={unit[1]}: {_SOURCE} has no event for it. Omit "
            "--cross-check."
        )
    return event, other


def _event(
    plan: DpSgdPlan, noise_multiplier: float, relation: str, count: int
) -> tuple[Any, str]:
    """Returns the event of a plan or None, and the relation that has its pairs."""
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
