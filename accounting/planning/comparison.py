"""The comparison of ``dpsgd plan``: one target, every way of making batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from accounting import accountant, sampler_registry
from accounting import plan as plans
from accounting.neighboring_relation import REPLACE_SPECIAL, check_relation
from accounting.plan import DpSgdPlan
from accounting.validation import InputError

#: For a larger epsilon no cap of truncated batches is computed: exp overflows soon.
LARGEST_DESIGN_EPSILON = 700.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a data set, a schedule and a target, but no sampler.

    Attributes:
      num_examples, expected_batch_size, num_steps, num_epochs: As in `DpSgdPlan`.
      epsilon: Target; None if the noise is given.
      noise_multiplier: Given noise; None if a target is.
      delta: Of the target.
      truncated_batch_size: For samplers with a cap; None for the least that is safe.
      neighboring_relation: One of `neighboring_relation.RELATIONS`.
      max_examples_per_user: k; above 1 the answer is for all examples of a user.
    """

    num_examples: int
    expected_batch_size: int
    num_steps: int
    num_epochs: int
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    truncated_batch_size: int | None = None
    neighboring_relation: str = REPLACE_SPECIAL
    max_examples_per_user: int = 1

    def plan(self, sampler: str) -> DpSgdPlan:
        """Returns the plan of ``sampler``, with the smallest safe cap if none is given.

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
        )

    def _smallest_cap(self, sampler: str) -> int:
        return accountant.smallest_truncated_batch_size(
            num_examples=self.num_examples,
            expected_batch_size=self.expected_batch_size,
            num_steps=self.num_steps,
            epsilon=self._design_epsilon(sampler),
            delta=self.delta,
            sampler=sampler,
        )

    def _design_epsilon(self, sampler: str) -> float:
        if self.epsilon is not None:
            return self.epsilon
        assert self.noise_multiplier is not None
        untruncated = accountant.epsilon(
            self.plan(accountant.truncation_of(sampler).untruncated),
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            max_examples_per_user=self.max_examples_per_user,
        )
        return min(untruncated.guarantee, LARGEST_DESIGN_EPSILON)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One row: a plan, and either the noise it needs or the epsilon it has."""

    plan: DpSgdPlan
    noise_multiplier: accountant.NoiseBounds | None
    epsilon: accountant.Bounds | None

    @property
    def padding(self) -> float | None:
        """Rows of padding per expected example of a step, if steps are truncated."""
        if self.plan.truncated_batch_size is None:
            return None
        return self.plan.truncated_batch_size / self.plan.expected_batch_size - 1

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        noise, epsilon = self.noise_multiplier, self.epsilon
        return {
            "sampler": self.plan.sampler,
            "plan": self.plan.to_json(),
            "noise_multiplier": noise and noise.to_json(),
            "epsilon": epsilon and epsilon.to_json(),
            "padding": self.padding,
        }


def answer(question: Question, sampler: str) -> Answer:
    """Returns the row of ``sampler``.

    Args:
      question: What is asked.
      sampler: A registered one.

    Raises:
      InputError: a value out of range, or a sampler without an accountant for the
        relation.
    """
    relation = check_relation(sampler, question.neighboring_relation)
    plan = question.plan(sampler)
    plans.check_epochs(plan)
    if question.epsilon is not None:
        noise = accountant.noise_multiplier(
            plan,
            epsilon=question.epsilon,
            delta=question.delta,
            neighboring_relation=relation,
            max_examples_per_user=question.max_examples_per_user,
        )
        return Answer(plan=plan, noise_multiplier=noise, epsilon=None)
    if question.noise_multiplier is None:
        raise InputError("Expected epsilon or noise_multiplier; got neither.")
    epsilon = accountant.epsilon(
        plan,
        noise_multiplier=question.noise_multiplier,
        delta=question.delta,
        neighboring_relation=relation,
        max_examples_per_user=question.max_examples_per_user,
    )
    return Answer(plan=plan, noise_multiplier=None, epsilon=epsilon)


