"""A second opinion on an epsilon: dp_accounting's, or a simulation's.

Formal guarantees:
  - a plan that nobody else can judge is refused, before any work.
  - ``disagreements`` is empty exactly if no opinion contradicts our bounds by more than
    the error that it states.  A bound of ours that is only looser is no disagreement.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from accounting import events
from accounting.core import accountant
from accounting.core.intervals import Bounds
from accounting.core.neighboring_relation import REPLACE_SPECIAL, brought
from accounting.core.plan import (
    BALLS_AND_BINS,
    DYNAMIC_SHUFFLE,
    PERSISTENT_SHUFFLE,
    DpSgdPlan,
)
from accounting.core.theorem import Theorem
from accounting.core.validation import InputError
from accounting.cross_check import check_theorem
from tests.accounting.cross_check import libraries, opponent, simulation
from tests.accounting.cross_check.opinion import Opinion


@dataclasses.dataclass(frozen=True)
class CrossCheck:
    """What others say of our epsilon.

    Attributes:
      opinions: Empty if our epsilon is infinite and there is nothing to check.
    """

    opinions: tuple[Opinion, ...]

    @property
    def disagreements(self) -> tuple[str, ...]:
        """Errors of ours, if the others are right."""
        found = (opinion.disagreement for opinion in self.opinions)
        return tuple(text for text in found if text is not None)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        return {
            "agrees": not self.disagreements,
            "opinions": [opinion.to_json() for opinion in self.opinions],
        }

    def to_text(self) -> str:
        """Returns the opinions as lines of text."""
        lines = [opinion.to_text() for opinion in self.opinions]
        if not lines:
            lines = ["  cross-check: no finite epsilon is stated; nothing to check."]
        lines += [
            f"  ERROR of ours: {text}, by more than the cross-check's error. Do not "
            "publish this epsilon; please report the command."
            for text in self.disagreements
        ]
        return "\n".join(lines)


def check_plan(
    plan: DpSgdPlan,
    theorem: Theorem | None = None,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> None:
    """Refuses a plan that nobody else can judge.

    Args:
      plan: How batches are made.
      theorem: The theorem of a method with accounting of its own; None for DP-SGD's.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the privacy unit is a user.

    Raises:
      InputError: nobody else can judge the plan; the message says why.
    """
    check_theorem(theorem)
    _judge(plan, neighboring_relation, max_examples_per_user)


def cross_check(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    ours: Bounds,
    neighboring_relation: str = REPLACE_SPECIAL,
    max_examples_per_user: int = 1,
) -> CrossCheck:
    """Returns what others say of our epsilon.

    Args:
      plan: Accepted by ``check_plan``.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: In (0, 1).
      ours: Our bounds on epsilon at ``delta``.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the privacy unit is a user.

    Raises:
      InputError: nobody else can judge the plan.
    """
    judge = _judge(plan, neighboring_relation, max_examples_per_user)
    return CrossCheck(judge(noise_multiplier, delta, ours))


#: (noise multiplier, delta, our bounds on epsilon) -> opinions.
_Judge = Callable[[float, float, Bounds], tuple[Opinion, ...]]


def _judge(plan: DpSgdPlan, relation: str, max_examples_per_user: int) -> _Judge:
    """Returns who can judge a plan, or refuses the plan."""
    brought(plan.sampler, relation, max_examples_per_user)
    if plan.sampler == BALLS_AND_BINS:
        return functools.partial(_simulated, plan)
    if plan.sampler in (PERSISTENT_SHUFFLE, DYNAMIC_SHUFFLE):
        _check_opponent(plan)
        return functools.partial(_attacked, plan)
    ask = functools.partial(
        events.ask,
        plan,
        neighboring_relation=relation,
        max_examples_per_user=max_examples_per_user,
    )
    ask(noise_multiplier=1.0)  # refuses a plan without an event
    return lambda noise, delta, ours: libraries.opinions(
        ask(noise_multiplier=noise), delta, ours
    )


def _check_opponent(plan: DpSgdPlan) -> None:
    values = plan.steps_per_epoch * plan.num_shuffles
    if values > opponent.MOST_VALUES:
        raise InputError(
            f"Expected no --cross-check of {values:,} shuffled steps: its opponent is "
            f"simulated for {opponent.MOST_VALUES:,} at most. Omit --cross-check."
        )


def _attacked(
    plan: DpSgdPlan,
    noise_multiplier: float,
    delta: float,
    ours: Bounds,
) -> tuple[Opinion, ...]:
    if not math.isfinite(ours.guarantee):
        return ()
    orders = opponent.RandomOrders(
        num_steps=plan.steps_per_epoch,
        num_orders=plan.num_shuffles,
        num_examples=plan.num_examples,
        noise=noise_multiplier / math.sqrt(plan.num_epochs // plan.num_shuffles),
    )
    found = opponent.attained(orders, delta)
    opinion = Opinion(
        source=f"simulated opponent, seed {simulation.SEED}",
        about="removing an example whose gradients are opposite to all others",
        quantity="epsilon",
        at=delta,
        value=found.epsilon,
        low=found.epsilon,
        high=math.inf,
        ours=ours,
        note=f"A lower bound from {found.num_samples:,} samples, which fails with "
        f"probability {simulation.ERROR_PROBABILITY:g} at most: it says nothing from "
        "above",
    )
    return (opinion,)


def _simulated(
    plan: DpSgdPlan,
    noise_multiplier: float,
    delta: float,
    ours: Bounds,
) -> tuple[Opinion, ...]:
    epsilon = ours.guarantee
    if not math.isfinite(epsilon):
        return ()
    allocation = simulation.RandomAllocation(
        num_steps=plan.steps_per_epoch,
        num_epochs=plan.num_epochs,
        noise_multiplier=noise_multiplier,
    )
    found = simulation.estimate(allocation, epsilon)
    both = accountant.delta_by_direction(
        plan, noise_multiplier=noise_multiplier, epsilon=epsilon
    )
    # The claim is ``delta``.  Where removing an example is the worse direction, the
    # simulation of removing has to confirm it.
    upper = delta if both.remove.guarantee >= both.add.guarantee else both.remove.upper
    opinion = Opinion(
        source=f"simulation, seed {simulation.SEED}",
        about="removing an example",
        quantity="delta",
        at=epsilon,
        value=found.mean,
        low=found.low,
        high=found.high,
        ours=dataclasses.replace(both.remove, upper=upper),
        note=f"{found.num_samples:,} samples; the interval fails with probability "
        f"{simulation.ERROR_PROBABILITY:g} at most",
    )
    return (opinion,)
