"""Questions, sweeps and constant total noise: what is held, asked for, and checked."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from accounting import comparison
from accounting.comparison import Answer, Line, Question, answer
from accounting.core.intervals import Bounds, NoiseBounds
from accounting.core.validation import InputError
from tests.accounting.plans import make_plan

QUESTION = Question(
    num_examples=10_000,
    expected_batch_size=100,
    num_steps=200,
    num_epochs=2,
    delta=1e-5,
    epsilon=2.0,
)
NOISE = dataclasses.replace(QUESTION, epsilon=None, noise_multiplier=2.0)
STEPS = dataclasses.replace(NOISE, holds_steps=True)
PROFILE = dataclasses.replace(NOISE, epsilon=2.0)
DETERMINISTIC = (Line(sampler="deterministic"),)
PLAN = make_plan("poisson", 10, 1, 1)


def eta_of(question: Question) -> float:
    bounds = Bounds(upper=1.0, method="m")
    plan = question.plan("poisson")
    return comparison.eta(
        Answer(
            question=question, line=Line(sampler="poisson"), plan=plan, bounds=bounds
        )
    )


@given(
    noise=st.floats(0.5, 40),
    steps=st.integers(20, 20_000),
    reference=st.floats(0.1, 50),
)
def test_at_constant_total_noise_eta_is_that_of_the_question(
    noise: float, steps: int, reference: float
) -> None:
    question = dataclasses.replace(STEPS, noise_multiplier=reference)
    line = Line(sampler="poisson", total_noise_steps=steps)
    size = noise / reference * 100 * math.sqrt(200 / steps)
    assume(1 <= size <= 10_000)
    found = line.at(question, "noise-multiplier", noise)
    assert eta_of(found) == pytest.approx(eta_of(question), rel=1e-12)
    assert found.num_steps == steps
    # Half an example at most.
    assert abs(found.expected_batch_size - size) <= 0.5 + 1e-6
    assert found.noise_multiplier == pytest.approx(noise, rel=0.6 / size)


def test_a_batch_size_holds_the_epochs_or_the_steps_as_they_were_asked_for() -> None:
    for question, steps in ((NOISE, 100), (STEPS, 200)):
        found = comparison.at(question, "batch-size", 200.0)
        assert (found.expected_batch_size, found.num_steps) == (200, steps)
        assert comparison.at(question, "num-examples", 40_000.0).num_steps == (
            800 if steps == 100 else 200
        )
    capped = dataclasses.replace(NOISE, truncated_batch_size=150)
    with pytest.raises(InputError, match="each has a cap of its own"):
        comparison.at(capped, "batch-size", 120.0)
    assert comparison.at(capped, "epochs", 3.0).truncated_batch_size == 150


@given(value=st.floats(5e-324, 1e4))
def test_what_is_proven_is_printed_rounded_up_and_lower_bounds_down(
    value: float,
) -> None:
    bounds = Bounds(upper=value, lower=value, method="m")
    noise = NoiseBounds(sufficient=value, necessary=value, method="m")
    for question, found in ((NOISE, bounds), (PROFILE, bounds), (QUESTION, noise)):
        row = Answer(question=question, line=DETERMINISTIC[0], plan=PLAN, bounds=found)
        assert float(row.least_text) <= value <= float(row.proven_text)
        assert row.is_exact
        if question is PROFILE:
            assert float(row.proven_text) <= value * 1.01


@pytest.mark.parametrize(
    ("size", "noise", "steps", "num_examples", "delta", "eta", "epsilon"),
    [
        (16384, 2.5, 72_000, 1_281_167, 8e-7, 0.9706, 8.215),
        (32768, 2.5, 18_000, 1_281_167, 8e-7, 0.9706, 8.215),
        (4096, 3.0, 2_500, 50_000, 1e-5, 0.9654, 7.484),
    ],
)
def test_published_eta_and_closed_form_of_tan(
    size: int,
    noise: float,
    steps: int,
    num_examples: int,
    delta: float,
    eta: float,
    epsilon: float,
) -> None:
    question = Question(
        num_examples=num_examples,
        expected_batch_size=size,
        num_steps=steps,
        num_epochs=1,
        delta=delta,
        noise_multiplier=noise,
    )
    found = answer(question, "poisson")
    assert comparison.eta(found) == pytest.approx(eta, abs=6e-5)
    assert comparison.tan_epsilon(found) == pytest.approx(epsilon, abs=6e-4)
    # Far below its range the true epsilon is far larger.
    little = dataclasses.replace(
        question, expected_batch_size=128, noise_multiplier=128 * noise / size
    )
    found = answer(little, "poisson")
    assert comparison.eta(found) == pytest.approx(eta, abs=6e-5)
    assert found.bounds.guarantee > 10 * comparison.tan_epsilon(found)
