"""The best of several runs as the theorem of a run, and the noise of its score."""

from __future__ import annotations

import dataclasses
import math

import pytest

from accounting import profiles
from accounting.claims.selection import (
    SHAPES,
    Selected,
    as_good_as,
    epsilon_of_best,
    law_of,
)
from accounting.core import accountant
from accounting.core.pld.dominating_pairs import gaussian_noise
from accounting.core.validation import InputError
from tests.accounting.plans import make_plan
from tests.accounting.selection.laws import law

PLAN = make_plan("poisson", 16_000, 256, 126)
#: With this noise a run of the plan has epsilon 1 at delta 1e-6.
NOISE, DELTA = 1.19113, 1e-6
BEST = Selected(num_runs=4, shape=3.0, l2_norm_clip="auto")


def test_epsilon_is_that_of_best_of_for_one_run():
    found = BEST.epsilon(PLAN, noise_multiplier=NOISE, delta=DELTA)
    alone = accountant.epsilon(PLAN, noise_multiplier=NOISE, delta=DELTA).guarantee
    run = profiles.run(PLAN, NOISE)
    assert found.guarantee == epsilon_of_best(run, as_good_as(4, 3.0), DELTA)
    assert 1.1 * alone < found.guarantee < 2 * alone


def test_the_law_is_named_by_two_numbers():
    for shape in SHAPES:
        named = None if math.isinf(shape) else shape
        assert law_of(4, named) == as_good_as(4, shape)
        assert Selected(num_runs=4, shape=named, l2_norm_clip=1.0).law == law_of(
            4, named
        )
    with pytest.raises(InputError, match=r"shape=2.0 of the number of runs to be one"):
        Selected(num_runs=4, shape=2.0, l2_norm_clip=1.0)


def test_the_noise_meets_the_target_and_little_less_does_not():
    """Of a Gaussian, whose price is quick; test_tuning searches that of Poisson."""
    plan = dataclasses.replace(PLAN, sampler="deterministic", num_examples=16_128)
    asked = {"epsilon": 1.0, "delta": DELTA}
    noise = BEST.noise_multiplier(plan, **asked).guarantee
    assert BEST.epsilon(plan, noise_multiplier=noise, delta=DELTA).guarantee <= 1.0
    less = BEST.epsilon(plan, noise_multiplier=0.999 * noise, delta=DELTA)
    assert less.guarantee > 1.0
    assert noise > accountant.noise_multiplier(plan, **asked).guarantee


@pytest.mark.parametrize(
    ("alone", "shape", "together"),
    [(0.3, 1.0, 0.48506), (1.0, 1.0, 1.56684), (0.3, 3.0, 0.54488),
     (1.0, 3.0, 1.70813)],
)  # fmt: skip
def test_the_best_noisy_score_costs_what_an_independent_computation_says(
    alone, shape, together
):
    # That computation has 14,000 cells of 1 - u, and is looser by up to 4 %.
    score = profiles.gaussian(gaussian_noise(alone, DELTA))
    found = epsilon_of_best(score, law(shape, 16.0), DELTA)
    assert 0.96 * together < found < together


def test_samplers_without_a_profile_are_refused_by_name():
    plan = make_plan("balls-and-bins", 100, 10, 10, epochs=1)
    with pytest.raises(InputError, match="sampler='balls-and-bins' of several runs"):
        BEST.epsilon(plan, noise_multiplier=1.0, delta=DELTA)
    with pytest.raises(InputError, match="the others take minutes"):
        BEST.check_plan(plan)
