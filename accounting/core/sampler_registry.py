"""The registry of samplers, and the interface that each of them implements.

A sampler is registered under a name with its `PlanRules`, which every plan needs, and
with a `Sampler`: its bounds and its words in a privacy statement.  The `Sampler` may be
given as a place to import from at the first use.  The rest of the project asks for
these capabilities and never for a name.  The function that assigns rows to steps is
registered with `pipelines.sampling.samplers.register`, and an audit with
`accounting.auditing.audits.register`.

Formal guarantees:
  - nothing by default: what a sampler does not provide is refused.
  - one meaning per name: a name cannot be registered twice.
  - a plan loads the standard library alone: registering loads no sampler's module.

Example:
  >>> rules("balls-and-bins").once_per_epoch
  True
  >>> get("dynamic-shuffle").relations
  ('REPLACE_SPECIAL',)
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from accounting.core.validation import InputError, check_choice

if TYPE_CHECKING:
    from accounting.core.intervals import Bounds, ByDirection, NoiseBounds
    from accounting.core.plan import DpSgdPlan


def by_chance(plan: DpSgdPlan) -> None:
    """Returns None: rows are chosen independently, and batch sizes are unbounded."""
    del plan


def equal_batches(plan: DpSgdPlan) -> int:
    """Returns the largest batch of an epoch cut into steps of nearly equal sizes."""
    return -(-plan.num_examples // plan.steps_per_epoch)


def truncated_batches(plan: DpSgdPlan) -> int | None:
    """Returns the plan's cap on the examples of a step."""
    return plan.truncated_batch_size