#: What can be varied, and the values by default (None: around the question's own).
SWEEPS: dict[str, tuple[float, ...] | None] = {
    "batch-size": None,
    "epsilon": (0.5, 1, 2, 3, 4, 6, 8, 10, 16, 32),
    "epochs": (1, 2, 3, 4, 5, 6, 8, 10),
}
#: What a sweep compares the others with.
REFERENCE = plans.POISSON


def sweep_samplers() -> tuple[str, ...]:
    """Returns what a sweep shows by default: closed forms, shuffles, the reference.

    Other samplers take longer at each point.
    """
    return tuple(
        name
        for name in sampler_registry.names()
        if name == REFERENCE
        or sampler_registry.get(name).closed_form
        or sampler_registry.rules(name).num_shuffles is not sampler_registry.no_shuffle
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One point of a sweep: the value that was varied, and the rows there."""

    value: float
    rows: tuple[Answer, ...]

    @property
    def crossed(self) -> tuple[str, ...]:
        """Shuffles that may need *less* noise than Poisson here.

        Their lower bound is below what Poisson needs, so that no order is proven.
        """
        noise = {row.plan.sampler: row.noise_multiplier for row in self.rows}
        poisson = noise.get(REFERENCE)
        if poisson is None or poisson.sufficient is None:
            return ()
        return tuple(
            row.plan.sampler
            for row in self.rows
            if row.plan.num_shuffles > 0
            and row.noise_multiplier is not None
            and row.noise_multiplier.necessary is not None
            and row.noise_multiplier.necessary < poisson.sufficient
        )


def sweep_values(question: Question, axis: str) -> tuple[float, ...]:
    """Returns the default values of a sweep.

    Args:
      question: Around whose batch size others are tried.
      axis: A key of ``SWEEPS``.
    """
    values = SWEEPS[axis]
    if values is not None:
        return values
    sizes = [question.expected_batch_size * 2.0**power for power in range(-4, 5)]
    return tuple(size for size in sizes if 1 <= int(size) <= question.num_examples / 2)


def at(question: Question, axis: str, value: float) -> Question:
    """Returns ``question`` with one thing varied, over whole epochs.

    Args:
      question: What is asked at other values.
      axis: A key of ``SWEEPS``.
      value: Epsilon, or the expected batch size in examples, or epochs.
    """
    if axis == "epsilon":
        return dataclasses.replace(question, epsilon=value)
    size, epochs = question.expected_batch_size, question.num_epochs
    if axis == "batch-size":
        size = int(value)
    else:
        epochs = int(value)
    per_epoch = plans.steps_per_epoch(question.num_examples, size)
    return dataclasses.replace(
        question,
        expected_batch_size=size,
        num_epochs=epochs,
        num_steps=per_epoch * epochs,
        truncated_batch_size=None,
    )


def sweep(
    question: Question, axis: str, samplers: tuple[str, ...] | None = None
) -> list[SweepPoint]:
    """Returns the rows of each sampler at each value of ``axis``.

    Args:
      question: With a target epsilon.
      axis: A key of ``SWEEPS``.
      samplers: Registered ones; None for ``sweep_samplers``.

    Raises:
      InputError: a value out of range.
    """
    if axis not in SWEEPS:
        raise InputError(f"Expected sweep={axis!r} to be one of {', '.join(SWEEPS)}.")
    values = sweep_values(question, axis)
    if not values:
        raise InputError(
            f"Expected num_examples={question.num_examples} >= 2 for a sweep over "
            "batch sizes, which are at most half of it. Sweep over epsilon or epochs."
        )
    if question.epsilon is None:
        raise InputError(
            "Expected a target epsilon for a sweep; got a noise multiplier. Give "
            "--epsilon instead of --noise-multiplier."
        )
    shown = sweep_samplers() if samplers is None else samplers
    return [
        SweepPoint(
            value=value,
            rows=tuple(answer(at(question, axis, value), name) for name in shown),
        )
        for value in values
    ]
