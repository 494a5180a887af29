"""Profiles of runs and of Gaussian releases, and their bounds on a grid."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from accounting import profiles
from accounting.core import accountant
from accounting.core.pld.dominating_pairs import gaussian_delta, gaussian_epsilon
from accounting.profiles import Profile, bounds_on_grid
from tests.accounting.plans import make_plan

DELTA = 1e-6
SMALL = make_plan("poisson", 16_000, 256, 126)


def test_a_gaussian_release_has_its_closed_form():
    for noise in (0.3, 1.0, 8.0):
        found = profiles.gaussian(noise)
        exact = gaussian_epsilon(noise, DELTA)
        assert exact * (1 - 1e-9) <= found.epsilon(DELTA) <= exact * (1 + 1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampler": "truncated-poisson", "truncated_batch_size": 400},
        {"sampler": "truncated-poisson", "truncated_batch_size": 260},
        {"sampler": "deterministic"},
        {"sampler": "dynamic-shuffle"},
        {"sampler": "balls-and-bins"},
    ],
)
def test_a_run_of_any_sampler_is_the_accountants(changes):
    plan = dataclasses.replace(SMALL, num_examples=16_128, num_epochs=2, **changes)
    exact = accountant.epsilon(plan, noise_multiplier=1.5, delta=DELTA).guarantee
    assert max(profiles.run(plan, 1.5).deltas(exact)) == pytest.approx(DELTA, rel=1e-4)


@pytest.mark.parametrize(
    "asked",
    [
        {"neighboring_relation": "REPLACE_ONE"},
        {"neighboring_relation": "ADD_OR_REMOVE_ONE"},
        {"max_examples_per_user": 3},
    ],
)
def test_relations_and_users_are_the_accountants(asked):
    found = profiles.run(SMALL, 2.0, **asked).epsilon(DELTA)
    exact = accountant.epsilon(SMALL, noise_multiplier=2.0, delta=DELTA, **asked)
    assert found == pytest.approx(exact.guarantee, rel=1e-4)


def test_an_epsilon_before_the_cost_of_a_cap_rises_is_found():
    """Of 10.8: leaps led from 8 to 128, where a cap of 400 costs more than delta."""
    capped = {"sampler": "truncated-poisson", "truncated_batch_size": 400}
    plan = dataclasses.replace(SMALL, **capped)
    exact = accountant.epsilon(plan, noise_multiplier=0.5, delta=DELTA).guarantee
    assert exact > 8
    assert profiles.run(plan, 0.5).epsilon(DELTA) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("noise", [0.5, 4.0])
def test_a_costly_profile_is_asked_at_few_points_and_stays_a_bound(noise):
    """Seen to fail with bounds between the points that are 1 % too small."""
    asked = []

    def deltas(epsilon):
        asked.append(epsilon)
        return profiles.gaussian(noise).deltas(epsilon)

    spacing = gaussian_epsilon(noise, DELTA) / 600
    both = bounds_on_grid(Profile(deltas, is_costly=True), spacing, DELTA * 1e-3)
    exact = [gaussian_delta(noise, spacing * place) for place in range(len(both[0]))]
    assert len(asked) < len(exact) / 7
    for one in both:
        assert np.all(one >= np.array(exact) * (1 - 1e-9))
        near = one >= DELTA
        assert np.all(one[near] <= np.array(exact)[near] * 1.05)


def test_bounds_of_1_do_not_end_the_search():
    """As the best of many noisy scores has; seen to fail if they count as flat."""
    exact = profiles.gaussian(0.5)
    vague = Profile(lambda x: exact.deltas(x) if x > 3 else (1.0, 1.0))
    found = bounds_on_grid(vague, 0.01, DELTA)
    assert found[0][-1] <= DELTA
    assert 0.01 * len(found[0]) > gaussian_epsilon(0.5, DELTA)


def test_group_epsilon_follows_group_privacy(small_plan):
    plan = small_plan("poisson")
    arguments = {"noise_multiplier": 2.0, "delta": 1e-5}
    one = profiles.group_epsilon(plan, group_size=1, **arguments)
    assert one == accountant.epsilon(plan, **arguments).guarantee
    # Three examples, and two groups of thirty.
    groups = (plan, 2.0, 3, 1), (small_plan("deterministic"), 40.0, 2, 30)
    for plan, noise, size, unit in groups:
        asked = {"noise_multiplier": noise, "max_examples_per_user": unit}
        found = profiles.group_epsilon(plan, delta=1e-5, group_size=size, **asked)
        # The pair it stands on: (e, d) for one with d = delta (e^e-1)/(e^(k e)-1).
        single = found / size
        share = 1e-5 * math.expm1(single) / math.expm1(found)
        assert accountant.delta(plan, epsilon=single, **asked).guarantee <= share
        assert found > size * accountant.epsilon(plan, delta=1e-5, **asked).guarantee
    silent = {"noise_multiplier": 0.0, "delta": 1e-5, "group_size": 2}
    assert profiles.group_epsilon(plan, **silent) == math.inf
