"""What tuning costs: one run, several that are all shown, or only the best shown.

Formal guarantees:
  - every epsilon is an upper bound for all that the mode releases together, and every
    noise multiplier was itself verified to meet the target.
  - several runs with one plan are one run: see `plan.together`.
  - *not* covered: a score of private rows without noise.

Public: everything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from accounting import composition
from accounting.claims import selection
from accounting.claims.selection import (
    NumberOfRuns,
    check_plan,
    epsilon_of_best,
    noise_of_best,
)
from accounting.composition import Profile
from accounting.core import accountant
from accounting.core.neighboring_relation import REPLACE_SPECIAL
from accounting.core.plan import DpSgdPlan, together
from accounting.core.validation import InputError, check_int

ONE, ALL, BEST = "one", "all", "best"
#: A search for noise starts at so many times that of a run alone.
_GUESS = 1.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """What one mode costs.

    Attributes:
      mode: ``ONE``, ``ALL`` or ``BEST``.
      noise_multiplier: Of each run.
      epsilon: Upper bound for all that is released.
      runs: Law of the number of runs; None if it is fixed.
    """

    mode: str
    noise_multiplier: float
    epsilon: float
    runs: NumberOfRuns | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; an infinite epsilon is null."""
        runs = self.runs
        law = runs and {
            "shape": runs.shape if math.isfinite(runs.shape) else None,
            "mean": runs.mean,
            "chance_of_top_tenth": runs.success(),
        }
        return {
            "mode": self.mode,
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "number_of_runs": law,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Runs with one plan, of which candidates may differ in anything but the plan.

    Attributes:
      plan: Of every run.
      num_runs: N: ``ALL`` makes so many; ``BEST`` tries a candidate of the best tenth
        as surely as they would.
      delta: In (0, 1).
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 answers are for all examples of a user.
    """

    plan: DpSgdPlan
    num_runs: int
    delta: float
    neighboring_relation: str = REPLACE_SPECIAL
    max_examples_per_user: int = 1

    def __post_init__(self) -> None:
        """Refuses what takes too long.

        Raises:
          InputError: a number of runs out of range, or a sampler without a profile.
        """
        most = selection.MOST_AS_GOOD
        check_int("runs", self.num_runs, at_least=2, at_most=most)
        check_plan(self.plan)

    @property
    def _asked(self) -> dict[str, Any]:
        return {
            "neighboring_relation": self.neighboring_relation,
            "max_examples_per_user": self.max_examples_per_user,
        }

    def _together(self, mode: str) -> DpSgdPlan:
        """Returns the plan of all runs of ``ONE`` or ``ALL``, one after another."""
        return together(self.plan, self.num_runs if mode == ALL else 1)

    def at_noise(
        self, mode: str, noise_multiplier: float, runs: NumberOfRuns | None = None
    ) -> Price:
        """Returns the price of a mode at given noise.

        Args:
          mode: ``ONE``, ``ALL`` or ``BEST``.
          noise_multiplier: Noise standard deviation over the clip norm, above 0.
          runs: Law of the number of runs for ``BEST``; by default the one with the
            least epsilon.
        """
        if mode == BEST:
            run = self._run(noise_multiplier)
            tried = self._laws() if runs is None else [runs]
            epsilon, runs = self._cheapest(run, tried)
        else:
            epsilon = accountant.epsilon(
                self._together(mode),
                noise_multiplier=noise_multiplier,
                delta=self.delta,
                **self._asked,
            ).guarantee
        return Price(
            mode=mode, noise_multiplier=noise_multiplier, epsilon=epsilon, runs=runs
        )

    def _run(self, noise_multiplier: float) -> Profile:
        return composition.run(self.plan, noise_multiplier, **self._asked)

    def _cheapest(
        self, run: Profile, laws: list[NumberOfRuns]
    ) -> tuple[float, NumberOfRuns]:
        found = [(epsilon_of_best(run, law, self.delta), law) for law in laws]
        return min(found, key=lambda one: one[0])

    def _laws(self) -> list[NumberOfRuns]:
        found = []
        for shape in selection.SHAPES:
            try:
                found.append(selection.as_good_as(self.num_runs, shape))
            except InputError:  # it would take thousands of runs
                continue
        return found

    def for_epsilon(
        self, mode: str, epsilon: float, say: Callable[[str], None] = lambda text: None
    ) -> Price:
        """Returns the price of a mode whose epsilon is at most the target.

        Args:
          mode: ``ONE``, ``ALL`` or ``BEST``.
          epsilon: Target, above 0.
          say: Gets a line for each noise multiplier that is tried.

        Raises:
          InputError: no noise multiplier meets the target.
        """
        noise = accountant.noise_multiplier(
            self._together(mode), epsilon=epsilon, delta=self.delta, **self._asked
        ).guarantee
        if mode != BEST:
            return self.at_noise(mode, noise)
        noise *= _GUESS
        say(f"noise multiplier {noise:.4g}")
        first = self._run(noise)
        _, runs = self._cheapest(first, self._laws())
        found = noise_of_best(
            lambda tried: first if tried == noise else self._run(tried),
            runs,
            epsilon=epsilon,
            delta=self.delta,
            guess=noise,
            say=say,
        )
        return self.at_noise(BEST, found, runs)
