"""The comparison of ``dpsgd plan``: one target, every way of making batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from accounting import bounds
from accounting import plan as plans
from accounting.plan import DpSgdPlan
from accounting.validation import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked: a data set, a schedule and a target, but no sampler.

    Attributes:
      num_examples, expected_batch_size, num_steps, num_epochs: As in `DpSgdPlan`.
      epsilon: Target; None if the noise is given.
      noise_multiplier: Given noise; None if a target is.
      delta: Of the target.
      truncated_batch_size: For truncated Poisson; None for the least that is safe.
    """

    num_examples: int
    expected_batch_size: int
    num_steps: int
    num_epochs: int
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    truncated_batch_size: int | None = None

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
                size = bounds.smallest_truncated_batch_size(
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
        untruncated = bounds.epsilon(
            self.plan(plans.POISSON),
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
        )
        return min(untruncated.guarantee, 700.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """One row: a plan, and either the noise it needs or the epsilon it has."""

    plan: DpSgdPlan
    noise_multiplier: bounds.NoiseBounds | None
    epsilon: bounds.Bounds | None

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
      InputError: a value out of range, or a sampler without an accountant.
    """
    plan = question.plan(sampler)
    if question.epsilon is not None:
        noise = bounds.noise_multiplier(
            plan, epsilon=question.epsilon, delta=question.delta
        )
        return Answer(plan=plan, noise_multiplier=noise, epsilon=None)
    if question.noise_multiplier is None:
        raise InputError("Expected epsilon or noise_multiplier; got neither.")
    epsilon = bounds.epsilon(
        plan, noise_multiplier=question.noise_multiplier, delta=question.delta
    )
    return Answer(plan=plan, noise_multiplier=None, epsilon=epsilon)
