"""One thing varied: what each way of making batches needs, or gives, at each value.

Formal guarantees:
  - Every value is checked, and every plan made, before anything is answered.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from accounting.core import plan as plans
from accounting.core import sampler_registry
from accounting.core.neighboring_relation import NAMES
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError
from accounting.planning import tan
from accounting.planning.axes import at, at_total_noise, check_values
from accounting.planning.comparison import (
    DELTA,
    EPSILON,
    NOISE,
    Answer,
    Line,
    Question,
    answer_for,
    checked_plan,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepLine(Line):
    """A line of a sweep.

    Attributes:
      total_noise_steps: Steps of a line along which batch sizes grow with the noise, so
        that the total noise is that of the question; None where it is not held.
    """

    total_noise_steps: int | None = None

    def at(self, question: Question, axis: str, value: float) -> Question:
        """Returns what is asked of this line.

        Args:
          question: What is asked at other values.
          axis: A key of ``AXES``; ``TOTAL_NOISE_AXIS`` where total noise is held.
          value: Where.

        Raises:
          InputError: a value out of range.
        """
        if self.total_noise_steps is not None:
            return at_total_noise(question, value, self.total_noise_steps)
        return at(question, axis, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A line at one value.

    Attributes:
      question: What was asked.
      answer: The bounds.
      estimate: TAN's closed form of epsilon, which is no guarantee; None if not asked
        for.
    """

    question: Question
    answer: Answer
    estimate: tan.TanEstimate | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What was varied, and the points of each line.

    Attributes:
      question: What is asked at all values.
      axis: A key of ``AXES``.
      values: Values of the axis, increasing.
      lines: Lines of a table or picture.
      points: Points of each line, one per value.
    """

    question: Question
    axis: str
    values: tuple[float, ...]
    lines: tuple[SweepLine, ...]
    points: tuple[tuple[Point, ...], ...]

    @property
    def asks_for(self) -> str:
        """As `Question.asks_for`, at each value."""
        return self.points[0][0].question.asks_for

    @property
    def title(self) -> str:
        """What is asked for, and what is held."""
        title = "\n".join(_held(self.question, self.axis, self.asks_for, self.eta))
        capped = any(p[0].answer.plan.truncated_batch_size for p in self.points)
        if self.asks_for == DELTA and capped:
            title += f",\ncap as for delta={self.question.delta!r}"
        return title

    @property
    def eta(self) -> float | None:
        """Inverse of the total noise, where it is held."""
        if self.lines[0].total_noise_steps is None:
            return None
        point = self.points[0][0]
        return _configuration(point.question, point.answer.plan).eta


def _held(
    question: Question, axis: str, asks_for: str, eta: float | None
) -> tuple[str, str]:
    """Returns what a title says: first the target, then the data and the schedule."""
    noise, count = question.noise_multiplier, question.max_examples_per_user
    by_axis = {
        "epsilon": f"epsilon={question.epsilon!r}" if asks_for == NOISE else "",
        "noise-multiplier": "" if noise is None else f"noise multiplier={noise!r}",
        "delta": "" if asks_for == DELTA else f"delta={question.delta!r}",
    }
    schedule = {
        "num-examples": f"n={question.num_examples:,} examples",
        "batch-size": f"b={question.expected_batch_size:,} per step",
        "num-steps": f"T={question.num_steps:,} steps" if question.holds_steps else "",
        "epochs": "" if question.holds_steps else question.epochs,
    }
    varied = {axis} if eta is None else {axis, "batch-size", "num-steps"}
    if axis in ("epochs", "num-steps"):
        varied |= {"epochs", "num-steps"}
    held = [text for name, text in by_axis.items() if text and name not in varied]
    held += [] if eta is None else [f"total noise 1/eta with eta={eta:.4g}"]
    rest = [text for name, text in schedule.items() if text and name not in varied]
    unit = f"{NAMES[question.neighboring_relation]} relation"
    if count > 1 and axis != "max-examples-per-user":
        unit += f", users with at most {count} examples"
    return f"{asks_for} at {', '.join(held)}", f"{', '.join(rest)}, {unit}"


def default_samplers() -> tuple[str, ...]:
    """Returns what a sweep shows by default: closed forms, shuffles, Poisson batches.

    Other samplers take longer at each point.
    """
    poisson = sampler_registry.poisson_samplers()
    return tuple(
        name
        for name in sampler_registry.names()
        if name in poisson
        or sampler_registry.get(name).closed_form
        or sampler_registry.rules(name).num_shuffles is not plans.no_shuffle
    )


def sweep(
    question: Question,
    axis: str,
    lines: tuple[SweepLine, ...],
    *,
    values: tuple[float, ...],
    estimates: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Returns the answers of each line at each value of ``axis``.

    Args:
      question: What is asked at other values.
      axis: A key of ``AXES``.
      lines: At least one.
      values: Values of the axis.
      estimates: Whether to add TAN's closed form for Poisson batches with noise.
      progress: Called with what comes next, in words.

    Raises:
      InputError: a value out of range, or nothing is proven for a sampler.
    """
    chosen = check_values(axis, values)
    asked = [
        [_Asked.of(line, line.at(question, axis, value)) for value in chosen]
        for line in lines
    ]
    if estimates:
        for each in itertools.chain(*asked):
            _configuration(each.question, each.plan)
    points = []
    for line, questions in zip(lines, asked, strict=True):
        found = []
        for value, each in zip(chosen, questions, strict=True):
            progress(f"{line.name}, {axis}={value:g}")
            found.append(each.answered(estimate=estimates))
        points.append(tuple(found))
    return Sweep(
        question=question, axis=axis, values=chosen, lines=lines, points=tuple(points)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """A question that can be answered."""

    question: Question
    line: Line
    plan: DpSgdPlan

    @classmethod
    def of(cls, line: Line, question: Question) -> _Asked:
        """Returns the question that a line answers.

        Args:
          line: The sampler, or the method, that is asked about.
          question: The question at one value of the sweep.

        Raises:
          InputError: the line cannot answer it.
        """
        return cls(question=question, line=line, plan=checked_plan(question, line))

    def answered(self, *, estimate: bool) -> Point:
        found = None
        if estimate:
            configuration = _configuration(self.question, self.plan)
            found = configuration.estimate(delta=self.question.delta)
        bounds = answer_for(self.question, self.line, self.plan)
        return Point(question=self.question, answer=bounds, estimate=found)


def _configuration(question: Question, plan: DpSgdPlan) -> tan.Configuration:
    if question.noise_multiplier is None or question.asks_for != EPSILON:
        raise InputError(
            f"Expected a sweep that answers epsilon for TAN, not {question.asks_for}. "
            "Give --noise-multiplier, and vary something else."
        )
    return tan.Configuration(plan=plan, noise_multiplier=question.noise_multiplier)
