"""One thing varied: what each way of making batches needs, or gives, at each value.

Formal guarantees:
  - Every value is checked, and every plan made, before anything is answered.
  - At constant total noise ``q sqrt(T/2) / s`` is that of the question, at each value
    and for each number of steps.

*The total amount of noise (TAN)*, and its closed form of epsilon.  At large noise the
privacy of DP-SGD depends only on ``eta = q sqrt(T/2) / s``, the inverse of the total
amount of noise.  Small batches with proportionally less noise keep eta, the number of
steps and the noise of a mean gradient.  They train alike at a fraction of the cost,
which makes a search over hyper-parameters affordable.

Not a guarantee of privacy: ``TanEstimate`` approximates Renyi accounting at large noise
and is no bound.  Ask `accounting.core.accountant` for one.

References:
  Sander, Stock and Sablayrolles (2023), arXiv:2210.03403, Equation 4.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from accounting.core import accountant, sampler_registry
from accounting.core import plan as plans
from accounting.core.neighboring_relation import MOST_EXAMPLES_PER_USER, NAMES
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_choice, check_float, check_int
from accounting.planning.comparison import (
    DELTA,
    EPSILON,
    NOISE,
    Answer,
    Line,
    Question,
    answer_for,
    check_target,
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
    estimate: TanEstimate | None = None


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


def _configuration(question: Question, plan: DpSgdPlan) -> Configuration:
    if question.noise_multiplier is None or question.asks_for != EPSILON:
        raise InputError(
            f"Expected a sweep that answers epsilon for TAN, not {question.asks_for}. "
            "Give --noise-multiplier, and vary something else."
        )
    return Configuration(plan=plan, noise_multiplier=question.noise_multiplier)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A parameter that a sweep can vary.

    Attributes:
      label: Name on the axis of a plot.
      field: Attribute of a question.
      whole: Whether values are integers.
      linear: Whether its axis is linear instead of logarithmic.
      check: (question, value) -> the value.  Refuses what the plan of a question does
        not.
    """

    label: str
    field: str
    whole: bool = True
    linear: bool = False
    check: Callable[[Question, Any], Any] = lambda _, value: value

    def read(self, question: Question) -> float | None:
        """Returns the value of a question."""
        found: float | None = getattr(question, self.field)
        return found


def _checked_size(question: Question, value: int) -> int:
    if question.truncated_batch_size is not None:
        raise InputError(
            f"Expected no truncated_batch_size={question.truncated_batch_size} where "
            "batch sizes vary: each has a cap of its own. Use --truncated-batch-size "
            "auto."
        )
    return value


def _checked_epsilon(question: Question, value: float) -> float:
    check = check_target if question.asks_for == NOISE else accountant.check_epsilon
    return check(value)


def _checked_noise(question: Question, value: float) -> float:
    if question.noise_multiplier is None:
        raise InputError(
            "Expected a noise multiplier for a sweep over it; got a target epsilon. "
            "Give --noise-multiplier instead of --epsilon."
        )
    return accountant.check_noise_multiplier(value)


def _checked_count(_: Question, value: int) -> int:
    return check_int(
        "max_examples_per_user",
        value,
        at_least=1,
        at_most=MOST_EXAMPLES_PER_USER,
        remedy="In Python, accounting.planning.groups.user_epsilon bounds larger ones "
        "by groups.",
    )


#: What can be varied, by name.
AXES = {
    "batch-size": Axis(
        label="expected batch size", field="expected_batch_size", check=_checked_size
    ),
    "epsilon": Axis(
        label="epsilon", field="epsilon", whole=False, check=_checked_epsilon
    ),
    "epochs": Axis(label="epochs", field="num_epochs", linear=True),
    "delta": Axis(
        label="delta",
        field="delta",
        whole=False,
        check=lambda _, value: accountant.check_delta(value),
    ),
    "noise-multiplier": Axis(
        label="noise multiplier",
        field="noise_multiplier",
        whole=False,
        check=_checked_noise,
    ),
    "num-steps": Axis(label="steps", field="num_steps", linear=True),
    "num-examples": Axis(label="examples", field="num_examples"),
    "max-examples-per-user": Axis(
        label="examples of a user at most",
        field="max_examples_per_user",
        check=_checked_count,
    ),
}
#: The axis along which total noise can be held.
TOTAL_NOISE_AXIS = "noise-multiplier"
_SCHEDULE = ("expected_batch_size", "num_epochs", "num_steps", "num_examples")


