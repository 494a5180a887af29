"""A second opinion on an epsilon: the plan's ``DpEvent``, and dp_accounting's answer.

No privacy claim depends on it.  Answers differ where theorems do: dp_accounting takes
the number of examples of a truncated step for exact, ours is an upper bound on it.

Formal guarantees:
  - ``ask`` asks about the plan's own mechanism, with its sampling probability rounded
    up, or refuses the plan.
  - It leaves every privacy loss to dp_accounting.  Only the probability of truncation
    is ours, where the installed dp_accounting has no truncated event.

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
from accounting.core.plan import (
    CYCLIC_POISSON,
    DETERMINISTIC,
    POISSON,
    TRUNCATED_POISSON,
    DpSgdPlan,
)
from accounting.core.pld import dominating_pairs
from accounting.core.samplers.composed_steps import probability
from accounting.core.samplers.cyclic_poisson import steps_of_an_example
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
    ask(
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
    question = ask(
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


def epsilon_of(question: EventQuestion, accountant: Any, delta: float) -> float:
    """Returns the epsilon of a composed accountant, after the cost of truncation.

    Args:
      question: What was composed.
      accountant: dp_accounting's.
      delta: In (0, 1).
    """
    if question.cost is None:
        return float(accountant.get_epsilon(delta))
    return epsilon_after_cost(question.cost, accountant.get_epsilon, delta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """dp_accounting's description of a plan.

    Attributes:
      build: (plan, noise multiplier) -> the ``DpEvent`` of the run; None if the
        installed release has none.
      relation: dp_accounting's neighbouring relation with the plan's dominating pairs.
      tight: Whether neighbouring data sets attain the pairs, so that no smaller epsilon
        holds.
    """

    build: Callable[[DpSgdPlan, float], Any]
    relation: str
    tight: bool = True


#: (relation, k) -> the event of a sampler that is accounted for under them; None if
#: dp_accounting has none.
EventOf = Callable[[str, int], Event | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventQuestion:
    """What dp_accounting is asked about a plan.

    Attributes:
      event: A ``DpEvent``.
      relation: dp_accounting's neighbouring relation with the plan's dominating pairs.
      cost: Epsilon -> what truncation adds to dp_accounting's delta; None for nothing.
      formula: ``cost`` in symbols.
      tight: Whether dp_accounting's answers on finer grids converge to the truth.
      slow: Whether each point of dp_accounting's grid is costly to compute.
    """

    event: Any
    relation: Any
    cost: Callable[[float], float] | None
    tight: bool
    slow: bool = False
    formula: str = ""

    @property
    def text(self) -> str:
        """The question in words."""
        return str(self.event) + (f" plus {self.formula}" if self.formula else "")


def ask(
    plan: DpSgdPlan,
    *,
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
      InputError: no release of dp_accounting, or not the installed one, has an event
        for the plan.
    """
    asked = neighboring_relation, max_examples_per_user
    truncation = sampler_registry.get(plan.sampler).truncation
    brought(plan.sampler, *asked)  # refuses what is not accounted for
    event = _event(plan.sampler, *asked)
    found = _question(event, plan, noise_multiplier)
    if found is None and truncation is not None:
        untruncated = truncation.without(plan)
        event = _event(untruncated.sampler, *asked)
        found = _question(event, untruncated, noise_multiplier)
        cost = functools.partial(truncation.delta, plan)
        found = found and dataclasses.replace(
            found, cost=cost, formula=truncation.formula, tight=False
        )
    if found is not None:
        return dataclasses.replace(found, slow=max_examples_per_user > 1)
    raise InputError(_no_event(plan) if event is None else _not_installed(plan))


def _question(
    event: Event | None, plan: DpSgdPlan, noise_multiplier: float
) -> EventQuestion | None:
    """Returns a question; None if the installed dp_accounting cannot answer it."""
    if event is None:
        return None
    built = event.build(plan, noise_multiplier)
    relation = dp_accounting.NeighboringRelation[event.relation]
    if built is None or not pld.PLDAccountant(relation).supports(built):
        return None
    return EventQuestion(
        event=built,
        relation=relation,
        cost=None,
        tight=event.tight,
    )


def _no_event(plan: DpSgdPlan) -> str:
    return (
        f"Expected no --cross-check of sampler={plan.sampler!r}: dp_accounting has no "
        "event for it. Omit --cross-check."
    )


def _not_installed(plan: DpSgdPlan) -> str:
    return (
        f"Expected the installed dp-accounting {metadata.version('dp-accounting')} to "
        f"have an event for sampler={plan.sampler!r} with this relation and unit. "
        "Install dp-accounting==0.6.0 beside dpsgd in an environment without "
        "TensorFlow, or omit --cross-check."
    )


def _event(sampler: str, relation: str, count: int) -> Event | None:
    found = _EVENTS.get(sampler)
    return found and found(relation, count)


def _deterministic(relation: str, count: int) -> Event:
    """An example is used once per epoch, by a sum of this sensitivity."""
    sensitivity = 2 if relation == REPLACE_ONE else count

    def build(plan: DpSgdPlan, noise_multiplier: float) -> Any:
        one = dp_accounting.GaussianDpEvent(noise_multiplier / sensitivity)
        return dp_accounting.SelfComposedDpEvent(one, plan.num_epochs)

    return Event(build=build, relation=ADD_OR_REMOVE_ONE)


def _poisson(relation: str, count: int) -> Event:
    def build(plan: DpSgdPlan, noise_multiplier: float) -> Any:
        rate = probability(plan)  # rounded up
        one = dp_accounting.PoissonSampledDpEvent(
            rate, dp_accounting.GaussianDpEvent(noise_multiplier)
        )
        if count > 1:
            mixture = getattr(dp_accounting.dp_event, "MixtureOfGaussiansDpEvent", None)
            if mixture is None:
                return None
            rows = tuple(map(float, range(count + 1)))
            one = mixture(noise_multiplier, rows, dominating_pairs.weights(count, rate))
        return dp_accounting.SelfComposedDpEvent(one, plan.num_steps)

    other = REPLACE_ONE if relation == REPLACE_ONE else ADD_OR_REMOVE_ONE
    return Event(build=build, relation=other)


def _truncated(relation: str, count: int) -> Event | None:
    def build(plan: DpSgdPlan, noise_multiplier: float) -> Any:
        step = getattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent", None)
        if step is None:
            return None
        one = step(
            plan.num_examples,
            probability(plan),
            plan.truncated_batch_size,
            noise_multiplier,
        )
        return dp_accounting.SelfComposedDpEvent(one, plan.num_steps)

    return Event(build=build, relation=relation, tight=False) if count == 1 else None


def _cyclic(relation: str, count: int) -> Event:
    """An example is in steps of its group alone, as of Poisson sampling."""
    of_group = _poisson(relation, count)

    def build(plan: DpSgdPlan, noise_multiplier: float) -> Any:
        return of_group.build(steps_of_an_example(plan), noise_multiplier)

    return dataclasses.replace(of_group, build=build)


_EVENTS: dict[str, EventOf] = {
    CYCLIC_POISSON: _cyclic,
    DETERMINISTIC: _deterministic,
    POISSON: _poisson,
    TRUNCATED_POISSON: _truncated,
}


def register(sampler: str, event_of: EventOf) -> None:
    """Registers, in this process, the events of a sampler.

    Args:
      sampler: As registered with `accounting.core.sampler_registry`.
      event_of: (relation, k) -> the event; None if there is none.
    """
    _EVENTS[sampler] = event_of
