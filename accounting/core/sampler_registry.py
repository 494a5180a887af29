"""The registry of samplers, and the interface that each of them implements.

A sampler is registered under a name with its `PlanRules`, which every plan needs, and
with a `Sampler`: its bounds and its words in a privacy statement.  The `Sampler` may be
given as a place to import from at the first use.  The rest of the project asks for
these capabilities and never for a name.  The function that assigns rows to steps is
registered with `pipelines.core.choices.register`, and an audit with
`accounting.audits.register`.

Formal guarantees:
  - What a sampler does not provide is refused; nothing has a default.
  - A name cannot be registered twice.
  - Registering loads no sampler's module: a plan needs the standard library alone.

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
from typing import Any, NoReturn

from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.plan import DpSgdPlan, PlanRules, names, register_rules
from accounting.core.plan import rules as rules
from accounting.core.validation import InputError, check_choice


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
    profile: (
        Callable[[DpSgdPlan, float], Callable[[float], tuple[float, float]]] | None
    ) = None
    poisson_rate: Callable[[DpSgdPlan], float] | None = None
    truncation: Truncation | None = None
    gaussian_dp: Callable[[DpSgdPlan, float], float] | None = None
    wording: Wording | None = None
    claims: Mapping[str, str] = dataclasses.field(default_factory=dict)


def bounds_of(found: Any) -> dict[str, Any]:
    """Returns the bounds of an object as arguments of `Sampler`."""
    names = ("epsilon", "delta", "noise_multiplier", "profile")
    return {name: getattr(found, name) for name in names}


#: Name -> the sampler, or its place ``module:attribute``.
_SAMPLERS: dict[str, Sampler | str] = {
    "deterministic": "accounting.core.samplers.deterministic:SAMPLER",
    "persistent-shuffle": "accounting.claims.shuffle:PERSISTENT",
    "dynamic-shuffle": "accounting.claims.shuffle:DYNAMIC",
    "poisson": "accounting.core.samplers.poisson:SAMPLER",
    "truncated-poisson": "accounting.core.samplers.truncated_poisson:SAMPLER",
    "balls-and-bins": "accounting.claims.balls_and_bins:SAMPLER",
    "cyclic-poisson": "accounting.core.samplers.cyclic_poisson:SAMPLER",
    "truncated-cyclic-poisson": "accounting.core.samplers.cyclic_poisson:TRUNCATED",
}


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
    register_rules(name, rules)
    _SAMPLERS[name] = sampler


def get(name: str) -> Sampler:
    """Returns a sampler.

    Raises:
      InputError: there is no such sampler.
    """
    sampler = _SAMPLERS[check_choice("sampler", name, names())]
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
