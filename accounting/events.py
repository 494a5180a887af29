"""The events of dp_accounting that describe a plan, and its own epsilon beside ours.

A second opinion for a reviewer.  No claim rests on it: the statement gives the epsilon
of `accounting.accountant`.

Formal guarantees:
  - ``dp_event`` returns the event of the plan's own mechanism, or refuses the plan.
  - ``cross_check`` asks dp_accounting for every privacy loss; only the probability of
    truncation is ours, where the installed dp_accounting has no truncated event.

References:
  Chua et al. (2024), arXiv:2411.04205, Theorem 3.3, for the truncation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from importlib import metadata
from typing import Any

import dp_accounting
from dp_accounting import pld

from accounting import sampler_registry
from accounting.neighboring_relation import REPLACE_ONE, REPLACE_SPECIAL, brought
from accounting.numerics.calibration import epsilon_after_cost
from accounting.plan import DpSgdPlan
from accounting.sampler_registry import Event
from accounting.theorem import Theorem
from accounting.validation import InputError

#: The grid of privacy losses, relative to epsilon above 10.  dp_accounting's epsilon is
#: an upper bound on any; a grid much finer than epsilon takes minutes.
_INTERVAL = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossCheck:
    """Epsilon by dp_accounting, beside ours.

    Attributes:
      accountant: dp_accounting and its installed version.
      event: What it was asked about.
      epsilon: By dp_accounting; infinite if it proves none.
      ours: The epsilon that is stated.
    """

    accountant: str
    event: str
    epsilon: float
    ours: float

    @property
    def difference(self) -> float | None:
        """Our epsilon less theirs; None if either is infinite."""
        if math.isinf(self.epsilon) or math.isinf(self.ours):
            return None
        return self.ours - self.epsilon

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; infinite values are null."""
        return {
            "accountant": self.accountant,
            "event": self.event,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "difference": self.difference,
        }

    def to_text(self) -> str:
        """Returns the line for people."""
        gap = "" if self.difference is None else f", difference {self.difference:+.6f}"
        return (
            f"  cross-check {self.accountant}: epsilon {self.epsilon:.6f}, "
            f"ours {self.ours:.6f}{gap}; of {self.event}."
        )


def check_plan(
    plan: DpSgdPlan,
    theorem: Theorem | None = None,
    neighboring_relation: str = REPLACE_SPECIAL,
) -> None:
    """Accepts a plan that dp_accounting can account for.

    Args:
      plan: How batches are made.
      theorem: Of a method with accounting of its own; None for DP-SGD's.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.

    Raises:
      InputError: it cannot; the message gives the reason.
    """
    if theorem is not None:
        raise InputError(
            f"Expected no --cross-check of {theorem.name}: dp_accounting has no event "
            f"for {theorem.name}. Omit --cross-check."
        )
    _event(plan, neighboring_relation)


def _event(plan: DpSgdPlan, neighboring_relation: str = REPLACE_SPECIAL) -> Event:
    found = brought(plan.sampler, neighboring_relation)
    if found.event is not None:
        return found.event
    remedy = "Omit --cross-check."
    if neighboring_relation == REPLACE_ONE:
        remedy = "Omit --cross-check, or --relation."
    elif (stated := found.guarantee_of) is not None:
        remedy = (
            f"The epsilon stated is that of {stated} batches: cross-check --sampler "
            f"{stated}."
        )
    raise InputError(
        f"Expected no --cross-check of sampler={plan.sampler!r}: dp_accounting has "
        f"no event for it{_under(neighboring_relation)}. {remedy}"
    )


def _under(neighboring_relation: str) -> str:
    if neighboring_relation == REPLACE_SPECIAL:
        return ""
    return f" under {neighboring_relation}"


def dp_event(plan: DpSgdPlan, *, noise_multiplier: float) -> Any:
    """Returns the ``DpEvent`` of a whole run.

    For the zero-out relation, and at most as private: the sampling probability is
    rounded up.  dp_accounting's add-or-remove relation, with this probability held
    fixed, has the same dominating pairs for all but truncated Poisson sampling.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.

    Raises:
      InputError: the installed dp_accounting has no event for the plan.
    """
    found = _event(plan).build(dp_accounting, plan, noise_multiplier)
    if found is None:
        raise InputError(
            f"Expected sampler={plan.sampler!r} to be one that the installed "
            f"{_accountant_name()} has an event for. Install dp-accounting 0.6, or ask "
            "cross_check, which adds the truncation."
        )
    return found


def cross_check(
    plan: DpSgdPlan,
    *,
    noise_multiplier: float,
    delta: float,
    ours: float,
    neighboring_relation: str = REPLACE_SPECIAL,
) -> CrossCheck:
    """Returns the epsilon that dp_accounting proves, beside ours.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: In (0, 1).
      ours: The epsilon that is stated at ``delta``.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.

    Raises:
      InputError: dp_accounting has no event for the plan.
    """
    found, relation, cost = _find(plan, noise_multiplier, neighboring_relation)
    interval = _INTERVAL * (max(1.0, ours / 10) if math.isfinite(ours) else 1.0)
    accountant = pld.PLDAccountant(relation, interval).compose(found)
    if cost is None:
        epsilon = accountant.get_epsilon(delta)
    else:
        epsilon = epsilon_after_cost(cost, accountant.get_epsilon, delta)
    added = "" if cost is None else " plus (1 + e^epsilon) T Pr[Bin(n, q) > B]"
    return CrossCheck(
        accountant=_accountant_name(),
        event=f"{found}{added}",
        epsilon=float(epsilon),
        ours=ours,
    )


def _find(
    plan: DpSgdPlan, noise_multiplier: float, neighboring_relation: str
) -> tuple[Any, Any, Callable[[float], float] | None]:
    """Returns an event, its relation, and what must be added to its delta."""
    event, cost = _event(plan, neighboring_relation), None
    found = event.build(dp_accounting, plan, noise_multiplier)
    truncation = sampler_registry.get(plan.sampler).truncation
    if found is None and truncation is not None:
        untruncated = truncation.without(plan)
        event, cost = _event(untruncated), functools.partial(truncation.delta, plan)
        found = dp_event(untruncated, noise_multiplier=noise_multiplier)
    return found, dp_accounting.NeighboringRelation[event.relation], cost


def _accountant_name() -> str:
    return f"dp-accounting {metadata.version('dp-accounting')}"
