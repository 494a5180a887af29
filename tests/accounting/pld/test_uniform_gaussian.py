"""Moments of a shifted Gaussian plus uniform: thirty digits, limits, monotonicity."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.claims.model_mix import log_density, log_excess_moments


def exact(shift, width, order):
    """The same integral by mpmath, from the definition."""
    import mpmath as mp

    with mp.workdps(30):
        s, w = mp.mpf(shift), mp.mpf(width)

        def density(x):
            x = -abs(x)
            return (mp.ncdf(x + w / 2) - mp.ncdf(x - w / 2)) / w

        def integrand(x):
            here = density(x)
            return density(x - s) ** order * here ** (1 - order) - here

        ends = [-w / 2 - 15, w / 2 + order * s + 15]
        points = sorted({*ends, -w / 2, -w / 2 + s + 5, mp.mpf(0), w / 2, w / 2 + 5})
        return float(mp.log(mp.quad(integrand, [p for p in points if p <= ends[1]])))


@pytest.mark.parametrize(
    ("shift", "width", "order"),
    [
        (0.2985, 33.58, 4),  # the authors' default configuration
        (2.985, 33.58, 3),  # the same without a bound on coordinates
        (0.01, 1.5, 12),
        (1e-3, 5.0, 2),
        (1.0, 400.0, 6),
    ],
)
def test_moments_are_exact_and_from_above(shift, width, order):
    found = float(log_excess_moments(shift, width, 16)[order - 2])
    assert 0 <= found - exact(shift, width, order) < 1e-9


@pytest.mark.parametrize("width", [0.3, 0.999, 1.001, 8.0])
def test_the_density_is_that_of_the_sum(width):
    import mpmath as mp

    for x in (0.0, 0.7, width / 2, 12.0):
        with mp.workdps(50):
            w = mp.mpf(width)
            area = mp.ncdf(-mp.mpf(x) + w / 2) - mp.ncdf(-mp.mpf(x) - w / 2)
            expected = float(mp.log(area / w))
        for sign in (1, -1):
            found = log_density(np.array([sign * x]), width)[0]
            assert found == pytest.approx(expected, abs=1e-12)


@given(
    shift=st.floats(1e-3, 4.0),
    width=st.floats(0.0, 60.0),
    growth=st.floats(1.01, 3.0),
    order=st.integers(2, 24),
)
def test_moments_grow_with_the_shift_and_fall_with_the_width(
    shift, width, growth, order
):
    here = log_excess_moments(shift, width, order)
    assert (log_excess_moments(growth * shift, width, order) > here).all()
    wider = log_excess_moments(shift, growth * width + 0.01, order)
    # Of the narrowest uniforms the excess over the Gaussian is below the rounding.
    assert (wider <= here + 1e-9).all()
    assert width < 0.1 or (wider < here).all()
