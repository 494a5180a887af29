"""The parameters that a sweep can vary.

Formal guarantees:
  - At constant total noise ``q sqrt(T/2) / s`` is that of the question, at each value
    and for each number of steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from accounting.core import accountant
from accounting.core import plan as plans
from accounting.core.neighboring_relation import MOST_EXAMPLES_PER_USER
from accounting.core.validation import InputError, check_choice, check_float, check_int
from accounting.planning.comparison import NOISE, Question, check_target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A parameter that a sweep can vary.

    Attributes:
      label: Name on the axis of a plot.
      whole: Whether values are integers.
      change: (question, value) -> the question at that value.  Refuses a value that is
        out of range.
      read: Question -> its value.
      linear: Whether its axis is linear instead of logarithmic.
    """

    label: str
    whole: bool
    change: Callable[[Question, Any], Question]
    read: Callable[[Question], float | None]
    linear: bool = False


def _scheduled(question: Question, **changes: Any) -> Question:
    """Returns a changed question that keeps its number of steps, or of epochs."""
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
    check = check_target if question.asks_for == NOISE else accountant.check_epsilon
    return dataclasses.replace(question, epsilon=check(value))


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


def _with_count(question: Question, value: int) -> Question:
    count = check_int(
        "max_examples_per_user",
        value,
        at_least=1,
        at_most=MOST_EXAMPLES_PER_USER,
        remedy="In Python, dpsgd.groups.user_epsilon bounds larger ones by groups.",
    )
    return dataclasses.replace(question, max_examples_per_user=count)


#: What can be varied, by name.
AXES = {
    "batch-size": Axis(
        label="expected batch size",
        whole=True,
        change=_with_batch_size,
        read=lambda question: question.expected_batch_size,
    ),
    "epsilon": Axis(
        label="epsilon",
        whole=False,
        change=_with_epsilon,
        read=lambda question: question.epsilon,
    ),
    "epochs": Axis(
        label="epochs",
        whole=True,
        change=_with_epochs,
        read=lambda question: question.num_epochs,
        linear=True,
    ),
    "delta": Axis(
        label="delta",
        whole=False,
        change=_with_delta,
        read=lambda question: question.delta,
    ),
    "noise-multiplier": Axis(
        label="noise multiplier",
        whole=False,
        change=_with_noise,
        read=lambda question: question.noise_multiplier,
    ),
    "num-steps": Axis(
        label="steps",
        whole=True,
        change=_with_steps,
        read=lambda question: question.num_steps,
        linear=True,
    ),
    "num-examples": Axis(
        label="examples",
        whole=True,
        change=_with_examples,
        read=lambda question: question.num_examples,
    ),
    "max-examples-per-user": Axis(
        label="examples of a user at most",
        whole=True,
        change=_with_count,
        read=lambda question: question.max_examples_per_user,
    ),
}
#: The axis along which total noise can be held.
TOTAL_NOISE_AXIS = "noise-multiplier"


def at(question: Question, axis: str, value: float) -> Question:
    """Returns ``question`` at a value of a sweep.

    Args:
      question: The question at another value.
      axis: A key of ``AXES``.
      value: The value.

    Raises:
      InputError: a value out of range.
    """
    return AXES[axis].change(question, int(value) if AXES[axis].whole else value)


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
    _with_noise(question, noise_multiplier)
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
    changed = _with_batch_size(question, scaled)
    changed = dataclasses.replace(changed, noise_multiplier=scaled / slope)
    return _with_steps(changed, num_steps)
