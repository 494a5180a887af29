"""What a sampler brings to be planned, accounted for, stated and audited.

A sampler is registered under a name, with the `PlanRules` that every plan needs, and a
function that loads the rest, its `Sampler`, at the first question.  The pipeline keeps
the function that assigns rows to steps, see `pipelines.sampling.samplers.register`.

Formal guarantees:
  - nothing by default: a neighbouring relation, the directions, a lower bound, the
    wording of a statement or an audit that a sampler does not bring is refused.
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
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from accounting.validation import InputError, check_choice

if TYPE_CHECKING:
    from accounting.intervals import Bounds, ByDirection, NoiseBounds
    from accounting.plan import DpSgdPlan
    from accounting.samplers.audit_case import Audit


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRules:
    """What a plan asks of its sampler.

    Attributes:
      once_per_epoch: Whether every example is in exactly one step of each epoch.
      largest_batch_size: Plan -> most examples of any step; None where chance alone
        limits it.
      truncates: Whether the plan must have a ``truncated_batch_size``.
    """

    once_per_epoch: bool
    largest_batch_size: Callable[[DpSgdPlan], int | None]
    truncates: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wording:
    """How a privacy statement describes a sampler.

    Attributes:
      sampling: How batches are made, half a sentence.
      discretization: How the bounds are computed, half a sentence.
    """

    sampling: str
    discretization: str


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
      delta_by_direction: Bounds on delta when an example is removed, and added.
      lower_bound: For bounds that come without a lower one.
      wording: For the privacy statement.
      audit: The worst case, and its score, for `dpsgd audit`.
    """

    epsilon: Callable[[DpSgdPlan, float, float], Bounds]
    delta: Callable[[DpSgdPlan, float, float], Bounds]
    noise_multiplier: Callable[[DpSgdPlan, float, float], NoiseBounds]
    closed_form: bool
    relations: tuple[str, ...]
    refusals: Mapping[str, str] = dataclasses.field(default_factory=dict)
    delta_by_direction: Callable[[DpSgdPlan, float, float], ByDirection] | None = None
    lower_bound: LowerBound | None = None
    wording: Wording | None = None
    audit: Audit | None = None


@dataclasses.dataclass(frozen=True)
class _Entry:
    rules: PlanRules
    load: Callable[[], Sampler]


_ENTRIES: dict[str, _Entry] = {}


def register(name: str, rules: PlanRules, load: Callable[[], Sampler]) -> None:
    """Makes a sampler known, in this process, to plans and to the accountant.

    Args:
      name: As plans will say it; it must not be taken.
      rules: What a plan must satisfy.
      load: Returns the rest; called at each question about it.

    Raises:
      InputError: the name is taken.
    """
    if name in _ENTRIES:
        raise InputError(
            f"Expected sampler={name!r} not to be registered yet. Take another name."
        )
    _ENTRIES[name] = _Entry(rules=rules, load=load)


def names() -> tuple[str, ...]:
    """Returns the samplers that are registered, in order of registration."""
    return tuple(_ENTRIES)


def rules(name: str) -> PlanRules:
    """Returns what a plan must satisfy.

    Raises:
      InputError: no such sampler.
    """
    return _ENTRIES[check_choice("sampler", name, names())].rules


def get(name: str) -> Sampler:
    """Returns what a sampler brings.

    Raises:
      InputError: no such sampler.
    """
    return _ENTRIES[check_choice("sampler", name, names())].load()


def refuse(name: str, need: str, remedy: str) -> NoReturn:
    """Refuses a question that a sampler does not answer.

    Args:
      name: Of the sampler.
      need: What it would have to bring.
      remedy: What to do instead.
    """
    raise InputError(f"Expected sampler={name!r} to bring {need}. {remedy}")


def by_chance(plan: DpSgdPlan) -> None:
    """The largest batch size of samplers that choose rows independently: none."""
    del plan


def equal_batches(plan: DpSgdPlan) -> int:
    """Returns the largest of an epoch's batches, whose sizes differ by at most one."""
    return -(-plan.num_examples // plan.steps_per_epoch)


def truncated_batches(plan: DpSgdPlan) -> int | None:
    """Returns the plan's cap."""
    return plan.truncated_batch_size


def _built_in(place: str) -> Sampler:
    module, attribute = place.split(":")
    # By name: an import, also one in a function, would tie plans to numpy.
    found: Sampler = getattr(importlib.import_module(module), attribute)
    return found


_BY_CHANCE = PlanRules(once_per_epoch=False, largest_batch_size=by_chance)
_EQUAL = PlanRules(once_per_epoch=True, largest_batch_size=equal_batches)
_TRUNCATED = PlanRules(
    once_per_epoch=False, largest_batch_size=truncated_batches, truncates=True
)
_ONE_STEP_BY_CHANCE = PlanRules(once_per_epoch=True, largest_batch_size=by_chance)

_BUILT_IN = {
    "deterministic": (_EQUAL, "accounting.samplers.deterministic:SAMPLER"),
    "persistent-shuffle": (_EQUAL, "accounting.samplers.shuffle:PERSISTENT"),
    "dynamic-shuffle": (_EQUAL, "accounting.samplers.shuffle:DYNAMIC"),
    "poisson": (_BY_CHANCE, "accounting.samplers.poisson:SAMPLER"),
    "truncated-poisson": (_TRUNCATED, "accounting.samplers.truncated_poisson:SAMPLER"),
    "balls-and-bins": (
        _ONE_STEP_BY_CHANCE,
        "accounting.samplers.balls_and_bins:SAMPLER",
    ),
}
for _name, (_rules, _place) in _BUILT_IN.items():
    register(_name, _rules, functools.partial(_built_in, _place))
#: The samplers of this package.
BUILT_IN = names()
