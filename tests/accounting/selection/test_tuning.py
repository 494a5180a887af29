"""What tuning costs: every mode meets its target, and the modes have an order."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest

from accounting import composition
from accounting.claims import selection as tuning
from accounting.claims.selection import Tuning
from accounting.core import accountant
from accounting.core.validation import InputError
from tests.accounting.plans import make_plan
from tests.command_line import invoke

PLAN = make_plan("poisson", 16_000, 256, 126)
ASKED = Tuning(plan=PLAN, num_runs=8, delta=1e-6)
FLAGS = (
    *("--num-examples", "16000", "--batch-size", "256", "--epochs", "2"),
    *("--delta", "1e-6", "--runs", "8"),
)


@pytest.fixture(scope="module", autouse=True)
def _each_price_once():
    """A search for the noise of the best takes ten seconds, and a price one."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name in (
            (composition, "run"), (tuning, "epsilon_of_best"), (Tuning, "for_epsilon"),
        ):  # fmt: skip
            patch.setattr(place, name, functools.cache(getattr(place, name)))
        yield


@pytest.mark.parametrize("mode", [tuning.ONE, tuning.ALL, tuning.BEST])
def test_every_noise_multiplier_was_itself_verified_to_meet_the_target(mode):
    found = ASKED.for_epsilon(mode, 3.0)
    again = ASKED.at_noise(mode, found.noise_multiplier, found.runs)
    assert found.epsilon == again.epsilon
    assert 2.99 < found.epsilon <= 3.0


def test_several_runs_with_one_plan_are_one_run_with_as_many_times_its_steps():
    found = ASKED.at_noise(tuning.ALL, 1.0).epsilon
    longer = dataclasses.replace(PLAN, num_steps=8 * 126)
    exact = accountant.epsilon(longer, noise_multiplier=1.0, delta=1e-6)
    assert found == exact.guarantee


def test_the_best_alone_costs_less_than_all_and_more_than_one():
    one, best, every = (
        ASKED.for_epsilon(mode, 3.0).noise_multiplier
        for mode in (tuning.ONE, tuning.BEST, tuning.ALL)
    )
    assert one < best < every


def test_a_sampler_whose_profile_takes_minutes_is_refused():
    shuffled = dataclasses.replace(PLAN, sampler="dynamic-shuffle", num_examples=16_128)
    with pytest.raises(InputError, match="deterministic or poisson"):
        dataclasses.replace(ASKED, plan=dataclasses.replace(shuffled, num_epochs=2))


def test_plan_prints_prices_as_json():
    found = invoke(["plan", *FLAGS, "--noise-multiplier", "2", "--json"])
    prices = {one["mode"]: one for one in json.loads(found.output)["prices"]}
    assert list(prices) == [tuning.ONE, tuning.ALL, tuning.BEST]
    assert prices["one"]["number_of_runs"] is None
    assert prices["best"]["number_of_runs"]["mean"] > 8
    assert all(math.isfinite(one["epsilon"]) for one in prices.values())
