"""Laws of the number of runs: tables that are sampled exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from accounting.claims.selection import (
    SHAPES,
    WHOLE,
    as_good_as,
)
from tests.accounting.selection.laws import law


@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_are_multiples_of_2_to_the_minus_64_that_add_up_to_1(shape):
    for mean in (1.0, 1.5, 30.0):
        found = law(shape, mean)
        assert sum(found.shares) == WHOLE
        assert min(found.shares) >= 0
        assert found.mean == pytest.approx(mean, abs=1e-4)


def test_what_is_drawn_has_exactly_the_table_as_its_law():
    found = law(3.0, 4.0)
    edge = 0
    for number, share in enumerate(found.shares, 1):
        assert found.draw(edge) == number
        edge += share
        assert found.draw(edge - 1) == number
    assert edge == WHOLE


def test_shapes_are_those_of_scipy_without_its_0():
    numbers = np.arange(1, 15)
    for found, theirs in (
        (law(math.inf, 5.0), stats.poisson(4.9651142317)),
        (law(1.0, 5.0), stats.geom(0.2, loc=0)),
    ):
        expected = theirs.pmf(numbers) / (1 - theirs.cdf(0))
        np.testing.assert_allclose(found.probabilities[:14], expected, atol=1e-5)


def test_the_derivative_is_that_of_the_generating_function():
    found, x = law(10.0, 6.0), np.array([0.0, 1e-12, 0.1, 0.5, 1.0])
    numbers = np.arange(1, len(found.shares) + 1)
    direct = [
        float(found.probabilities @ (numbers * (1 - y) ** (numbers - 1))) for y in x
    ]
    np.testing.assert_allclose(found.derivative(x), direct, rtol=1e-11)


@pytest.mark.parametrize("shape", [3.0, 10.0, math.inf])
def test_a_good_candidate_is_tried_as_surely_as_by_so_many_runs(shape):
    found = as_good_as(16, shape)
    assert found.success() == pytest.approx(1 - 0.9**16, abs=1e-6)
    assert found.mean > 16
