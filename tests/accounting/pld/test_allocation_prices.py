"""Prices of sums of likelihood ratios: enclosed by an independent method, and tight."""

import math

import numpy as np
import pytest
from scipy import integrate, special

from accounting.claims.allocation import (
    allocation_loss,
    allocation_prices,
    random_allocation,
)
from accounting.claims.allocation.allocation_prices import Prices
from accounting.core.pld import gaussian


def call(ratios, k):
    gains = np.maximum(ratios.values / ratios.num_terms - k, 0.0)
    return float(ratios.masses @ gains) + ratios.lost


def put(ratios, k):
    gains = np.maximum(k - ratios.values / ratios.num_terms, 0.0)
    return float(ratios.masses @ gains) + ratios.zero_mass * k


@pytest.mark.parametrize(
    ("noise", "steps", "calls", "puts"),
    [
        # Light tails, and a price of a thousandth down to one of 1e-11.
        (20.0, 100, (1.0, 1.01, 1.03), (1.0, 0.99, 0.97)),
        # One large ratio is enough to exceed what is asked.
        (0.55, 562, (1.0, 10.0, 1000.0), (1.0, 0.6, 0.5)),
        # All ratios are close to 1.
        (581.0, 1000, (1.0, 1.0002), (1.0, 0.9998)),
    ],
)
def test_both_bounds_lie_between_those_of_doubling(noise, steps, calls, puts):
    """By another method, whose bounds are far apart.

    Seen to fail with the cut left out, and with strikes in units of 1.0001 of t.
    """
    above, below = (
        allocation_prices.enclosed(noise, steps, upper) for upper in (True, False)
    )
    most, least = (
        random_allocation.allocation(noise, steps, upper, 200)
        for upper in (True, False)
    )
    for price, strikes in ((call, calls), (put, puts)):
        for k in strikes:
            assert price(least, k) <= price(below, k) * (1 + 1e-9)
            assert price(below, k) <= price(above, k) <= price(below, k) * (1 + 3e-4)
            assert price(above, k) <= price(most, k) * (1 + 1e-9)


def test_two_ratios_by_quadrature():
    noise, k = 1.5, 2.0

    def given(x):
        # Black and Scholes: a call on the second ratio.
        strike = 2 * k - np.exp((2 * x - 1) / (2 * noise**2))
        density = np.exp(-((x / noise) ** 2) / 2) / (noise * np.sqrt(2 * np.pi))
        if strike <= 0:
            return density * (1 - strike)
        d = -np.log(strike) * noise
        upper, lower = special.ndtr(d + 0.5 / noise), special.ndtr(d - 0.5 / noise)
        return density * (upper - strike * lower)

    exact = integrate.quad(given, -15, 17, epsabs=0, epsrel=1e-9, limit=500)[0] / 2
    above, below = (
        call(allocation_prices.enclosed(noise, 2, upper), k) for upper in (True, False)
    )
    assert below <= exact * (1 + 1e-8)
    assert above >= exact * (1 - 1e-8)
    assert above <= below * (1 + 1e-4)


@pytest.mark.parametrize("sign", [1, -1])
def test_prices_enclose_those_of_an_enumerated_sum(sign):
    """Seen to fail with what smoothing adds left in the lower bound."""
    masses = np.array([0.3, 0.3, 0.25, 0.1, 0.05])
    values = np.array([0.25, 0.5, 1.0, 2.0, 8.0])
    values /= masses @ values
    one = random_allocation.Ratios(
        num_terms=1, values=values, masses=masses, zero_mass=0.0, lost=0.0
    )
    group = allocation_prices._group(one, 3, sign, 3.0)
    strikes, high, low = allocation_prices._group_prices(group)
    sums = np.add.outer(np.add.outer(values, values), values).ravel()
    weights = np.multiply.outer(np.multiply.outer(masses, masses), masses).ravel()
    exact = np.maximum(sign * sums - strikes[:, None], 0.0) @ weights
    assert np.all(low <= exact * (1 + 1e-9) + 1e-15)
    assert np.all(high >= exact * (1 - 1e-9) - 1e-15)
    assert (high - low).max() < 1e-3


