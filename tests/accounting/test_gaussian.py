"""The closed forms, against fifty digits."""

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import gaussian


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


def test_without_noise_nothing_is_private():
    assert gaussian.gaussian_delta(0.0, 5.0) == 1.0
    assert gaussian.gaussian_epsilon(0.0, 0.1) == math.inf
