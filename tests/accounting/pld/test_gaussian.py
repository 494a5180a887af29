"""The closed forms, against fifty digits."""

import math

import mpmath
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accounting.core import accountant
from accounting.core.pld import dominating_pairs


def exact(noise, epsilon):
    mpmath.mp.dps = 60
    s, e = mpmath.mpf(noise), mpmath.mpf(epsilon)
    return mpmath.ncdf(1 / (2 * s) - e * s) - mpmath.e**e * mpmath.ncdf(
        -1 / (2 * s) - e * s
    )


#: noise 0.35: epsilon -> published delta of deterministic batches, one epoch.
PUBLISHED = {
    0.5: 8.053036e-01,
    2: 6.438782e-01,
    6: 1.666956e-01,
    10: 1.003678e-02,
}


@pytest.mark.parametrize("epsilon", PUBLISHED)
def test_published_delta_of_deterministic_batches(small_plan, epsilon):
    plan = small_plan("deterministic", num_epochs=1)
    answer = accountant.delta(plan, noise_multiplier=0.35, epsilon=epsilon)
    # A closed form: all seven printed digits.
    assert answer.kind == "exact"
    assert answer.upper == pytest.approx(PUBLISHED[epsilon], rel=5e-7)


def test_without_noise_nothing_is_private():
    assert dominating_pairs.gaussian_delta(0.0, 5.0) == 1.0
    assert dominating_pairs.gaussian_epsilon(0.0, 0.1) == math.inf


@given(noise=st.floats(0.05, 1e12), epsilon=st.floats(0.0, 100.0))
@example(noise=1e12, epsilon=0.0)
def test_delta_is_rounded_to_both_sides(noise, epsilon):
    # The example is seen to fail where two nearly equal terms are subtracted, and
    # others without the factored tail, where they cancel.
    truth = exact(noise, epsilon)
    low = dominating_pairs.gaussian_delta(noise, epsilon, upper=False)
    high = dominating_pairs.gaussian_delta(noise, epsilon)
    assert low <= truth <= high
    if truth > 1e-290:
        assert high <= low * (1 + 1e-9)


@given(noise=st.floats(0.05, 1e3), delta=st.floats(1e-15, 0.1))
def test_epsilon_is_rounded_to_both_sides(noise, delta):
    low = dominating_pairs.gaussian_epsilon(noise, delta, upper=False)
    high = dominating_pairs.gaussian_epsilon(noise, delta)
    assert exact(noise, high) <= delta
    assert dominating_pairs.gaussian_delta(noise, high) <= delta
    assert low == 0 or exact(noise, low) >= delta
    assert high <= low * (1 + 1e-6) + 1e-9


@given(epsilon=st.floats(1e-3, 1e3), delta=st.floats(1e-15, 0.1))
def test_noise_is_rounded_to_both_sides(epsilon, delta):
    low = dominating_pairs.gaussian_noise(epsilon, delta, upper=False)
    high = dominating_pairs.gaussian_noise(epsilon, delta)
    assert exact(high, epsilon) <= delta <= exact(low, epsilon)
    assert dominating_pairs.gaussian_delta(high, epsilon) <= delta
    assert high <= low * (1 + 1e-6)


def test_beyond_the_range_of_numbers_nothing_is_claimed():
    for noise, epsilon in ((1e-310, 1.0), (1e200, 1e200)):
        assert dominating_pairs.gaussian_delta(noise, epsilon) == 1.0
        assert dominating_pairs.gaussian_delta(noise, epsilon, upper=False) == 0.0
    # What underflows is not zero.
    assert dominating_pairs.gaussian_delta(1.0, 1e3) > 0
    assert dominating_pairs.gaussian_delta(1.0, 1e3, upper=False) == 0.0
    assert dominating_pairs.gaussian_epsilon(1e-200, 0.1) == math.inf
