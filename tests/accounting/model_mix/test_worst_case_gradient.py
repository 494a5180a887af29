"""The cover against the function that it bounds, and what it refuses."""

import math

import numpy as np
import pytest

from accounting.claims import model_mix
from accounting.claims.model_mix import (
    SLACK,
    equal_coordinates_lose_most,
    log_density,
    log_excess_moments,
)

#: Largest shift, width, most order: the authors' setting, and far to both sides.
SETTINGS = [
    (0.2985, 33.58, 6),
    (2.985, 33.58, 4),
    (0.0156, 1.76, 9),
    (0.1, 300.0, 5),
    (1e-3, 5.0, 12),
]


def slopes(shift, width, most_order):
    """ln A_k / s^2."""
    return np.logaddexp(0.0, log_excess_moments(shift, width, most_order)) / shift**2


@pytest.mark.parametrize(("shift", "width", "order"), SETTINGS[:2])
def test_what_is_covered_holds_at_shifts_in_between(shift, width, order):
    assert equal_coordinates_lose_most(shift, width, order)
    allowed = slopes(shift, width, order) * (1 + SLACK)
    random = np.random.default_rng(0)
    least = math.log(1e-4 / shift) if shift > 1e-4 else 0.0
    for smaller in shift * np.exp(random.uniform(least, 0.0, 8)):
        assert (slopes(smaller, width, order) <= allowed).all()


@pytest.mark.parametrize("width", [0.5, 5.0, 33.0, 300.0])
@pytest.mark.parametrize("shift", [3e-4, 1e-2, 0.3])
def test_the_limit_is_a_bound_for_all_smaller_shifts(width, shift):
    limit = model_mix._limit(shift, width, 8)
    for share in (1.0, 0.7, 0.1, 0.05):
        assert (slopes(shift * share, width, 8) <= limit).all()
    # And not much more than it has to be, where shifts are small.
    if shift < 1e-3:
        assert (limit <= 1.2 * slopes(shift, width, 8)).all()


@pytest.mark.parametrize("width", [0.3, 1.5, 4.0, 40.0])
def test_the_density_bends_as_the_proof_of_the_limit_says(width):
    step = 1e-3
    x = np.arange(-width / 2 - 6, width / 2 + 6, step)
    psi = -log_density(x, width)
    second = np.diff(psi, 2) / step**2
    third = np.diff(psi[::20], 3) / (20 * step) ** 3
    # Differences of values that are exact to some 1e-15.
    assert second.min() >= -1e-7
    assert second.max() <= 1 + 1e-7
    assert np.abs(third).max() <= 2


def covered(planted, monkeypatch):
    """Whether the authors' setting is covered when ln(A_k - 1) has been changed."""
    monkeypatch.setattr(model_mix, "log_excess_moments", planted)
    shift, width, order = SETTINGS[0]
    allowed = model_mix._slopes(shift, 1.0, width, order) * (1 + SLACK)
    return model_mix._covers(shift, width, allowed, 1e-6)


def test_a_function_that_is_too_large_in_between_is_not_covered(monkeypatch):
    def bulging(height, shift, width, order):
        bulge = height * math.exp(-10 * math.log(shift / 0.05) ** 2)
        return log_excess_moments(shift, width, order) + bulge

    assert covered(lambda *at: bulging(0.0, *at), monkeypatch)
    assert not covered(lambda *at: bulging(0.2, *at), monkeypatch)
