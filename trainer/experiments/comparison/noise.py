"""Computes the noise of every run in a comparison, before any batch is made.

One target (epsilon, delta) needs different noise with different samplers, which is the
subject of Scalable DP-SGD.  There are three rules:

    same         all samplers use the noise of the first; others may miss the target
    own          each uses the noise that is proven to suffice for it
    optimistic   each uses the least noise that lower bounds allow: NO GUARANTEE

If a sampler's two bounds coincide, or only the proven one is known, as for Poisson
batches, optimistic noise is the sampler's own noise, which has a guarantee.  A method
with its own theorem gets the noise of that theorem; on batches that the theorem does
not cover the method is left out, and a note says so.

Formal guarantees:
  - ``own`` noise is what the accountant, or the theorem of the method, proves to
    suffice for that sampler's plan.
  - ``optimistic`` noise is never called ``own``, nor the other way round.
  - A given noise multiplier is used unchanged.

Public: everything.

References:
  Chua et al. (2024), arXiv:2411.04205, Section 4.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from accounting.core.intervals import EXACT, NoiseBounds
from accounting.core.plan import check_epochs
from accounting.core.validation import InputError
from pipelines.core.users.bounded import UserBound
from pipelines.job.batch_settings import BatchSettings
from trainer.experiments.comparison.case import (
    GIVEN,
    Case,
    is_private,
    without_repetition,
)
from trainer.experiments.comparison.runs import Say
from trainer.run import privacy
from trainer.settings.comparison_settings import (
    OPTIMISTIC,
    OWN,
    SAME,
    ComparisonSettings,
)
from trainer.settings.train_settings import TrainSettings


def check_plans(settings: ComparisonSettings, num_examples: int) -> None:
    """Refuses a comparison with an impossible plan; arguments as for `find_cases`."""
    for sampler in settings.samplers:
        for batches in settings.batches_of(sampler):
            plan = batches.plan(num_examples)
            check_epochs(plan)
            for training in settings.trained:
                training.check_steps(plan.num_steps)


def find_cases(
    settings: ComparisonSettings,
    num_examples: int,
    say: Say,
    bounded: UserBound | None = None,
) -> tuple[list[Case], list[str]]:
    """Returns all cases with their noise, and notes on those left out.

    Args:
      settings: What to compare.
      num_examples: Number of slots in the data set.
      say: Called with each line of progress.
      bounded: How the users of the data set are bounded; None protects examples.

    Raises:
      InputError: a method has no accounting, a target is out of reach, or a theorem
        covers none of the samplers.
    """
    cases, notes = list[Case](), dict[str, None]()
    for batches in zip(*map(settings.batches_of, settings.samplers), strict=True):
        for training in settings.trained:
            answers = _Answers(training, batches, num_examples, bounded)
            notes |= dict.fromkeys(answers.left_out())
            found = without_repetition(answers.cases(settings.noise))
            for case in found:
                if case.target_epsilon is not None:
                    say(f"noise {case.settings.noise_multiplier:.4f}: {case.name}")
            cases += found
    return without_repetition(cases), list(notes)


class _Answers:
    """The noise of one training setting with each sampler.

    ``batches`` are those of every sampler, of one size and number of epochs.
    """

    def __init__(
        self,
        training: TrainSettings,
        batches: Sequence[BatchSettings],
        num_examples: int,
        bounded: UserBound | None,
    ) -> None:
        self._training, self._bounded = training, bounded
        self._plans = {each.sampler: each.plan(num_examples) for each in batches}
        self._theorem = None
        if is_private(training):
            self._theorem = privacy.theorem_of_settings(training)
        self._refused = dict(self._refusals())
        self._batches = [each for each in batches if each.sampler not in self._refused]
        if not self._batches:
            raise next(iter(self._refused.values()))

    def _refusals(self) -> Iterator[tuple[str, InputError]]:
        if self._theorem is None:
            return
        for sampler, plan in self._plans.items():
            try:
                self._theorem.check_plan(plan)
            except InputError as error:
                yield sampler, error

    def left_out(self) -> list[str]:
        """Returns a sentence for every sampler that the method's theorem excludes."""
        return [
            f"Left out: {self._training.method} on {sampler} batches, for which its "
            "theorem proves nothing."
            for sampler in self._refused
        ]

    def cases(self, rules: Sequence[str]) -> Iterator[Case]:
        """Yields a case for every sampler and rule, possibly with duplicates."""
        target = self._training.target_epsilon
        for batches in self._batches:
            given = Case(batches=batches, settings=self._training)
            if not is_private(self._training):
                yield given
            elif target is None:
                yield dataclasses.replace(given, noise_rule=GIVEN)
            else:
                for rule in rules:
                    yield self._case(given, rule, target)

    def _case(self, given: Case, asked: str, target: float) -> Case:
        rule, noise = self._noise(given.batches.sampler, asked)
        settings = dataclasses.replace(
            self._training, target_epsilon=None, noise_multiplier=noise
        )
        return dataclasses.replace(
            given, settings=settings, target_epsilon=target, noise_rule=rule
        )

    def _noise(self, sampler: str, rule: str) -> tuple[str, float]:
        """Returns the rule that in effect determines the noise, and the noise."""
        if rule == SAME:
            first = self._batches[0].sampler
            return OWN if sampler == first else SAME, self._bounds(first).guarantee
        bounds = self._bounds(sampler)
        if rule == OPTIMISTIC and bounds.necessary is not None and bounds.kind != EXACT:
            return OPTIMISTIC, bounds.necessary
        return OWN, bounds.guarantee

    def _bounds(self, sampler: str) -> NoiseBounds:
        training = self._training
        assert training.target_epsilon is not None  # there is a target
        assert training.target_delta is not None
        return _bounds(
            self._plans[sampler],
            epsilon=training.target_epsilon,
            delta=training.target_delta,
            theorem=self._theorem,
            bounded=self._bounded,
        )


_bounds = functools.lru_cache(privacy.noise_bounds)
