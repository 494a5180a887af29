"""The closed forms, against fifty digits."""

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import bounds, gaussian


def exact(noise, epsilon):
    mpmath.mp.dps = 60
    s, e = mpmath.mpf(noise), mpmath.mpf(epsilon)
    return mpmath.ncdf(1 / (2 * s) - e * s) - mpmath.e**e * mpmath.ncdf(
        -1 / (2 * s) - e * s
    )


@given(noise=st.floats(0.05, 1e3), epsilon=st.floats(0.0, 100.0))
def test_delta_matches_high_precision(noise, epsilon):
    # Seen to fail without the factored tail, where the two terms cancel.
    value = float(exact(noise, epsilon))
    if value > 1e-250:
        assert gaussian.gaussian_delta(noise, epsilon) == pytest.approx(value, rel=1e-8)


@given(noise=st.floats(0.05, 1e3), delta=st.floats(1e-15, 0.1))
def test_epsilon_is_on_the_private_side(noise, delta):
    epsilon = gaussian.gaussian_epsilon(noise, delta)
    assert gaussian.gaussian_delta(noise, epsilon) <= delta
    if epsilon > 1e-9:
        assert gaussian.gaussian_delta(noise, epsilon * (1 - 1e-6)) > delta * (1 - 1e-6)


@given(epsilon=st.floats(1e-3, 1e3), delta=st.floats(1e-15, 0.1))
def test_noise_is_on_the_private_side(epsilon, delta):
    noise = gaussian.gaussian_noise(epsilon, delta)
    assert gaussian.gaussian_delta(noise, epsilon) <= delta
    assert gaussian.gaussian_delta(noise * (1 - 1e-6), epsilon) > delta * (1 - 1e-4)


#: noise 0.35: epsilon -> published delta of deterministic batches, one epoch.
PUBLISHED = {
    0.5: 8.053036e-01,
    1: 7.572536e-01,
    2: 6.438782e-01,
    4: 3.837565e-01,
    6: 1.666956e-01,
    8: 5.006763e-02,
    10: 1.003678e-02,
}


@pytest.mark.parametrize("epsilon", PUBLISHED)
def test_published_delta_of_deterministic_batches(small_plan, epsilon):
    plan = small_plan("deterministic", num_epochs=1)
    answer = bounds.delta(plan, noise_multiplier=0.35, epsilon=epsilon)
    # A closed form: all seven printed digits.
    assert answer.kind == "exact"
    assert answer.upper == pytest.approx(PUBLISHED[epsilon], rel=5e-7)


def test_without_noise_nothing_is_private():
    assert gaussian.gaussian_delta(0.0, 5.0) == 1.0
    assert gaussian.gaussian_epsilon(0.0, 0.1) == math.inf
