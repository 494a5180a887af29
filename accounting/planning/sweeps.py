"""One thing varied: what each way of making batches needs, or gives, at each value.

Formal guarantees:
  - Every value is checked, and every plan made, before anything is computed.
  - At constant total noise ``q sqrt(T/2) / s`` is that of the question, at each value
    and for each number of steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from accounting import accountant, sampler_registry
from accounting import plan as plans
from accounting.neighboring_relation import NAMES
from accounting.planning import tan
from accounting.planning.comparison import (
    DELTA,
    NOISE,
    Answer,
    Line,
    Question,
    answer,
    checked_plan,
)
from accounting.validation import InputError, check_choice, check_float, check_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """Something that can be varied.

    Attributes:
      label: What it is called in a picture.
      whole: Whether values are integers.
      defaults: Question -> values.
      change: (question, value) -> the question at that value.  Refuses a value that is
        out of range.
      read: Question -> its value.
      linear: Whether a picture has it on a linear scale.
    """

    label: str
    whole: bool
    defaults: Callable[[Question], tuple[float, ...]]
    change: Callable[[Question, Any], Question]
    read: Callable[[Question], float | None]
    linear: bool = False


def _scheduled(question: Question, **changes: Any) -> Question:
    """Returns a question with its steps, or its epochs, held."""
    changed = dataclasses.replace(question, **changes)
    num_steps, num_epochs = plans.steps_and_epochs(
        changed.num_examples,
        changed.expected_batch_size,
        epochs=None if changed.holds_steps else changed.num_epochs,
        num_steps=changed.num_steps if changed.holds_steps else None,
    )
    return dataclasses.replace(changed, num_steps=num_steps, num_epochs=num_epochs)


def _with_batch_size(question: Question, value: int) -> Question:
    if question.truncated_batch_size is not None:
        raise InputError(
            f"Expected no truncated_batch_size={question.truncated_batch_size} where "
            "batch sizes vary: each has a cap of its own. Use --truncated-batch-size "
            "auto."
        )
    return _scheduled(question, expected_batch_size=value)


def _with_epochs(question: Question, value: int) -> Question:
    return _scheduled(question, num_epochs=value, holds_steps=False)


def _with_steps(question: Question, value: int) -> Question:
    return _scheduled(question, num_steps=value, holds_steps=True)


def _with_examples(question: Question, value: int) -> Question:
    return _scheduled(question, num_examples=value)


def _with_epsilon(question: Question, value: float) -> Question:
    return dataclasses.replace(question, epsilon=accountant.check_epsilon(value))


def _with_delta(question: Question, value: float) -> Question:
    return dataclasses.replace(question, delta=accountant.check_delta(value))


def _with_noise(question: Question, value: float) -> Question:
    if question.noise_multiplier is None:
        raise InputError(
            "Expected a noise multiplier for a sweep over it; got a target epsilon. "
            "Give --noise-multiplier instead of --epsilon."
        )
    noise = accountant.check_noise_multiplier(value)
    return dataclasses.replace(question, noise_multiplier=noise)


def _batch_sizes(question: Question) -> tuple[float, ...]:
    sizes = [question.expected_batch_size * 2.0**power for power in range(-4, 5)]
    most = question.num_examples / 2
    found = tuple(size for size in sizes if size.is_integer() and 1 <= size <= most)
    if not found:
        raise InputError(
            f"Expected num_examples={question.num_examples} >= 2 for a sweep over "
            "batch sizes, which are at most half of it. Sweep over epsilon or epochs."
        )
    return found


def _numbers_of_examples(question: Question) -> tuple[float, ...]:
    number = question.num_examples
    numbers = (number // 4, number // 2, number, 2 * number, 4 * number, 8 * number)
    return tuple(n for n in numbers if n >= question.expected_batch_size)


def _numbers_of_steps(question: Question) -> tuple[float, ...]:
    steps = question.num_steps
    return tuple(sorted({-(-steps * part // 8) for part in range(1, 9)}))


def _deltas(question: Question) -> tuple[float, ...]:
    powers = [question.delta * 10.0**power for power in range(-3, 4)]
    return tuple(delta for delta in powers if delta < 0.01) or (question.delta,)


_EPSILONS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 16.0, 32.0)
_EPOCHS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
#: Across the privacy wall.
_NOISE = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0)

#: What can be varied, by name.
AXES = {
    "batch-size": Axis(
        label="expected batch size",
        whole=True,
        defaults=_batch_sizes,
        change=_with_batch_size,
        read=lambda question: question.expected_batch_size,
    ),
    "epsilon": Axis(
        label="epsilon",
        whole=False,
        defaults=lambda question: _EPSILONS,
        change=_with_epsilon,
        read=lambda question: question.epsilon,
    ),
    "epochs": Axis(
        label="epochs",
        whole=True,
        defaults=lambda question: _EPOCHS,
        change=_with_epochs,
        read=lambda question: question.num_epochs,
        linear=True,
    ),
    "delta": Axis(
        label="delta",
        whole=False,
        defaults=_deltas,
        change=_with_delta,
        read=lambda question: question.delta,
    ),
    "noise-multiplier": Axis(
        label="noise multiplier",
        whole=False,
        defaults=lambda question: _NOISE,
        change=_with_noise,
        read=lambda question: question.noise_multiplier,
    ),
    "num-steps": Axis(
        label="steps",
        whole=True,
        defaults=_numbers_of_steps,
        change=_with_steps,
        read=lambda question: question.num_steps,
        linear=True,
    ),
    "num-examples": Axis(
        label="examples",
        whole=True,
        defaults=_numbers_of_examples,
        change=_with_examples,
        read=lambda question: question.num_examples,
    ),
}
#: The axis along which total noise can be held.
TOTAL_NOISE_AXIS = "noise-multiplier"


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
            return _at_total_noise(question, value, self.total_noise_steps)
        return at(question, axis, value)


def at(question: Question, axis: str, value: float) -> Question:
    """Returns ``question`` with one thing varied.

    Args:
      question: What is asked at other values.
      axis: A key of ``AXES``.
      value: Where.

    Raises:
      InputError: a value out of range.
    """
    return AXES[axis].change(question, int(value) if AXES[axis].whole else value)


def _at_total_noise(
    question: Question, noise_multiplier: float, num_steps: int
) -> Question:
    """Returns the question with another noise and batch size, and the same eta.

    The batch size is the nearest integer; the noise is exactly that of its eta.
    """
    assert question.noise_multiplier is not None
    noise, size, steps = (
        question.noise_multiplier, question.expected_batch_size, question.num_steps
    )  # fmt: skip
    check_float("noise_multiplier", noise_multiplier, above=0.0)
    check_int("num_steps", num_steps, at_least=1)
    # Noise that is one larger makes batches so much larger.
    slope = size / noise * (steps / num_steps) ** 0.5
    scaled = round(slope * noise_multiplier)
    if not 1 <= scaled <= question.num_examples:
        raise InputError(
            f"Expected noise_multiplier={noise_multiplier:g} to be from "
            f"{1 / slope:.2g} to {question.num_examples / slope * 0.999:.3g} at "
            f"{num_steps:,} steps and this total noise: batches have 1 to num_examples="
            f"{question.num_examples} examples. Give such --values."
        )
    changed = _with_batch_size(question, scaled)
    changed = dataclasses.replace(changed, noise_multiplier=scaled / slope)
    return _with_steps(changed, num_steps)


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
      values: Rising.
      lines: Of a table or picture.
      points: Of each line, one for each value.
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
        return _configuration(self.points[0][0].question, self.lines[0]).eta


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
    unit += "" if count == 1 else f", users with at most {count} examples"
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
        or sampler_registry.rules(name).num_shuffles is not sampler_registry.no_shuffle
    )


def check_values(
    question: Question, axis: str, values: tuple[float, ...] | None
) -> tuple[float, ...]:
    """Returns the values of a sweep, rising.

    Args:
      question: Around which the default values are.
      axis: A key of ``AXES``.
      values: None for the default ones.

    Raises:
      InputError: no value, a value out of range, or one that must be an integer.
    """
    check_choice("sweep", axis, tuple(AXES))
    found = AXES[axis].defaults(question) if values is None else values
    if not found:
        raise InputError(f"Expected values of a sweep over {axis}; got none.")
    for value in found:
        check_float("values", value)
        if AXES[axis].whole and not float(value).is_integer():
            raise InputError(
                f"Expected values={value:g} of a sweep over {axis} to be integers."
            )
    return tuple(sorted(set(found)))


def sweep(
    question: Question,
    axis: str,
    lines: tuple[SweepLine, ...],
    *,
    values: tuple[float, ...] | None = None,
    estimates: bool = False,
) -> Sweep:
    """Returns the answers of each line at each value of ``axis``.

    Args:
      question: What is asked at other values.
      axis: A key of ``AXES``.
      lines: At least one.
      values: Of the axis; None for the default ones.
      estimates: Whether TAN's closed form is wanted, of Poisson batches with noise.

    Raises:
      InputError: a value out of range, or nothing is proven for a sampler.
    """
    chosen = check_values(question, axis, values)
    asked = [[line.at(question, axis, value) for value in chosen] for line in lines]
    for line, questions in zip(lines, asked, strict=True):
        for each in questions:
            checked_plan(each, line)
            if estimates:
                _configuration(each, line)
    return Sweep(
        question=question,
        axis=axis,
        values=chosen,
        lines=lines,
        points=tuple(
            tuple(_point(each, line, estimates) for each in questions)
            for line, questions in zip(lines, asked, strict=True)
        ),
    )


def _point(question: Question, line: SweepLine, estimated: bool) -> Point:
    estimate = None
    if estimated:
        estimate = _configuration(question, line).estimate(delta=question.delta)
    return Point(question=question, answer=answer(question, line), estimate=estimate)


def _configuration(question: Question, line: Line) -> tan.Configuration:
    if question.noise_multiplier is None:
        raise InputError("Expected a noise multiplier for TAN; got a target epsilon.")
    return tan.Configuration(
        plan=question.plan(line.sampler), noise_multiplier=question.noise_multiplier
    )
