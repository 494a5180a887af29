"""Sums of likelihood ratios, spread or merged: enclosed, and tight."""

import math

import numpy as np
import pytest
from scipy import integrate, special

from accounting.claims import random_allocation
from accounting.core.pld import dominating_pairs


def call(ratios, k):
    gains = np.maximum(ratios.values / ratios.num_terms - k, 0.0)
    return float(ratios.masses @ gains) + ratios.lost


def put(ratios, k):
    gains = np.maximum(k - ratios.values / ratios.num_terms, 0.0)
    return float(ratios.masses @ gains) + ratios.zero_mass * k


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
        call(random_allocation.allocation(noise, 2, upper), k)
        for upper in (True, False)
    )
    assert below <= exact * (1 + 1e-8)
    assert above >= exact * (1 - 1e-8)
    assert above <= below * (1 + 1e-3)


@pytest.mark.parametrize("count", [3, 4])
def test_sums_enclose_an_enumerated_one(count):
    """Seen to fail with a pair of unlike atoms counted once in a doubled sum."""
    masses = np.array([0.3, 0.3, 0.25, 0.1, 0.05])
    values = np.array([0.25, 0.5, 1.0, 2.0, 8.0])
    values /= masses @ values
    one = random_allocation.Ratios(
        num_terms=1, values=values, masses=masses, zero_mass=0.0, lost=0.0
    )
    sums, weights = values, masses
    for _ in range(count - 1):
        sums = np.add.outer(sums, values).ravel()
        weights = np.multiply.outer(weights, masses).ravel()
    bounds = []
    for upper in (True, False):
        two = random_allocation.add(one, one, upper, 300)
        more = two if count == 4 else one
        bounds.append(random_allocation.add(more, two, upper, 300))
    for k in (0.4, 0.8, 1.0, 1.7, 4.0):
        for price, sign in ((call, 1), (put, -1)):
            exact = float(np.maximum(sign * (sums / count - k), 0.0) @ weights)
            above, below = (price(each, k) for each in bounds)
            assert below * (1 - 1e-9) <= exact <= above * (1 + 1e-9)
            assert above - below < 2e-3


@pytest.mark.parametrize("noise", [100.0, 1e5])
def test_much_noise_leaves_a_gaussian(noise):
    """An independent value: sums of many ratios near 1 are normal.

    Seen to fail by a factor where the grid reached 1 % beyond a sum that varies by far
    less.
    """
    steps, epsilon = 100, 0.3 / noise
    exact = dominating_pairs.gaussian_delta(noise * math.sqrt(steps), epsilon)
    cells = random_allocation.NUM_CELLS
    for one in random_allocation.directions(noise, steps, True, cells):
        delta = random_allocation.upper_delta(one, 1, epsilon)
        assert delta == pytest.approx(exact, rel=3e-3)
