"""What a sampler brings to be planned, accounted for, stated and audited.

A sampler is registered under a name with two things: the `PlanRules` that every plan
needs, and a `Sampler`, or where it is, loaded at the first question.  The rest of the
project asks for these capabilities and never for a name.  The function that assigns
rows to steps is registered with `pipelines.sampling.samplers.register`.

Formal guarantees:
  - nothing by default: what a sampler does not bring is refused.
  - one meaning per name: a name cannot be registered twice.
  - a plan loads the standard library alone: registering loads no sampler's module.

Example:
  >>> rules("balls-and-bins").once_per_epoch
  True
  >>> get("balls-and-bins").relations
  ('REPLACE_SPECIAL',)
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from accounting.validation import InputError, check_choice

if TYPE_CHECKING:
    from accounting.intervals import Bounds, ByDirection, NoiseBounds
    from accounting.plan import DpSgdPlan
    from accounting.samplers.audit_case import Audit


def by_chance(plan: DpSgdPlan) -> None:
    """The largest batch size of samplers that choose rows independently: none."""
    del plan


def equal_batches(plan: DpSgdPlan) -> int:
    """Returns the largest of an epoch's batches, whose sizes differ by at most one."""
    return -(-plan.num_examples // plan.steps_per_epoch)


def truncated_batches(plan: DpSgdPlan) -> int | None:
    """Returns the plan's cap."""
    return plan.truncated_batch_size


def no_shuffle(plan: DpSgdPlan) -> int:
    """Returns 0: no order is drawn over all rows together."""
    del plan
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRules:
    """What a plan asks of its sampler.

    Attributes:
      once_per_epoch: Whether every example is in exactly one step of each epoch.
      largest_batch_size: Plan -> most examples of any step; None where chance alone
        limits it.
      truncates: Whether the plan must have a ``truncated_batch_size``.
      num_shuffles: Plan -> uniformly random orders of all rows that a run draws, each
        cut into steps; epoch e has order ``e % num_shuffles``.  0 without shuffling.
    """

    once_per_epoch: bool
    largest_batch_size: Callable[[DpSgdPlan], int | None]
    truncates: bool = False
    num_shuffles: Callable[[DpSgdPlan], int] = no_shuffle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wording:
    """How a privacy statement describes a sampler.

    Attributes:
      sampling: How batches are made, half a sentence.
      discretization: How the bounds are computed, half a sentence.
      num_examples: What the plan's number of examples must be, half a sentence.
    """

    sampling: str
    discretization: str
    num_examples: str = "the number of slots is public"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowerBound:
    """A lower bound that is too slow to be computed with every upper one.

    Attributes:
      delta: (plan, noise multiplier, epsilon) -> a lower bound on delta.
      method: Its source.
    """

    delta: Callable[[DpSgdPlan, float, float], float]
    method: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncation:
    """A cap on the examples of a step, and its price for any mechanism.

    Attributes:
      untruncated: The sampler without the cap.
      delta: (plan, epsilon) -> what the cap adds to delta at most.
      smallest_cap: (untruncated plan, epsilon, delta) -> the least cap that adds next
        to nothing to ``delta``.
    """

    untruncated: str
    delta: Callable[[DpSgdPlan, float], float]
    smallest_cap: Callable[[DpSgdPlan, float, float], int]

    def without(self, plan: DpSgdPlan) -> DpSgdPlan:
        """Returns ``plan`` without its cap."""
        return dataclasses.replace(
            plan, sampler=self.untruncated, truncated_batch_size=None
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """dp_accounting's description of a plan.

    Attributes:
      build: (the package dp_accounting, plan, noise multiplier) -> the ``DpEvent`` of
        the run; None if the installed release has none.
      relation: dp_accounting's neighbouring relation whose dominating pairs are those
        of the plan's.
      tight: Whether its pairs are attained, so that no epsilon below theirs holds.
      looseness: By how much our epsilon may be above theirs, relatively, as ours holds
        for more data sets.
    """

    build: Callable[[Any, DpSgdPlan, float], Any]
    relation: str
    tight: bool = True
    looseness: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomAllocation:
    """One example in one uniformly random step of each of several independent epochs.

    Attributes:
      num_steps: Of an epoch.
      num_epochs: Of the run.
      noise_multiplier: Of a step.
    """

    num_steps: int
    num_epochs: int
    noise_multiplier: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """What a sampler brings.  Whatever is None is refused when it is asked for.

    Bounds are functions of (plan, noise multiplier, point), all checked by
    `accounting.accountant`; they hold for the worse of both directions.

    Attributes:
      epsilon: Bounds on epsilon at a delta.
      delta: Bounds on delta at an epsilon.
      noise_multiplier: (plan, epsilon, delta) -> bounds on the noise that is needed.
      closed_form: Whether the noise that suffices is off by roundings alone.
      relations: The neighbouring relations under which the bounds are proven.
      refusals: Why other relations are refused, by relation.
      under: What is brought instead under some of ``relations``.
      users: k -> what is brought for all examples of a user, of which there are at most
        k, under zero-out.
      delta_by_direction: Bounds on delta when an example is removed, and added.
      lower_bound: For bounds that come without a lower one.
      guarantee_of: The sampler whose guarantee this one has, where no better one is
        proven.
      poisson_rate: Plan -> q, rounded up, where each example is in each step
        independently with probability q before truncation: theorems on Poisson
        subsampling apply.
      truncation: Of samplers whose plans have a cap.
      gaussian_dp: (plan, noise multiplier) -> the mu of which the mechanism is mu-GDP.
      event: For `accounting.events`.
      allocation: (plan, noise multiplier) -> the random allocation that the plan is:
        `accounting.cross_check` simulates it.
      wording: For the privacy statement.
      audit: The worst case, and its score, for `dpsgd audit`.
    """

    epsilon: Callable[[DpSgdPlan, float, float], Bounds]
    delta: Callable[[DpSgdPlan, float, float], Bounds]
    noise_multiplier: Callable[[DpSgdPlan, float, float], NoiseBounds]
    closed_form: bool
    relations: tuple[str, ...]
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    under: Mapping[str, Sampler] = dataclasses.field(default_factory=dict)
    users: Callable[[int], Sampler] | None = None
    delta_by_direction: Callable[[DpSgdPlan, float, float], ByDirection] | None = None
    lower_bound: LowerBound | None = None
    guarantee_of: str | None = None
    poisson_rate: Callable[[DpSgdPlan], float] | None = None
    truncation: Truncation | None = None
    gaussian_dp: Callable[[DpSgdPlan, float], float] | None = None
    event: Event | None = None
    allocation: Callable[[DpSgdPlan, float], RandomAllocation] | None = None
    wording: Wording | None = None
    audit: Audit | None = None


@dataclasses.dataclass(frozen=True)
class _Entry:
    rules: PlanRules
    sampler: Sampler | str


_ENTRIES: dict[str, _Entry] = {}


def register(name: str, rules: PlanRules, sampler: Sampler | str) -> None:
    """Makes a sampler known, in this process, to plans and to the accountant.

    Args:
      name: As plans will say it; it must not be taken.
      rules: What a plan must satisfy.
      sampler: The rest, or its place ``module:attribute``, imported when it is asked
        for.

    Raises:
      InputError: the name is taken.
    """
    if name in _ENTRIES:
        raise InputError(
            f"Expected sampler={name!r} not to be registered yet. Take another name."
        )
    _ENTRIES[name] = _Entry(rules=rules, sampler=sampler)


def names() -> tuple[str, ...]:
    """Returns the samplers that are registered, in order of registration."""
    return tuple(_ENTRIES)


def _entry(name: str) -> _Entry:
    return _ENTRIES[check_choice("sampler", name, names())]


def rules(name: str) -> PlanRules:
    """Returns what a plan must satisfy.

    Raises:
      InputError: no such sampler.
    """
    return _entry(name).rules


def get(name: str) -> Sampler:
    """Returns what a sampler brings.

    Raises:
      InputError: no such sampler.
    """
    sampler = _entry(name).sampler
    if isinstance(sampler, Sampler):
        return sampler
    module, attribute = sampler.split(":")
    # By name: an import, also one in a function, would tie plans to numpy.
    found: Sampler = getattr(importlib.import_module(module), attribute)
    return found


def poisson_samplers() -> tuple[str, ...]:
    """Returns the registered samplers to which theorems on Poisson batches apply."""
    return tuple(name for name in names() if get(name).poisson_rate is not None)


def refuse(name: str, need: str, remedy: str) -> NoReturn:
    """Refuses a question that a sampler does not answer.

    Args:
      name: Of the sampler.
      need: What it would have to bring.
      remedy: What to do instead.

    Raises:
      InputError: always.
    """
    raise InputError(f"Expected sampler={name!r} to bring {need}. {remedy}")


def _once_per_run(plan: DpSgdPlan) -> int:
    del plan
    return 1


def _once_per_epoch(plan: DpSgdPlan) -> int:
    return plan.num_epochs


_BY_CHANCE = PlanRules(once_per_epoch=False, largest_batch_size=by_chance)
_EQUAL = PlanRules(once_per_epoch=True, largest_batch_size=equal_batches)

_BUILT_IN = {
    "deterministic": (_EQUAL, "deterministic:SAMPLER"),
    "persistent-shuffle": (
        dataclasses.replace(_EQUAL, num_shuffles=_once_per_run),
        "shuffle:PERSISTENT",
    ),
    "dynamic-shuffle": (
        dataclasses.replace(_EQUAL, num_shuffles=_once_per_epoch),
        "shuffle:DYNAMIC",
    ),
    "poisson": (_BY_CHANCE, "poisson:SAMPLER"),
    "truncated-poisson": (
        PlanRules(
            once_per_epoch=False, largest_batch_size=truncated_batches, truncates=True
        ),
        "truncated_poisson:SAMPLER",
    ),
    "balls-and-bins": (
        dataclasses.replace(_BY_CHANCE, once_per_epoch=True),
        "balls_and_bins:SAMPLER",
    ),
}
for _name, (_rules, _place) in _BUILT_IN.items():
    register(_name, _rules, f"accounting.samplers.{_place}")
#: The samplers of this package.
BUILT_IN = names()
