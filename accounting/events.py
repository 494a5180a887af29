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
import math
from importlib import metadata
from typing import TYPE_CHECKING, Any

import dp_accounting
from dp_accounting import pld

from accounting import plan as plans
from accounting.plan import DpSgdPlan
from accounting.samplers import poisson, truncated_poisson
from accounting.validation import InputError

if TYPE_CHECKING:
    from accounting.theorem import Theorem

#: The grid of privacy losses, relative to epsilon above 10.  dp_accounting's epsilon is
#: an upper bound on any; a grid much finer than epsilon takes minutes.
_INTERVAL = 1e-4
_WITH_EVENT = (plans.DETERMINISTIC, plans.POISSON, plans.TRUNCATED_POISSON)
_SHUFFLES = (plans.PERSISTENT_SHUFFLE, plans.DYNAMIC_SHUFFLE)
#: Of dp_accounting 0.6 and later.
_TRUNCATED = getattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent", None)
_RELATIONS = dp_accounting.NeighboringRelation


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


def check_plan(plan: DpSgdPlan, theorem: Theorem | None = None) -> None:
    """Accepts a plan that dp_accounting can account for.

    Args:
      plan: How batches are made.
      theorem: Of a method with accounting of its own; None for DP-SGD's.

    Raises:
      InputError: it cannot; the message gives the reason.
    """
    if theorem is not None:
        raise InputError(
            f"Expected no --cross-check of {theorem.name}: dp_accounting has no event "
            f"for {theorem.name}. Omit --cross-check."
        )
    if plan.sampler not in _WITH_EVENT:
        remedy = "Omit --cross-check."
        if plan.sampler in _SHUFFLES:
            remedy = (
                "The epsilon stated is that of deterministic batches: cross-check "
                "--sampler deterministic."
            )
        raise InputError(
            f"Expected no --cross-check of sampler={plan.sampler!r}: dp_accounting has "
            f"no event for it. {remedy}"
        )


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
    check_plan(plan)
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    if plan.sampler == plans.DETERMINISTIC:
        # An example is used once in every epoch, in whichever step.
        return dp_accounting.SelfComposedDpEvent(gaussian, plan.num_epochs)
    rate = poisson.probability(plan)
    if plan.sampler == plans.POISSON:
        step = dp_accounting.PoissonSampledDpEvent(rate, gaussian)
    elif _TRUNCATED is not None:
        step = _TRUNCATED(
            plan.num_examples, rate, plan.truncated_batch_size, noise_multiplier
        )
    else:
        raise InputError(
            f"Expected sampler={plan.sampler!r} to be one that the installed "
            f"{_accountant_name()} has an event for. Install dp-accounting 0.6, or ask "
            "cross_check, which adds the truncation."
        )
    return dp_accounting.SelfComposedDpEvent(step, plan.num_steps)


def cross_check(
    plan: DpSgdPlan, *, noise_multiplier: float, delta: float, ours: float
) -> CrossCheck:
    """Returns the epsilon that dp_accounting proves, beside ours.

    Args:
      plan: How batches are made.
      noise_multiplier: Noise standard deviation over the clip norm.
      delta: In (0, 1).
      ours: The epsilon that is stated at ``delta``.

    Raises:
      InputError: dp_accounting has no event for the plan.
    """
    adds_truncation = plan.sampler == plans.TRUNCATED_POISSON and _TRUNCATED is None
    asked = plan
    if adds_truncation:
        asked = dataclasses.replace(
            plan, sampler=plans.POISSON, truncated_batch_size=None
        )
    event = dp_event(asked, noise_multiplier=noise_multiplier)
    interval = _INTERVAL * (max(1.0, ours / 10) if math.isfinite(ours) else 1.0)
    accountant = pld.PLDAccountant(_relation(asked), interval).compose(event)
    needed_at = accountant.get_epsilon
    if adds_truncation:
        epsilon = truncated_poisson.with_truncation(plan, delta, needed_at)
    else:
        epsilon = needed_at(delta)
    added = " plus (1 + e^epsilon) T Pr[Bin(n, q) > B]" if adds_truncation else ""
    return CrossCheck(
        accountant=_accountant_name(),
        event=f"{event}{added}",
        epsilon=float(epsilon),
        ours=ours,
    )


def _relation(plan: DpSgdPlan) -> Any:
    if plan.sampler == plans.TRUNCATED_POISSON:
        return _RELATIONS.REPLACE_SPECIAL
    return _RELATIONS.ADD_OR_REMOVE_ONE


def _accountant_name() -> str:
    return f"dp-accounting {metadata.version('dp-accounting')}"
