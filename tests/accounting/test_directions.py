"""Removing an example and adding one: apart where they differ, and never mixed up.

The profile of a run, of which selections are bounded, has both.
"""

import pytest

from accounting import profiles
from accounting.core import accountant
from accounting.core.pld.privacy_profile import StepsProfile
from accounting.core.samplers import poisson
from tests.accounting.plans import make_plan


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
def test_poisson_agrees_with_both_of_dp_accountings(epsilon):
    from dp_accounting.pld import privacy_loss_distribution

    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        0.8, sampling_prob=0.05, value_discretization_interval=1e-3
    ).self_compose(50)
    found = [
        StepsProfile(directions=(step,), num_steps=50).delta(epsilon)
        for step in poisson.steps(0.05, 0.8)
    ]
    both = theirs._pmf_remove, theirs._pmf_add
    exact = [other.get_delta_for_epsilon(epsilon) for other in both]
    assert found == pytest.approx(exact, rel=2e-3)
    # Apart by more than the tolerance: seen to fail with the directions swapped.
    assert found[0] > 1.01 * found[1]


def test_adding_without_noise_by_hand():
    # Absent from all 2 steps with probability 0.9^2: 1 - e^epsilon 0.81, at least 0.
    run = profiles.run(make_plan("poisson", 100, 10, 2), 0.0)
    assert run.deltas(0.1) == pytest.approx((0.19, 1 - 1.1051709180756477 * 0.81))
    assert run.deltas(1.0)[1] == 0.0


def test_revealed_draws_bound_delta():
    """Little noise and a large epsilon.  Seen to fail: 0.9, the rate of taking part."""
    plan = make_plan("truncated-poisson", 100, 90, 1, cap=90)
    found = accountant.delta(plan, noise_multiplier=0.015, epsilon=5000.0)
    assert found.guarantee < 1e-100
