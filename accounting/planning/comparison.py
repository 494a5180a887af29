"""The comparison of ``dpsgd plan``: one target, every way of making batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from accounting import accountant
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
      truncated_batch_size: For truncated Poisson; None for the least that is safe.
      neighboring_relation: One of `relations.RELATIONS`.
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

    def plan(self, sampler: str) -> DpSgdPlan:
        """Returns the plan of ``sampler``, truncated safely if the size is ours."""
        untruncated = {
            "num_examples": self.num_examples,
            "expected_batch_size": self.expected_batch_size,
            "num_steps": self.num_steps,
        }
        size = None
        if sampler == plans.TRUNCATED_POISSON:
            size = self.truncated_batch_size
            if size is None:
                size = accountant.smallest_truncated_batch_size(
                    **untruncated, epsilon=self._design_epsilon(), delta=self.delta
                )
        return DpSgdPlan(
            sampler=sampler,
            num_epochs=self.num_epochs,
            truncated_batch_size=size,
            **untruncated,
        )

    def _design_epsilon(self) -> float:
        if self.epsilon is not None:
            return self.epsilon
        assert self.noise_multiplier is not None
        untruncated = accountant.epsilon(
            self.plan(plans.POISSON),
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
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
        )
        return Answer(plan=plan, noise_multiplier=noise, epsilon=None)
    if question.noise_multiplier is None:
        raise InputError("Expected epsilon or noise_multiplier; got neither.")
    epsilon = accountant.epsilon(
        plan,
        noise_multiplier=question.noise_multiplier,
        delta=question.delta,
        neighboring_relation=relation,
    )
    return Answer(plan=plan, noise_multiplier=None, epsilon=epsilon)


#: What can be varied, and the values by default (None: around the question's own).
SWEEPS: dict[str, tuple[float, ...] | None] = {
    "batch-size": None,
    "epsilon": (0.5, 1, 2, 3, 4, 6, 8, 10, 16, 32),
    "epochs": (1, 2, 3, 4, 5, 6, 8, 10),
}
#: A sweep shows these unless told otherwise.
SWEEP_SAMPLERS = (
    plans.DETERMINISTIC,
    plans.PERSISTENT_SHUFFLE,
    plans.DYNAMIC_SHUFFLE,
    plans.POISSON,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a sweep: the value that was varied, and the rows there."""

    value: float
    rows: tuple[Answer, ...]

    @property
    def crossed(self) -> tuple[str, ...]:
        """Shuffles that may need *less* noise than Poisson here.

        Their lower bound is below what Poisson needs, so that no order is proven.
        """
        noise = {row.plan.sampler: row.noise_multiplier for row in self.rows}
        poisson = noise.get(plans.POISSON)
        if poisson is None or poisson.sufficient is None:
            return ()
        return tuple(
            sampler
            for sampler in (plans.PERSISTENT_SHUFFLE, plans.DYNAMIC_SHUFFLE)
            if (row := noise.get(sampler)) is not None
            and row.necessary is not None
            and row.necessary < poisson.sufficient
        )


def sweep_values(question: Question, axis: str) -> tuple[float, ...]:
    """Returns the default values of a sweep."""
    values = SWEEPS[axis]
    if values is not None:
        return values
    sizes = [question.expected_batch_size * 2.0**power for power in range(-4, 5)]
    return tuple(size for size in sizes if 1 <= int(size) <= question.num_examples / 2)


def at(question: Question, axis: str, value: float) -> Question:
    """Returns ``question`` with one thing varied, over whole epochs."""
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
    question: Question, axis: str, samplers: tuple[str, ...] = SWEEP_SAMPLERS
) -> list[Point]:
    """Returns the rows of each sampler at each value of ``axis``.

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
    return [
        Point(
            value=value,
            rows=tuple(answer(at(question, axis, value), name) for name in samplers),
        )
        for value in values
    ]