def test_masses_and_mean_are_kept():
    for upper in (True, False):
        ratios = allocation_prices.enclosed(2.0, 30, upper)
        mean = float(ratios.masses @ ratios.values) / 30 + ratios.lost
        assert mean == pytest.approx(1.0, rel=1e-12)
        assert ratios.masses.sum() + ratios.zero_mass == pytest.approx(1.0, rel=1e-12)
        assert np.all(np.diff(ratios.values) > 0)
        assert ratios.masses.min() >= 0


def priced(strikes, factor):
    """Prices of an exponential distribution, the smaller of both times a factor."""
    calls = np.exp(-strikes)
    puts = (calls + strikes - 1) * factor
    calls = np.where(strikes <= 1, puts + 1 - strikes, calls * factor)
    return Prices(strikes, calls + strikes - 1, calls)


def test_lines_between_strikes_lie_below_and_chords_above():
    """Of an exponential distribution, whose prices are known up to a thousandth.

    Seen to fail with lines through the next strike instead of the one beyond it.
    """
    rng = np.random.default_rng(3)
    strikes = np.sort(rng.uniform(0.2, 4.0, 60))
    wrong = 1e-3 * rng.uniform(size=60)
    high, low = priced(strikes, 1 + wrong), priced(strikes, 1 - wrong)
    points = np.linspace(0.0, 6.0, 2001)
    for prices, sign in (
        (allocation_prices._with_ends(high), 1),
        (allocation_prices._lines(high, low), -1),
    ):
        corners, kinks = allocation_prices._convex(prices)
        assert np.all(kinks >= 0)
        puts = np.maximum(points[:, None] - corners, 0.0) @ kinks
        calls = np.maximum(corners - points[:, None], 0.0) @ kinks + prices.calls[-1]
        assert np.all(sign * (puts - (np.exp(-points) + points - 1)) >= -1e-12)
        assert np.all(sign * (calls - np.exp(-points)) >= -1e-12)
        assert np.abs(calls - np.exp(-points)).max() < 0.02


def test_corners_lie_below_a_convex_function_between_its_bounds():
    """Seen to fail with the nearer strike from above, and with the farther from below.

    Bounds are far apart, and cells of very different widths.
    """
    rng = np.random.default_rng(5)
    strikes = np.cumsum(rng.lognormal(-3.0, 2.0, 200))
    truth = np.exp(-strikes)
    high = truth * (1 + 0.1 * rng.uniform(size=200))
    low = truth * (1 - 0.1 * rng.uniform(size=200))
    corners, heights = allocation_prices._corners(strikes, high, low)
    inside = (strikes[1:-2] < corners) & (corners < strikes[2:-1])
    assert 20 < inside.sum() < 197
    excess = heights[inside] / np.exp(-corners[inside]) - 1
    assert excess.max() <= 1e-9


@pytest.mark.parametrize("noise", [0.3, 0.31])
def test_prices_as_small_as_errors_leave_a_distribution(noise):
    """Seen to fail: a mass of 8e29, where a lower bound on prices fell below 0."""
    found = allocation_prices.enclosed(noise, 8, upper=False)
    assert found.masses.min() >= 0.0
    assert found.zero_mass >= 0.0
    assert found.masses.sum() + found.zero_mass == pytest.approx(1.0, rel=1e-9)
    assert found.masses @ found.values / 8 == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("noise", [100.0, 1e5])
def test_much_noise_leaves_a_gaussian(noise):
    """An independent value: sums of many ratios near 1 are normal.

    Seen to fail by a factor with doubled sums, whose grid reached 1 % beyond a sum that
    varies by far less; the prices took 10 s, since an atom at 0 counted under a tilt.
    """
    steps, epsilon = 100, 0.3 / noise
    exact = gaussian.gaussian_delta(noise * math.sqrt(steps), epsilon)
    for found, tolerance in (
        (allocation_loss.tightest(noise, steps, True), 2e-3),
        (allocation_loss.directions(noise, steps, True, 400), 5e-2),
    ):
        for one in found:
            delta = allocation_loss.upper_delta(one, 1, epsilon)
            assert delta == pytest.approx(exact, rel=tolerance)
