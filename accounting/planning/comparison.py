"""The comparison of ``dpsgd plan``: one question, answered for every sampler.

Formal guarantees:
  - A theorem answers only what it covers: one example, under zero-out.
  - What is proven is rounded up, and lower bounds are rounded down.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from accounting.core import accountant, sampler_registry
from accounting.core import plan as plans
from accounting.core.claim import plan_of_all
from accounting.core.neighboring_relation import REPLACE_SPECIAL, brought, is_supported
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_float

if TYPE_CHECKING:
    from accounting.core.claim import Theorem


import math
from collections.abc import Callable

from accounting.core.intervals import EXACT, delta_text

#: For a larger epsilon no cap of truncated batches is computed: exp overflows soon.
LARGEST_DESIGN_EPSILON = 700.0
#: Noise for a smaller epsilon is more than 1,000 times the gradients that it hides.
LEAST_TARGET_EPSILON = 1e-4
#: What a question asks for.
NOISE, EPSILON, DELTA = "noise multiplier", "epsilon", "delta"


def check_target(epsilon: float) -> float:
    """Returns ``epsilon`` if noise for it is worth computing.

    Raises:
      InputError: not a number, or below `LEAST_TARGET_EPSILON`.
    """
    remedy = (
        "Raise it: an epsilon of 0.1 is strong, and what is smaller drowns gradients."
    )
    return check_float("epsilon", epsilon, at_least=LEAST_TARGET_EPSILON, remedy=remedy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a data set, a schedule and a target, but no sampler.

    Given a target epsilon, the answer is the noise multiplier; given a noise
    multiplier, epsilon; given both, delta: a point of the privacy profile.

    Attributes:
      num_examples, expected_batch_size, num_steps, num_epochs: As in `DpSgdPlan`.
      epsilon: Target, or a point of the privacy profile; None if it is asked for.
      noise_multiplier: Noise multiplier; None if it is asked for.
      delta: Target; where delta is asked for, it only determines caps.
      holds_steps: Whether a sweep keeps ``num_steps`` instead of ``num_epochs``.
      truncated_batch_size: Cap of samplers that have one; None for the least of
        negligible privacy cost.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.
      of_runs: Number of runs that the answer is of, all together.
      bands: Groups of the examples of cyclic samplers.
    """

    num_examples: int
    expected_batch_size: int
    num_steps: int
    num_epochs: int
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    holds_steps: bool = False
    truncated_batch_size: int | None = None
    neighboring_relation: str = REPLACE_SPECIAL
    max_examples_per_user: int = 1
    of_runs: int = 1
    bands: int | None = None

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise_multiplier is None:
            raise InputError("Expected epsilon or noise_multiplier; got neither.")

    @property
    def asks_for(self) -> str:
        """One of ``NOISE``, ``EPSILON`` and ``DELTA``."""
        if self.noise_multiplier is None:
            return NOISE
        return EPSILON if self.epsilon is None else DELTA

    @property
    def unit(self) -> dict[str, Any]:
        """Arguments of the accountant that say who is a neighbour of whom."""
        return {
            "neighboring_relation": self.neighboring_relation,
            "max_examples_per_user": self.max_examples_per_user,
        }

    @property
    def schedule(self) -> str:
        """The data set and the schedule, in words."""
        return (
            f"n={self.num_examples:,} examples, b={self.expected_batch_size:,} per "
            f"step, T={self.num_steps:,} steps, {self.epochs}"
        )

    @property
    def epochs(self) -> str:
        """The number of epochs, in words."""
        return plans.epochs_in_words(
            self.num_examples,
            self.expected_batch_size,
            num_steps=self.num_steps,
            num_epochs=self.num_epochs,
        )

    def plan(self, sampler: str) -> DpSgdPlan:
        """Returns the plan of ``sampler``, with the least cap if none is given.

        Raises:
          InputError: a value out of range, or a sampler whose cap must be given.
        """
        size = None
        if sampler_registry.rules(sampler).truncates:
            size = self.truncated_batch_size
            if size is None:
                size = self._smallest_cap(sampler)
        return DpSgdPlan(
            sampler=sampler,
            num_examples=self.num_examples,
            expected_batch_size=self.expected_batch_size,
            num_steps=self.num_steps,
            num_epochs=self.num_epochs,
            truncated_batch_size=size,
            bands=self._bands(sampler),
        )

    def _bands(self, sampler: str) -> int | None:
        return self.bands if sampler_registry.rules(sampler).cyclic else None

    def _smallest_cap(self, sampler: str) -> int:
        return accountant.smallest_truncated_batch_size(
            num_examples=self.num_examples,
            expected_batch_size=self.expected_batch_size,
            num_steps=self.num_steps,
            epsilon=self._design_epsilon(sampler),
            delta=self.delta,
            sampler=sampler,
            bands=self._bands(sampler),
        )

    def _design_epsilon(self, sampler: str) -> float:
        if self.noise_multiplier is None:
            assert self.epsilon is not None
            return self.epsilon
        untruncated = accountant.epsilon(
            self.plan(accountant.truncation_of(sampler).untruncated),
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            max_examples_per_user=self.max_examples_per_user,
        )
        return min(untruncated.guarantee, LARGEST_DESIGN_EPSILON)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """The sampler and mechanism of a row of a table, or a line of a plot.

    Attributes:
      sampler: Name of a registered sampler.
      theorem: The theorem of a mechanism with accounting of its own; None for DP-SGD.
      label: Distinguishes lines of the same sampler.
    """

    sampler: str
    theorem: Theorem | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """Name of the line."""
        return f"{self.sampler}, {self.label}" if self.label else self.sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One row: a plan, and the bounds on what was asked for.

    Attributes:
      plan: How batches are made.
      asked: One of ``NOISE``, ``EPSILON`` and ``DELTA``.
      bounds: Bounds on it.
      line: What the row is about; None for its sampler alone.
    """

    plan: DpSgdPlan
    asked: str
    bounds: accountant.Bounds | accountant.NoiseBounds
    line: Line | None = None

    @property
    def name(self) -> str:
        """Name of the row."""
        return self.plan.sampler if self.line is None else self.line.name

    @property
    def proven(self) -> float | None:
        """The proven upper bound, or sufficient noise; None if nothing is proven."""
        return self.bounds.proven

    @property
    def least(self) -> float | None:
        """The lower bound, or necessary noise; None if not computed."""
        return self.bounds.least

    @property
    def padding(self) -> float | None:
        """Rows of padding per expected example of a step, if steps are truncated."""
        if self.plan.truncated_batch_size is None:
            return None
        return self.plan.truncated_batch_size / self.plan.expected_batch_size - 1

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        nothing = dict.fromkeys(map(_key, (NOISE, EPSILON, DELTA)))
        return {
            "name": self.name,
            "sampler": self.plan.sampler,
            "plan": self.plan.to_json(),
            **nothing,
            _key(self.asked): self.bounds.to_json(),
            "padding": self.padding,
        }


def _key(asked: str) -> str:
    return asked.replace(" ", "_")


def is_answered(question: Question, sampler: str) -> bool:
    """Whether a sampler is accounted for, with no further choice.

    Args:
      question: What is asked.
      sampler: Name of a sampler.
    """
    # Samplers that use every example once per epoch need whole epochs.
    steps = plans.steps_per_epoch(question.num_examples, question.expected_batch_size)
    whole = question.num_steps == question.num_epochs * steps
    rules = sampler_registry.rules(sampler)
    return (
        (question.of_runs == 1 or rules.composes)
        and not (rules.cyclic and question.bands is None)
        and is_supported(
            sampler, question.neighboring_relation, question.max_examples_per_user
        )
        and (whole or not plans.goes_through_epochs(sampler))
    )


def answer(question: Question, line: Line | str) -> Answer:
    """Returns the row of a line.

    Args:
      question: What is asked.
      line: What to answer for; a name means the sampler of that name.

    Raises:
      InputError: a value out of range, or nothing is proven for the sampler under the
        relation, or by the theorem.
    """
    if isinstance(line, str):
        line = Line(sampler=line)
    return answer_for(question, line, checked_plan(question, line))


def answer_for(question: Question, line: Line, plan: DpSgdPlan) -> Answer:
    """Returns the row of a line, given its plan.

    Args:
      question: What is asked.
      line: The sampler and theorem.
      plan: The plan that `checked_plan` returned, of a run.
    """
    noise, epsilon, delta = question.noise_multiplier, question.epsilon, question.delta
    proof: Any = accountant if line.theorem is None else line.theorem
    # A theorem is about one example under zero-out: `checked_plan`.
    unit = question.unit if line.theorem is None else {}
    of_all = plan_of_all(plan, question.of_runs, line.theorem)
    if noise is None:
        found = proof.noise_multiplier(of_all, epsilon=epsilon, delta=delta, **unit)
    elif epsilon is None:
        found = proof.epsilon(of_all, noise_multiplier=noise, delta=delta, **unit)
    else:
        found = proof.delta(of_all, noise_multiplier=noise, epsilon=epsilon, **unit)
    return Answer(plan=plan, asked=question.asks_for, bounds=found, line=line)


def checked_plan(question: Question, line: Line) -> DpSgdPlan:
    """Returns the plan of a line, if its sampler and theorem cover the question.

    Args:
      question: What is asked.
      line: The sampler and theorem.

    Raises:
      InputError: as for `answer`.
    """
    if line.theorem is not None:
        _check_unit(question, line.theorem)
    brought(line.sampler, **question.unit)
    plan = question.plan(line.sampler)
    plans.check_epochs(plan)
    if line.theorem is not None:
        line.theorem.check_plan(plan)
    plan_of_all(plan, question.of_runs, line.theorem)  # or refuses
    return plan


def _check_unit(question: Question, theorem: Theorem) -> None:
    if question.neighboring_relation != REPLACE_SPECIAL:
        raise InputError(
            f"Expected neighboring_relation={question.neighboring_relation!r} to be "
            f"{REPLACE_SPECIAL!r} for {theorem.name}. Omit --relation."
        )
    if question.max_examples_per_user != 1:
        raise InputError(
            f"Expected max_examples_per_user={question.max_examples_per_user} to be 1 "
            f"for {theorem.name}. Omit --max-examples-per-user."
        )


def proven_text(answer: Answer) -> str:
    """Returns the proven value, rounded up; "unknown" if there is none."""
    return _text(answer.proven, answer.asked, math.ceil)


def least_text(answer: Answer) -> str:
    """Returns the lower bound, rounded down; "unknown" if there is none."""
    return _text(answer.least, answer.asked, math.floor)


def swept_text(value: float) -> str:
    """Returns a value of a sweep, unrounded: what is proven there holds there."""
    return f"{int(value):,}" if float(value).is_integer() else repr(float(value))


def is_exact(answer: Answer) -> bool:
    """Whether the bounds are equal up to rounding."""
    return answer.bounds.kind == EXACT


def _text(value: float | None, asked: str, side: Callable[[float], int]) -> str:
    if value is None:
        return "unknown"
    if not math.isfinite(value):
        return "infinite"
    if asked != DELTA:
        return f"{side(value * 1e4) / 1e4:.4f}"
    return delta_text(value, side)