def at(question: Question, axis: str, value: float) -> Question:
    """Returns ``question`` at a value of a sweep; it keeps its epochs, or its steps.

    Args:
      question: The question at another value.
      axis: A key of ``AXES``.
      value: The value.

    Raises:
      InputError: a value out of range.
    """
    chosen = AXES[axis]
    checked = chosen.check(question, int(value) if chosen.whole else value)
    changed = dataclasses.replace(question, **{chosen.field: checked})
    if chosen.field not in _SCHEDULE:
        return changed
    holds_steps = changed.holds_steps
    if chosen.field in ("num_epochs", "num_steps"):
        holds_steps = chosen.field == "num_steps"
    num_steps, num_epochs = plans.steps_and_epochs(
        changed.num_examples,
        changed.expected_batch_size,
        epochs=None if holds_steps else changed.num_epochs,
        num_steps=changed.num_steps if holds_steps else None,
    )
    return dataclasses.replace(
        changed, num_steps=num_steps, num_epochs=num_epochs, holds_steps=holds_steps
    )


def check_values(axis: str, values: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the values of a sweep, in increasing order.

    Args:
      axis: A key of ``AXES``.
      values: At least one.

    Raises:
      InputError: no value, a value out of range, or one that must be an integer.
    """
    check_choice("sweep", axis, tuple(AXES))
    if not values:
        raise InputError(f"Expected values of a sweep over {axis}; got none.")
    for value in values:
        check_float("values", value)
        if AXES[axis].whole and not float(value).is_integer():
            raise InputError(
                f"Expected values={value:g} of a sweep over {axis} to be an integer."
            )
    return tuple(sorted(set(values)))


def at_total_noise(
    question: Question, noise_multiplier: float, num_steps: int
) -> Question:
    """Returns the question with another noise and batch size, and the same eta.

    The batch size is the nearest integer; the noise has exactly the same eta.

    Args:
      question: A question with a noise multiplier.
      noise_multiplier: Noise standard deviation over the clip norm, above 0.
      num_steps: At least 1.

    Raises:
      InputError: a value out of range, or one that no batch size has.
    """
    size, steps = question.expected_batch_size, question.num_steps
    _checked_noise(question, noise_multiplier)
    assert question.noise_multiplier is not None
    noise = check_float("noise_multiplier", question.noise_multiplier, above=0.0)
    check_float("noise_multiplier", noise_multiplier, above=0.0)
    check_int("num_steps", num_steps, at_least=1)
    # Growth of the batch size for each unit of the noise multiplier.
    slope = size / noise * (steps / num_steps) ** 0.5
    scaled = round(slope * noise_multiplier)
    if not 1 <= scaled <= question.num_examples:
        raise InputError(
            f"Expected noise_multiplier={noise_multiplier:g} to be from "
            f"{1 / slope:.2g} to {question.num_examples / slope * 0.999:.3g} at "
            f"{num_steps:,} steps and this total noise: batches have 1 to num_examples="
            f"{question.num_examples} examples. Give such --values."
        )
    changed = at(question, "batch-size", scaled)
    changed = dataclasses.replace(changed, noise_multiplier=scaled / slope)
    return at(changed, "num-steps", num_steps)


#: Below this noise multiplier epsilon is not a function of the total noise.
LEAST_NOISE = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TanEstimate:
    """The closed form of TAN.  An estimate for tuning, never a guarantee.

    Attributes:
      epsilon: ``eta^2 + 2 eta sqrt(ln(1/delta))``.
      eta: Inverse of the total amount of noise, ``q sqrt(T/2) / s``.
      warning: Why the estimate must not be used, or None if it may.
    """

    epsilon: float
    eta: float
    warning: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """A plan and its noise.  All public.

    Attributes:
      plan: A plan of Poisson batches, truncated or not.
      noise_multiplier: Noise standard deviation over the clip norm; above 0.

    Raises:
      InputError: name, value, bound.

    Example:
      >>> plan = DpSgdPlan(sampler="poisson", num_examples=1_281_167,
      ...                  expected_batch_size=16384, num_steps=72_000)
      >>> round(Configuration(plan=plan, noise_multiplier=2.5).eta, 4)
      0.9706
    """

    plan: DpSgdPlan
    noise_multiplier: float

    def __post_init__(self) -> None:
        check_choice("sampler", self.plan.sampler, sampler_registry.poisson_samplers())
        check_float("noise_multiplier", self.noise_multiplier, above=0)

    @property
    def eta(self) -> float:
        """Inverse of the total amount of noise."""
        rate = float(self.plan.sampling_probability)
        return rate * math.sqrt(self.plan.num_steps / 2) / self.noise_multiplier

    def estimate(self, *, delta: float) -> TanEstimate:
        """Returns the closed form, which ignores truncation."""
        accountant.check_delta(delta)
        eta, noise = self.eta, self.noise_multiplier
        warning = None
        if noise < LEAST_NOISE:
            warning = (
                f"noise_multiplier={noise:g} is below {LEAST_NOISE:g}: the true "
                "epsilon grows beyond this estimate, at 0.5 and below without bound."
            )
        value = eta**2 + 2 * eta * math.sqrt(-math.log(delta))
        return TanEstimate(epsilon=value, eta=eta, warning=warning)
