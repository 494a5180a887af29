"""Sweeps: what is held, what is asked for, and that checks come before the work."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from accounting.claims.model_mix import Mixing
from accounting.core import accountant
from accounting.core.validation import InputError
from accounting.planning import sweeps
from accounting.planning.comparison import Line, Question, answer
from accounting.planning.sweeps import SweepLine

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
DETERMINISTIC = (SweepLine(sampler="deterministic"),)


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("epochs", (1.0, 0.0)),
        ("epochs", (1.0, 1.5)),
        ("epsilon", (1.0, float("nan"))),
        ("delta", (1e-5, 1.0)),
        ("batch-size", (100.0, 20_000.0)),
        ("num-examples", (10_000.0, 50.0)),
        ("num-steps", (100.0, 150.0)),
        ("max-examples-per-user", (1.0, 51.0)),
        ("max-examples-per-user", (1.0, 2.5)),
        ("batch-size", ()),
        ("nosuch", (1.0,)),
    ],
)
def test_every_value_is_checked_and_every_plan_made_before_anything_is_answered(
    axis: str, values: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(sweeps, "answer_for", lambda *each: started.append(each))
    with pytest.raises(InputError):
        sweeps.sweep(QUESTION, axis, DETERMINISTIC, values=values)
    assert not started


def eta_of(question: Question) -> float:
    noise = question.noise_multiplier
    assert noise is not None
    return sweeps.Configuration(
        plan=question.plan("poisson"), noise_multiplier=noise
    ).eta


@given(
    noise=st.floats(0.5, 40),
    steps=st.integers(20, 20_000),
    reference=st.floats(0.1, 50),
)
def test_at_constant_total_noise_eta_is_that_of_the_question(
    noise: float, steps: int, reference: float
) -> None:
    question = dataclasses.replace(STEPS, noise_multiplier=reference)
    line = SweepLine(sampler="poisson", total_noise_steps=steps)
    eta = eta_of(question)
    size = noise / reference * 100 * math.sqrt(200 / steps)
    assume(1 <= size <= 10_000)
    found = line.at(question, "noise-multiplier", noise)
    assert eta_of(found) == pytest.approx(eta, rel=1e-12)
    assert found.num_steps == steps
    # Half an example at most.
    assert abs(found.expected_batch_size - size) <= 0.5 + 1e-6
    assert found.noise_multiplier == pytest.approx(noise, rel=0.6 / size)


def test_a_batch_size_holds_the_epochs_or_the_steps_as_they_were_asked_for() -> None:
    for question, steps in ((NOISE, 100), (STEPS, 200)):
        found = sweeps.at(question, "batch-size", 200.0)
        assert (found.expected_batch_size, found.num_steps) == (200, steps)
        assert sweeps.at(question, "num-examples", 40_000.0).num_steps == (
            800 if steps == 100 else 200
        )
    capped = dataclasses.replace(NOISE, truncated_batch_size=150)
    with pytest.raises(InputError, match="each has a cap of its own"):
        sweeps.at(capped, "batch-size", 120.0)
    assert sweeps.at(capped, "epochs", 3.0).truncated_batch_size == 150


def test_what_has_no_total_noise_is_refused() -> None:
    line = SweepLine(sampler="poisson", total_noise_steps=100)
    with pytest.raises(InputError, match="got a target epsilon"):
        line.at(QUESTION, "noise-multiplier", 2.0)
    silent = dataclasses.replace(STEPS, noise_multiplier=0.0)
    with pytest.raises(InputError, match="noise_multiplier=0"):
        line.at(silent, "noise-multiplier", 2.0)
    with pytest.raises(InputError, match="answers epsilon for TAN, not delta"):
        sweeps.sweep(STEPS, "epsilon", DETERMINISTIC, values=(1.0,), estimates=True)


def test_the_answer_is_what_is_not_given() -> None:
    [needed] = sweeps.sweep(QUESTION, "epsilon", DETERMINISTIC, values=(3.0,)).points[0]
    plan = needed.answer.plan
    found = accountant.noise_multiplier(plan, epsilon=3.0, delta=1e-5)
    assert needed.answer.bounds == found
    [point] = sweeps.sweep(NOISE, "delta", DETERMINISTIC, values=(1e-6,)).points[0]
    bounds = accountant.epsilon(plan, noise_multiplier=2.0, delta=1e-6)
    assert point.answer.bounds == bounds
    [point] = sweeps.sweep(NOISE, "epsilon", DETERMINISTIC, values=(3.0,)).points[0]
    assert point.answer.bounds == accountant.delta(
        plan, noise_multiplier=2.0, epsilon=3.0
    )


def test_a_privacy_profile_is_of_one_mechanism() -> None:
    lines = (SweepLine(sampler="truncated-poisson"),)
    swept = sweeps.sweep(NOISE, "epsilon", lines, values=(0.5, 2.0))
    assert len({point.answer.plan for point in swept.points[0]}) == 1


def test_a_theorem_answers_for_what_it_is_about_alone() -> None:
    mixing = Mixing(mix_width=0.1, l2_norm_clip=1.0)
    line = Line(sampler="poisson", theorem=mixing, label="mixed")
    for changes in (
        {"neighboring_relation": "ADD_OR_REMOVE_ONE"},
        {"max_examples_per_user": 2},
    ):
        with pytest.raises(InputError, match="for ModelMix"):
            answer(dataclasses.replace(NOISE, **changes), line)
    with pytest.raises(InputError, match="analysed for no other"):
        answer(NOISE, dataclasses.replace(line, sampler="deterministic"))
    profile = dataclasses.replace(NOISE, epsilon=1.0)
    found = answer(profile, line)
    assert found.name == "poisson, mixed"
    assert found.bounds == mixing.delta(found.plan, noise_multiplier=2.0, epsilon=1.0)
