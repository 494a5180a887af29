"""The noise of each sampler: its value, its guarantee, and its mark."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from accounting.core import accountant
from pipelines.core.users.bounded import Bounded
from tests.trainer.experiments.conftest import NUM_EXAMPLES, PRIVATE, Work
from trainer.experiments import compare as library
from trainer.experiments.comparison_runs import ComparisonCase, find_cases, silent
from trainer.run import privacy
from trainer.settings.requests import (
    OPTIMISTIC,
    OWN,
    SAME,
    ComparisonSettings,
)
from trainer.settings.train_settings import TrainSettings

MakeSettings = Callable[..., ComparisonSettings]
POISSON, SHUFFLE = "truncated-poisson", "dynamic-shuffle"
MIXED = TrainSettings(
    method="model-mix", optimizer="sgd", learning_rate=1.0, l2_norm_clip=1.0,
    target_epsilon=2.0, target_delta=1e-3,
    method_settings={"mix_width": 0.1, "linf_factor": 100},
)  # fmt: skip


def _cases(
    settings: ComparisonSettings,
) -> dict[tuple[str, str | None], ComparisonCase]:
    """Returns the cases by sampler and rule."""
    cases, _ = find_cases(settings, NUM_EXAMPLES, silent)
    found = {(case.batches.sampler, case.noise_rule): case for case in cases}
    assert len(found) == len(cases)
    return found


def _epsilon(case: ComparisonCase) -> Any:
    return accountant.epsilon(
        case.batches.plan(NUM_EXAMPLES),
        noise_multiplier=case.settings.noise_multiplier or 0.0,
        delta=1e-3,
    )


def test_noise_is_that_of_users_if_they_are_bounded(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings(noise=(OWN,), samplers=(POISSON,))
    (one,), _ = find_cases(settings, NUM_EXAMPLES, silent)
    bounded = Bounded(
        user_column="user", max_examples_per_user=3, num_examples=NUM_EXAMPLES
    )
    (users,), _ = find_cases(settings, NUM_EXAMPLES, silent, bounded)
    noise = users.settings.noise_multiplier
    assert noise is not None
    assert noise > (one.settings.noise_multiplier or 0.0)
    found = accountant.epsilon(
        users.batches.plan(NUM_EXAMPLES),
        noise_multiplier=noise,
        delta=1e-3,
        max_examples_per_user=3,
    )
    assert users.target_epsilon is not None
    assert 0.99 * users.target_epsilon < found.guarantee <= users.target_epsilon


def test_own_noise_differs_between_samplers_and_meets_the_target(
    make_settings: MakeSettings,
) -> None:
    samplers = (POISSON, SHUFFLE, "deterministic")
    found = _cases(make_settings(noise=(OWN,), samplers=samplers))
    noise = [found[name, OWN].settings.noise_multiplier for name in samplers]
    assert len(set(noise)) == len(samplers)
    for name in samplers:
        case = found[name, OWN]
        delta = accountant.delta(
            case.batches.plan(NUM_EXAMPLES),
            noise_multiplier=case.settings.noise_multiplier or 0.0,
            epsilon=2.0,
        )
        assert delta.guarantee <= 1e-3
        # Nor is there much more of it than is needed.
        assert _epsilon(case).guarantee == pytest.approx(2, rel=1e-3)


def test_optimistic_noise_is_what_lower_bounds_allow_and_guarantees_nothing(
    make_settings: MakeSettings,
) -> None:
    found = _cases(make_settings(noise=(OWN, OPTIMISTIC)))
    # The noise of Poisson batches is known: there is nothing to be optimistic about.
    assert set(found) == {(POISSON, OWN), (SHUFFLE, OWN), (SHUFFLE, OPTIMISTIC)}
    bounds = _epsilon(found[SHUFFLE, OPTIMISTIC])
    assert bounds.lower == pytest.approx(2, rel=1e-3)
    assert bounds.upper > 2.05


def test_optimistic_noise_is_marked_wherever_it_is_shown(
    make_settings: MakeSettings, work: Work
) -> None:
    report = library.compare(make_settings(noise=(OWN, OPTIMISTIC)))
    assert work.runs
    marks = {(o.sampler, o.noise_rule): o.guarantee for o in report.outcomes}
    assert marks == {
        (POISSON, OWN): "proven",
        (SHUFFLE, OWN): "proven",
        (SHUFFLE, OPTIMISTIC): "no guarantee",
    }
    report.write(make_settings().out)
    out = make_settings().out
    fields = json.loads((out / "comparison.json").read_bytes())
    assert [each["guarantee"] for each in fields] == list(marks.values())
    [line] = [x for x in report.markdown().splitlines() if "| optimistic" in x]
    assert "| optimistic: no guarantee |" in line
    assert "not proven at this noise" in report.markdown()
    assert (out / "comparison.md").read_text().startswith(report.markdown())


def test_model_mix_gets_the_noise_of_its_theorem_where_that_holds(
    make_settings: MakeSettings,
) -> None:
    rules = (SAME, OWN, OPTIMISTIC)
    settings = make_settings(trained=(PRIVATE, MIXED), noise=rules)
    cases, notes = find_cases(settings, NUM_EXAMPLES, silent)
    [mixed] = [case for case in cases if case.settings.method == "model-mix"]
    assert (mixed.batches.sampler, mixed.noise_rule) == (POISSON, OWN)
    noise = mixed.settings.noise_multiplier
    assert noise is not None
    plan = mixed.batches.plan(NUM_EXAMPLES)
    theorem = privacy.theorem_of_settings(MIXED)
    assert theorem is not None
    found = theorem.epsilon(plan, noise_multiplier=noise, delta=1e-3)
    assert found.guarantee <= 2
    plain = accountant.noise_multiplier(plan, epsilon=2.0, delta=1e-3)
    assert noise < plain.guarantee
    assert notes == [
        "Left out: model-mix on dynamic-shuffle batches, for which its theorem proves "
        "nothing."
    ]
