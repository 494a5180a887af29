"""Below a delta of 1e-20: right beside closed forms, and monotone throughout."""

import math

import mpmath
import pytest

from accounting.core import accountant
from accounting.core.numerics import LEAST_TIGHT_DELTA
from accounting.core.plan import DpSgdPlan
from accounting.core.pld import dominating_pairs
from accounting.core.pld.privacy_profile import Chernoff
from tests.accounting.plans import make_plan


def tail(point, mean, noise):
    return mpmath.ncdf((mean - point) / mpmath.mpf(noise))


def exact(rate, noise, epsilon):
    """Delta of removing the row of one step: its loss exceeds epsilon above a point."""
    rate, noise, scale = (mpmath.mpf(one) for one in (rate, noise, math.exp(epsilon)))
    point = noise**2 * mpmath.log((scale - 1 + rate) / rate) + mpmath.mpf(1) / 2
    above = (1 - rate) * tail(point, 0, noise) + rate * tail(point, 1, noise)
    return above - scale * tail(point, 0, noise)


@pytest.mark.parametrize("epsilon", [8.0, 12.0, 20.0, 25.0])
@pytest.mark.parametrize(("rate", "noise"), [(1.0, 1.0), (0.01, 1.0), (0.3, 0.8)])
def test_it_is_a_bound_and_within_a_factor_of_a_thousand(rate, noise, epsilon):
    """Seen to fail with c(r) squared, and with losses rounded down."""
    pair = dominating_pairs.remove_pair(rate, noise)
    bound = Chernoff([(1.0, pair)], 1)
    with mpmath.workdps(60):
        value = exact(rate, noise, epsilon)
        assert value <= bound.delta(epsilon) <= 1000 * value
        back = bound.epsilon(bound.delta(epsilon))
        assert back == pytest.approx(epsilon, rel=1e-9)


def test_many_steps_are_one_gaussian_mechanism():
    bound = Chernoff([(1.0, dominating_pairs.remove_pair(1.0, 10.0))], 100)
    with mpmath.workdps(60):
        for epsilon in (10.0, 20.0):
            value = exact(1.0, 1.0, epsilon)
            assert value <= bound.delta(epsilon) <= 30 * value


@pytest.mark.parametrize("steps", [1, 3])
def test_losses_outside_of_the_support_are_added(steps, monkeypatch):
    """A support that leaves out 1e-3 has no finite loss of more than 3.6."""
    monkeypatch.setattr(dominating_pairs, "_OUTSIDE", 1e-3)
    bound = Chernoff([(1.0, dominating_pairs.remove_pair(1.0, 1.0))], steps)
    epsilon = 3.7 * steps
    with mpmath.workdps(60):
        assert exact(1.0, 1 / math.sqrt(steps), epsilon) <= bound.delta(epsilon) < 4e-3
    assert bound.epsilon(9e-4) == math.inf


TRUNCATED = {"sampler": "truncated-poisson", "num_examples": 1000}
PLANS = [
    DpSgdPlan(
        **TRUNCATED, expected_batch_size=161, num_steps=74, truncated_batch_size=190
    ),
    DpSgdPlan(
        **TRUNCATED, expected_batch_size=161, num_steps=74, truncated_batch_size=400
    ),
    make_plan("poisson", 10**6, 9, 50),
]


@pytest.mark.parametrize("plan", PLANS)
def test_epsilon_falls_with_delta_and_delta_of_it_is_no_larger(plan):
    """Seen to rise from 2.01 to 2.15, and to jump by a factor of 40 at 1e-168."""
    last = math.inf
    for exponent in (280, 168, 90, 23, 20.1, 20, 19):
        delta = 10.0**-exponent
        found = accountant.epsilon(plan, noise_multiplier=1.96, delta=delta).guarantee
        assert found <= last * (1 + 1e-6)
        last = found
        if math.isfinite(found):
            back = accountant.delta(plan, noise_multiplier=1.96, epsilon=found)
            assert back.guarantee <= delta * (1 + 1e-4)


@pytest.mark.parametrize("plan", PLANS[1:])
def test_delta_falls_with_epsilon_across_the_change_of_bounds(plan):
    """Seen to fail without the floor under the tight bound."""
    middle = accountant.epsilon(
        plan, noise_multiplier=1.96, delta=0.9 * LEAST_TIGHT_DELTA
    ).guarantee
    last = 1.0
    for factor in (0.2, 0.5, 0.8, 0.99, 1.01, 1.2):
        found = accountant.delta(
            plan, noise_multiplier=1.96, epsilon=middle * factor
        ).guarantee
        assert found <= last * (1 + 1e-6)
        last = found