def no_shuffle(plan: DpSgdPlan) -> int:
    """Returns 0: no order is drawn over all rows together."""
    del plan
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRules:
    """Properties of a sampler that its plans depend on.

    Attributes:
      once_per_epoch: Whether every example is in exactly one step of each epoch.
      largest_batch_size: Plan -> largest possible number of examples in a step; None
        if it has no bound.
      truncates: Whether the plan must have a ``truncated_batch_size``.
      cyclic: Whether the plan must have ``bands``: an example is in steps of its group
        alone, every ``bands`` steps.
      num_shuffles: Plan -> number of uniformly random orders of all rows that a run
        draws and cuts into steps; epoch e uses order ``e % num_shuffles``.  0 without
        shuffling.
      composes: Whether runs that sample each by itself have, one after another, the law
        of one run of all their epochs: no draw of a run is used in two epochs.
    """

    once_per_epoch: bool
    largest_batch_size: Callable[[DpSgdPlan], int | None]
    truncates: bool = False
    cyclic: bool = False
    num_shuffles: Callable[[DpSgdPlan], int] = no_shuffle
    composes: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wording:
    """How a privacy statement describes a sampler.

    Attributes:
      sampling: How batches are sampled, as part of a sentence.
      discretization: How the bounds are computed, as part of a sentence.
      num_examples: The condition on the plan's number of examples, as part of a
        sentence.
    """

    sampling: str
    discretization: str
    num_examples: str = "the number of slots is public"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncation:
    """A cap on the examples of a step, and its privacy cost for any mechanism.

    Attributes:
      untruncated: Name of the sampler without the cap.
      delta: (plan, epsilon) -> an upper bound on what the cap adds to delta.
      smallest_cap: (untruncated plan, epsilon, delta) -> the least cap that adds a
        negligible part of ``delta``.
      formula: ``delta`` in symbols.
    """

    untruncated: str
    delta: Callable[[DpSgdPlan, float], float]
    smallest_cap: Callable[[DpSgdPlan, float, float], int]
    formula: str = "(1 + e^epsilon) T Pr[Bin(n, q) > B]"

    def without(self, plan: DpSgdPlan) -> DpSgdPlan:
        """Returns ``plan`` without its cap."""
        return dataclasses.replace(
            plan, sampler=self.untruncated, truncated_batch_size=None
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """What a sampler provides.  A capability that is None is refused.

    Bounds are functions of (plan, noise multiplier, epsilon or delta), which the
    accountant has checked.  They hold for the worse of both directions.

    Attributes:
      epsilon: Bounds on epsilon at a delta.
      delta: Bounds on delta at an epsilon.
      noise_multiplier: (plan, epsilon, delta) -> bounds on the noise multiplier.
      closed_form: Whether the noise multiplier is exact up to rounding.
      relations: The neighbouring relations under which the bounds are proven.
      refusals: Relation -> why it is refused.
      under: Relation -> the `Sampler` that replaces this one under it.
      users: k -> the `Sampler` for users with at most k examples, under the relation.
      delta_by_direction: Bounds on delta for removing an example, and for adding one.
      profile: (plan, noise multiplier) -> a function from epsilon to bounds on delta in
        both directions, for very many epsilons.
      poisson_rate: Plan -> q, rounded up, if each example is in each step independently
        with probability q before truncation.  Theorems on Poisson subsampling apply.
      truncation: The cap, for samplers whose plans have one.
      gaussian_dp: (plan, noise multiplier) -> a mu for which the mechanism is mu-GDP.
      wording: Words of the privacy statement.
      claims: Method of a bound -> name of the claim that it relies on; a method of the
        core's own bounds is not in it.
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
    profile: (
        Callable[[DpSgdPlan, float], Callable[[float], tuple[float, float]]] | None
    ) = None
    poisson_rate: Callable[[DpSgdPlan], float] | None = None
    truncation: Truncation | None = None
    gaussian_dp: Callable[[DpSgdPlan, float], float] | None = None
    wording: Wording | None = None
    claims: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Entry:
    rules: PlanRules
    sampler: Sampler | str


_ENTRIES: dict[str, _Entry] = {}


def register(name: str, rules: PlanRules, sampler: Sampler | str) -> None:
    """Registers a sampler, in this process, with plans and the accountant.

    Args:
      name: Name in plans; it must not be taken.
      rules: What a plan must satisfy.
      sampler: The sampler, or its place ``module:attribute``, which is imported at the
        first use.

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
    """Returns a sampler.

    Raises:
      InputError: no such sampler.
    """
    sampler = _entry(name).sampler
    if isinstance(sampler, Sampler):
        return sampler
    module, attribute = sampler.split(":")
    # By name: an import statement would make every plan depend on numpy.
    found: Sampler = getattr(importlib.import_module(module), attribute)
    return found


def poisson_samplers() -> tuple[str, ...]:
    """Returns the registered samplers to which theorems on Poisson batches apply."""
    return tuple(name for name in names() if get(name).poisson_rate is not None)


def refuse(name: str, need: str, remedy: str) -> NoReturn:
    """Refuses a question that a sampler does not answer.

    Args:
      name: Name of the sampler.
      need: The missing capability.
      remedy: What to do instead.

    Raises:
      InputError: always.
    """
    raise InputError(f"Expected sampler={name!r} to provide {need}. {remedy}")


def _once_per_run(plan: DpSgdPlan) -> int:
    del plan
    return 1


def _once_per_epoch(plan: DpSgdPlan) -> int:
    return plan.num_epochs


_BY_CHANCE = PlanRules(
    once_per_epoch=False, largest_batch_size=by_chance, composes=True
)
_CAPPED = dataclasses.replace(
    _BY_CHANCE, largest_batch_size=truncated_batches, truncates=True
)
_EQUAL = PlanRules(once_per_epoch=True, largest_batch_size=equal_batches, composes=True)

_BUILT_IN = {
    "deterministic": (_EQUAL, "core.samplers.deterministic:SAMPLER"),
    "persistent-shuffle": (
        dataclasses.replace(_EQUAL, num_shuffles=_once_per_run, composes=False),
        "claims.shuffles.shuffle:PERSISTENT",
    ),
    "dynamic-shuffle": (
        dataclasses.replace(_EQUAL, num_shuffles=_once_per_epoch),
        "claims.shuffles.shuffle:DYNAMIC",
    ),
    "poisson": (_BY_CHANCE, "core.samplers.poisson:SAMPLER"),
    "truncated-poisson": (_CAPPED, "core.samplers.truncated_poisson:SAMPLER"),
    "balls-and-bins": (
        dataclasses.replace(_BY_CHANCE, once_per_epoch=True),
        "claims.balls_and_bins:SAMPLER",
    ),
    "cyclic-poisson": (
        dataclasses.replace(_BY_CHANCE, cyclic=True),
        "core.samplers.cyclic_poisson:SAMPLER",
    ),
    "truncated-cyclic-poisson": (
        dataclasses.replace(_CAPPED, cyclic=True),
        "core.samplers.cyclic_poisson:TRUNCATED",
    ),
}
for _name, (_rules, _place) in _BUILT_IN.items():
    register(_name, _rules, f"accounting.{_place}")
#: The samplers of this package.
BUILT_IN = names()
