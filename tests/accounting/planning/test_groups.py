"""Epsilon of users and of groups, and what attacks can do."""

import math

from accounting.core import accountant
from accounting.planning import groups


def test_user_epsilon_is_that_of_the_mixture_where_one_is_proven(small_plan):
    plan = small_plan("poisson")
    asked = {"noise_multiplier": 2.0, "delta": 1e-5}
    for count in (1, 3):
        exact = accountant.epsilon(plan, max_examples_per_user=count, **asked)
        found = groups.user_epsilon(plan, max_examples_per_user=count, **asked)
        assert found == exact.guarantee
    assert found < groups.group_epsilon(plan, group_size=3, **asked)


def test_user_epsilon_of_more_than_a_mixture_is_for_takes_groups_of_mixtures(
    small_plan,
):
    plan = small_plan("deterministic")
    asked = {"noise_multiplier": 40.0}
    found = groups.user_epsilon(plan, delta=1e-5, max_examples_per_user=60, **asked)
    # Two groups of thirty: (e, d) for thirty with d = delta (e^e-1)/(e^2e-1).
    single = found / 2
    share = 1e-5 * math.expm1(single) / math.expm1(found)
    thirty = {"epsilon": single, "max_examples_per_user": 30, **asked}
    assert accountant.delta(plan, **thirty).guarantee <= share
    assert found < groups.group_epsilon(plan, delta=1e-5, group_size=60, **asked)


def test_user_epsilon_is_that_of_a_group_where_no_mixture_is_proven(small_plan):
    plan = small_plan("dynamic-shuffle")
    assert groups._unit_sizes(plan, 3) == (1,)
    assert groups._unit_sizes(small_plan("poisson"), 51) == (26, 1)


def test_group_epsilon_follows_group_privacy(small_plan):
    plan = small_plan("poisson")
    arguments = {"noise_multiplier": 2.0, "delta": 1e-5}
    one = groups.group_epsilon(plan, group_size=1, **arguments)
    three = groups.group_epsilon(plan, group_size=3, **arguments)
    assert one == accountant.epsilon(plan, **arguments).guarantee
    assert three > 3 * one
    # The pair it stands on: (e, d) for one example with d = delta (e^e-1)/(e^3e-1).
    single = three / 3
    share = 1e-5 * math.expm1(single) / math.expm1(three)
    assert (
        accountant.delta(plan, noise_multiplier=2.0, epsilon=single).guarantee <= share
    )


def test_nothing_is_promised_to_a_user_without_noise(small_plan):
    found = groups.user_epsilon(
        small_plan("deterministic"),
        noise_multiplier=0.0,
        delta=1e-5,
        max_examples_per_user=2,
    )
    assert found == math.inf
