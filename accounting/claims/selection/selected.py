"""The best of a random number of runs, as a mechanism with a theorem of its own.

Formal guarantees:
  - epsilon is that of `best_of` for the profile of one run of the plan, under zero-out.
  - the law is named by two public numbers, from which every machine makes its table.

Public: everything here.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from accounting import composition
from accounting.claims.selection.best_of import (
    SHAPES,
    NumberOfRuns,
    as_good_as,
    delta_of_best,
    epsilon_of_best,
    noise_of_best,
)
from accounting.core import sampler_registry
from accounting.core.claim import MethodWording
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError

METHOD = "selection theorem: best of a random number of runs"
_SECRET = "the number of runs, the other runs, and how long they took"
_EARLIER = "earlier runs on the same data, and searches other than this one"


def law_of(num_runs: int, shape: float | None) -> NumberOfRuns:
    """Returns the law that a run record names.

    Args:
      num_runs: As of `as_good_as`.
      shape: Shape of the law; None for Poisson's.
    """
    return as_good_as(num_runs, math.inf if shape is None else shape)


def check_plan(plan: DpSgdPlan) -> None:
    """Refuses a plan whose profile takes too long.

    Raises:
      InputError: a sampler without a profile.
    """
    if _is_fast(plan.sampler):
        return
    fast = (name for name in sampler_registry.names() if _is_fast(name))
    raise InputError(
        f"Expected sampler={plan.sampler!r} of several runs to be {' or '.join(fast)}: "
        "the others take minutes."
    )


def _is_fast(sampler: str) -> bool:
    found = sampler_registry.get(sampler)
    return found.profile is not None or found.closed_form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selected:
    """A run that was the best of a random number of runs.  All public.

    Attributes:
      num_runs: N: a candidate of the best tenth is tried as surely as by N runs.
      shape: Shape of the law; None for Poisson's.
      l2_norm_clip: Bound on the L2 norm of one example's gradient, or "auto".

    Raises:
      InputError: no such law.
    """

    num_runs: int
    shape: float | None
    l2_norm_clip: float | str

    def __post_init__(self) -> None:
        """Refuses a law that is not offered.

        Raises:
          InputError: name, value, bound.
        """
        if (math.inf if self.shape is None else self.shape) not in SHAPES:
            raise InputError(
                f"Expected shape={self.shape!r} of the number of runs to be one of "
                f"{SHAPES}. Restore the record."
            )

    @functools.cached_property
    def law(self) -> NumberOfRuns:
        """The law of the number of runs."""
        return law_of(self.num_runs, self.shape)

    @property
    def name(self) -> str:
        """Name of the mechanism, for messages."""
        return "the best of several runs"

    @property
    def is_for_rows_alone(self) -> bool:
        """See `Theorem.is_for_rows_alone`: truncated users have another bound."""
        return True

    def check_plan(self, plan: DpSgdPlan) -> None:
        """Refuses slow samplers; see `check_plan`."""
        check_plan(plan)

    def epsilon(
        self, plan: DpSgdPlan, *, noise_multiplier: float, delta: float
    ) -> Bounds:
        """See `Theorem.epsilon`."""
        check_plan(plan)
        run = composition.run(plan, noise_multiplier)
        return Bounds(upper=epsilon_of_best(run, self.law, delta), method=METHOD)

    def delta(
        self, plan: DpSgdPlan, *, noise_multiplier: float, epsilon: float
    ) -> Bounds:
        """See `Theorem.delta`."""
        check_plan(plan)
        run = composition.run(plan, noise_multiplier)
        return Bounds(upper=delta_of_best(run, self.law, epsilon), method=METHOD)

    def noise_multiplier(
        self, plan: DpSgdPlan, *, epsilon: float, delta: float
    ) -> NoiseBounds:
        """See `Theorem.noise_multiplier`."""
        check_plan(plan)
        found = noise_of_best(
            lambda noise: composition.run(plan, noise),
            self.law,
            epsilon=epsilon,
            delta=delta,
            guess=1.0,
        )
        return NoiseBounds(sufficient=found, method=METHOD)

    def wording(self, bounds: Bounds) -> MethodWording:
        """Returns the words for a statement of ``bounds``."""
        del bounds
        return MethodWording(
            clipped="",
            released=(
                "; of a random number of such runs, as good as "
                f"{self.num_runs}, only the best is released"
            ),
            discretization=None,
            not_covered=(_SECRET,),
            earlier=_EARLIER,
        )
