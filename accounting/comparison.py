"""What ``dpsgd plan`` asks: one question for several samplers, or at several values.

Every value of a sweep is checked, and every plan is made, before anything is answered.
Proven numbers are rounded up, and lower bounds are rounded down.  The theorem of a
training method answers only what it covers: one example, under zero-out.

*The total amount of noise (TAN)* and its closed form of epsilon: at large noise the
privacy of DP-SGD depends only on ``eta = q sqrt(T/2) / s``, the inverse of the total
amount of noise.  Small batches with proportionally less noise keep eta, the number of
steps and the noise of a mean gradient.  They train alike at a fraction of the cost,
which makes a search over hyper-parameters affordable.  A sweep at constant total noise
keeps eta at each value and for each number of steps.  `tan_epsilon` approximates Renyi
accounting at large noise: it is an estimate for tuning and no bound.

References:
  Sander, Stock and Sablayrolles (2023), arXiv:2210.03403, Equation 4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accounting.core import accountant, sampler_registry
from accounting.core import plan as plans
from accounting.core.claim import check_unit, plan_of_all
from accounting.core.intervals import EXACT, delta_text
from accounting.core.neighboring_relation import (
    NAMES,
    REPLACE_SPECIAL,
    brought,
    is_supported,
)
from accounting.core.plan import DpSgdPlan
from accounting.core.validation import InputError, check_choice, check_float, check_int

if TYPE_CHECKING:
    from accounting.core.claim import Theorem

#: For a larger epsilon no cap of truncated batches is computed: exp overflows soon.
LARGEST_DESIGN_EPSILON = 700.0
#: Noise for a smaller epsilon is more than 1,000 times the gradients that it hides.
LEAST_TARGET_EPSILON = 1e-4
#: What a question asks for.
NOISE, EPSILON, DELTA = "noise multiplier", "epsilon", "delta"


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

    Raises:
      InputError: a target or noise out of range, or neither is given.
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
        accountant.check_delta(self.delta)
        if self.noise_multiplier is not None:
            accountant.check_noise_multiplier(self.noise_multiplier)
            if self.epsilon is not None:
                accountant.check_epsilon(self.epsilon)
        elif self.epsilon is None:
            raise InputError("Expected epsilon or noise_multiplier; got neither.")
        else:
            remedy = "Raise it: 0.1 is strong, and what is smaller drowns gradients."
            least = LEAST_TARGET_EPSILON
            check_float("epsilon", self.epsilon, at_least=least, remedy=remedy)

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

    def in_words(self, *varied: str) -> str:
        """Returns two lines: target and privacy unit, then data set and schedule.

        Args:
          *varied: Keys of ``AXES`` that are left out, as a sweep varies them.
        """
        noise, epsilon, asks_for = self.noise_multiplier, self.epsilon, self.asks_for
        users, runs = self.max_examples_per_user, self.of_runs
        epochs = plans.epochs_in_words(
            self.num_examples,
            self.expected_batch_size,
            num_steps=self.num_steps,
            num_epochs=self.num_epochs,
        )
        named = {
            "epsilon": f"epsilon={epsilon!r}" if asks_for == NOISE else "",
            "noise-multiplier": "" if noise is None else f"noise multiplier {noise!r}",
            "delta": "" if asks_for == DELTA else f"delta={self.delta!r}",
            "relation": f"{NAMES[self.neighboring_relation]} relation",
            "max-examples-per-user": f"users with at most {users} examples"
            if users > 1
            else "",
            "of-runs": f"of {runs} runs together" if runs > 1 else "",
        }
        schedule = {
            "num-examples": f"n={self.num_examples:,} examples",
            "batch-size": f"b={self.expected_batch_size:,} per step",
            "num-steps": f"T={self.num_steps:,} steps",
            "epochs": epochs,
        }
        lines = (
            ", ".join(
                text for name, text in each.items() if text and name not in varied
            )
            for each in (named, schedule)
        )
        return f"{asks_for} at " + "\n".join(lines)

    def plan(self, sampler: str) -> DpSgdPlan:
        """Returns the plan of ``sampler``, with the least cap if none is given.

        Raises:
          InputError: a value out of range, or a sampler whose cap must be given.
        """
        rules = sampler_registry.rules(sampler)
        bands = self.bands if rules.cyclic else None
        size = self.truncated_batch_size if rules.truncates else None
        if rules.truncates and size is None:
            size = accountant.smallest_truncated_batch_size(
                num_examples=self.num_examples,
                expected_batch_size=self.expected_batch_size,
                num_steps=self.num_steps,
                epsilon=self._design_epsilon(sampler),
                delta=self.delta,
                sampler=sampler,
                bands=bands,
            )
        return DpSgdPlan(
            sampler=sampler,
            num_examples=self.num_examples,
            expected_batch_size=self.expected_batch_size,
            num_steps=self.num_steps,
            num_epochs=self.num_epochs,
            truncated_batch_size=size,
            bands=bands,
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
      total_noise_steps: Steps of a line along which batch sizes grow with the noise, so
        that the total noise is that of the question; None where it is not held.
    """

    sampler: str
    theorem: Theorem | None = None
    label: str = ""
    total_noise_steps: int | None = None

    @property
    def name(self) -> str:
        """Name of the line."""
        return f"{self.sampler}, {self.label}" if self.label else self.sampler

    def at(self, question: Question, axis: str, value: float) -> Question:
        """Returns what is asked of this line at one value of a sweep.

        Args:
          question: What is asked at other values.
          axis: A key of ``AXES``; ``TOTAL_NOISE_AXIS`` where total noise is held.
          value: The value of the axis.

        Raises:
          InputError: a value out of range.
        """
        if self.total_noise_steps is not None:
            return at_total_noise(question, value, self.total_noise_steps)
        return at(question, axis, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, and the bounds on what was asked for.

    Attributes:
      question: What was asked.
      line: The sampler and mechanism.
      plan: How batches are made.
      bounds: Bounds on what was asked for.
    """

    question: Question
    line: Line
    plan: DpSgdPlan
    bounds: accountant.Bounds | accountant.NoiseBounds

    @property
    def proven(self) -> float | None:
        """The proven upper bound, or sufficient noise; None if nothing is proven."""
        return self.bounds.proven

    @property
    def proven_text(self) -> str:
        """The proven value, rounded up; "unknown" if there is none."""
        return self._text(self.bounds.proven, math.ceil)

    @property
    def least_text(self) -> str:
        """The lower bound, rounded down; "unknown" if there is none."""
        return self._text(self.bounds.least, math.floor)

    def _text(self, value: float | None, side: Callable[[float], int]) -> str:
        if value is None:
            return "unknown"
        if not math.isfinite(value):
            return "infinite"
        if self.question.asks_for == DELTA:
            return delta_text(value, side)
        return f"{side(value * 1e4) / 1e4:.4f}"

    @property
    def is_exact(self) -> bool:
        """Whether the bounds are equal up to rounding."""
        return self.bounds.kind == EXACT

    @property
    def padding(self) -> float | None:
        """Rows of padding per expected example of a step, if steps are truncated."""
        if self.plan.truncated_batch_size is None:
            return None
        return self.plan.truncated_batch_size / self.plan.expected_batch_size - 1

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict."""
        asked = {name.replace(" ", "_"): None for name in (NOISE, EPSILON, DELTA)}
        return {
            "name": self.line.name,
            "sampler": self.plan.sampler,
            "plan": self.plan.to_json(),
            **asked,
            self.question.asks_for.replace(" ", "_"): self.bounds.to_json(),
            "padding": self.padding,
        }


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
        and is_supported(sampler, **question.unit)
        and (whole or not rules.once_per_epoch)
    )


def answer(question: Question, line: Line | str) -> Answer:
    """Returns the answer of a line.

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
    """Returns the answer of a line, given its plan.

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
    return Answer(question=question, line=line, plan=plan, bounds=found)


def checked_plan(question: Question, line: Line) -> DpSgdPlan:
    """Returns the plan of a line, if its sampler and theorem cover the question.

    Args:
      question: What is asked.
      line: The sampler and theorem.

    Raises:
      InputError: as for `answer`.
    """
    if line.theorem is not None:
        users, relation = question.max_examples_per_user, question.neighboring_relation
        check_unit(line.theorem, users, relation)
    brought(line.sampler, **question.unit)
    plan = question.plan(line.sampler)
    plans.check_epochs(plan)
    if line.theorem is not None:
        line.theorem.check_plan(plan)
    plan_of_all(plan, question.of_runs, line.theorem)  # or refuses
    return plan


# -- sweeps ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axis:
    """A parameter that a sweep can vary.

    Attributes:
      field: Attribute of a question.
      whole: Whether values are integers.
    """

    field: str
    whole: bool = True


#: What can be varied, by name.
AXES = {
    "batch-size": Axis("expected_batch_size"),
    "epsilon": Axis("epsilon", whole=False),
    "epochs": Axis("num_epochs"),
    "delta": Axis("delta", whole=False),
    "noise-multiplier": Axis("noise_multiplier", whole=False),
    "num-steps": Axis("num_steps"),
    "num-examples": Axis("num_examples"),
    "max-examples-per-user": Axis("max_examples_per_user"),
}
#: The axis along which total noise can be held.
TOTAL_NOISE_AXIS = "noise-multiplier"
_SCHEDULE = ("batch-size", "epochs", "num-steps", "num-examples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What was varied, and the answers of each line.

    Attributes:
      question: What is asked at all values.
      axis: A key of ``AXES``.
      values: Values of the axis, increasing.
      lines: Lines of a table or picture.
      answers: Answers of each line, one per value.
    """

    question: Question
    axis: str
    values: tuple[float, ...]
    lines: tuple[Line, ...]
    answers: tuple[tuple[Answer, ...], ...]

    def value(self, answer: Answer) -> float:
        """Returns the value of the axis at which an answer was asked for."""
        found: float = getattr(answer.question, AXES[self.axis].field)
        return found

    @property
    def asks_for(self) -> str:
        """As `Question.asks_for`, at each value."""
        return self.answers[0][0].question.asks_for

    @property
    def title(self) -> str:
        """What is asked for, and what is held."""
        first = self.answers[0][0]
        varied = {self.axis}
        if self.axis in _SCHEDULE:
            varied.add("epochs" if self.question.holds_steps else "num-steps")
        if self.axis in ("epochs", "num-steps"):
            varied |= {"epochs", "num-steps"}
        held = ""
        if self.lines[0].total_noise_steps is not None:
            varied |= {"batch-size", "num-steps", "epochs"}
            held = f",\ntotal noise 1/eta with eta={eta(first):.4g}"
        elif self.asks_for == DELTA and first.plan.truncated_batch_size:
            held = f",\ncap as for delta={self.question.delta!r}"
        # As asked at the values, where epsilon may be no target.
        asked = dataclasses.replace(self.question, epsilon=first.question.epsilon)
        return asked.in_words(*varied) + held


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
        or sampler_registry.rules(name).shuffles
    )


def sweep(
    question: Question,
    axis: str,
    lines: tuple[Line, ...],
    *,
    values: tuple[float, ...],
    progress: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Returns the answers of each line at each value of ``axis``.

    Args:
      question: What is asked at other values.
      axis: A key of ``AXES``.
      lines: At least one.
      values: Values of the axis.
      progress: Called with what comes next, in words.

    Raises:
      InputError: a value out of range, or nothing is proven for a sampler.
    """
    chosen = check_values(axis, values)
    planned = []
    for line in lines:
        asked = [line.at(question, axis, value) for value in chosen]
        planned.append([(line, each, checked_plan(each, line)) for each in asked])
    answers = []
    for of_line in planned:
        found = []
        for value, (line, each, plan) in zip(chosen, of_line, strict=True):
            progress(f"{line.name}, {axis}={value:g}")
            found.append(answer_for(each, line, plan))
        answers.append(tuple(found))
    return Sweep(
        question=question,
        axis=axis,
        values=chosen,
        lines=lines,
        answers=tuple(answers),
    )


def check_values(axis: str, values: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the values of a sweep, in increasing order.

    Args:
      axis: A key of ``AXES``.
      values: At least one.

    Raises:
      InputError: there is no value, or one is out of range or should be an integer.
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


def at(question: Question, axis: str, value: float) -> Question:
    """Returns ``question`` at a value of a sweep; it keeps its epochs, or its steps.

    Args:
      question: The question at another value.
      axis: A key of ``AXES``.
      value: The value.

    Raises:
      InputError: a value out of range.
    """
    if axis == "batch-size" and question.truncated_batch_size is not None:
        raise InputError(
            f"Expected no truncated_batch_size={question.truncated_batch_size} where "
            "batch sizes vary: each has a cap of its own. Use --truncated-batch-size "
            "auto."
        )
    if axis == TOTAL_NOISE_AXIS and question.noise_multiplier is None:
        raise InputError(
            "Expected a noise multiplier for a sweep over it; got a target epsilon. "
            "Give --noise-multiplier instead of --epsilon."
        )
    chosen: Any = int(value) if AXES[axis].whole else value
    changed = dataclasses.replace(question, **{AXES[axis].field: chosen})
    if axis not in _SCHEDULE:
        return changed
    steps = axis == "num-steps" or (question.holds_steps and axis != "epochs")
    num_steps, num_epochs = plans.steps_and_epochs(
        changed.num_examples,
        changed.expected_batch_size,
        epochs=None if steps else changed.num_epochs,
        num_steps=changed.num_steps if steps else None,
    )
    return dataclasses.replace(
        changed, num_steps=num_steps, num_epochs=num_epochs, holds_steps=steps
    )


# -- total amount of noise -------------------------------------------------------------

#: Below this noise multiplier epsilon is not a function of the total noise.
LEAST_NOISE = 2.0


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
    asked = at(question, TOTAL_NOISE_AXIS, noise_multiplier)
    check_float("noise_multiplier", noise_multiplier, above=0.0)
    noise = check_float("noise_multiplier", question.noise_multiplier or 0.0, above=0.0)
    check_int("num_steps", num_steps, at_least=1)
    # Growth of the batch size for each unit of the noise multiplier.
    slope = asked.expected_batch_size / noise * (asked.num_steps / num_steps) ** 0.5
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


def eta(answer: Answer) -> float:
    """Returns the inverse of the total amount of noise, of Poisson batches.

    Raises:
      InputError: the batches are not Poisson batches, or there is no noise.
    """
    plan, noise = answer.plan, answer.question.noise_multiplier or 0.0
    check_choice("sampler", plan.sampler, sampler_registry.poisson_samplers())
    check_float("noise_multiplier", noise, above=0)
    return float(plan.sampling_probability) * math.sqrt(plan.num_steps / 2) / noise


def tan_epsilon(answer: Answer) -> float:
    """Returns TAN's closed form of epsilon, which ignores truncation; no guarantee.

    It is ``eta^2 + 2 eta sqrt(ln(1/delta))``, and below ``LEAST_NOISE`` far too small.

    Example:
      >>> question = Question(num_examples=50_000, expected_batch_size=4096,
      ...                     num_steps=2500, num_epochs=1, delta=1e-5,
      ...                     noise_multiplier=3.0)
      >>> round(tan_epsilon(answer(question, "poisson")), 3)
      7.484
    """
    found = eta(answer)
    return found**2 + 2 * found * math.sqrt(-math.log(answer.question.delta))
