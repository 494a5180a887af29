"""Sums of losses from above: exact small cases, deep tails, errors on the safe side."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import lower_bounds
from accounting.core.pld import inversion
from accounting.core.pld.dominating_pairs import Atoms
from accounting.core.pld.inversion import Contour
from accounting.core.pld.privacy_profile import FINE, Composition


def exact_delta(loss: float, num_steps: int, epsilon: float) -> mpmath.mpf:
    """Returns delta of ``num_steps`` losses of +-loss, as a binomial sum."""
    mpmath.mp.dps = 50
    above = 1 / (1 + mpmath.e ** (-mpmath.mpf(loss)))
    total = mpmath.mpf(0)
    for count in range(num_steps + 1):
        value = (2 * count - num_steps) * mpmath.mpf(loss)
        if value > epsilon:
            weight = mpmath.binomial(num_steps, count)
            weight *= above**count * (1 - above) ** (num_steps - count)
            total += weight * (1 - mpmath.e ** (epsilon - value))
    return total


def randomized_response(loss):
    """Losses +-loss, the one above e^loss times as likely."""
    above = 1 / (1 + np.exp(-loss))
    return Atoms(np.array([1 - above, above]), np.array([-loss, loss]))


def test_delta_is_met_deep_into_the_tail():
    # delta is about 1e-16 in the second case; an untilted transform gives noise there.
    for num_steps, epsilon in ((7, 0.35), (400, 18.05), (1000, 12.05), (1000, 0.05)):
        exact = float(exact_delta(0.1, num_steps, epsilon))
        loss = randomized_response(0.1)
        found = Composition(loss, num_steps).at(epsilon, FINE)
        below = lower_bounds.lower_delta_of_sum(loss, num_steps, epsilon)
        assert exact * (1 - 1e-4) <= below <= exact
        # Sums lie on a grid: where epsilon lies just between, smoothing costs nothing.
        assert exact <= found.delta(epsilon) <= exact * (1 + 1e-4)


@settings(deadline=None, max_examples=80)
@given(
    order=st.floats(0.01, 30.0),
    period=st.floats(0.05, 40.0),
    variance=st.floats(1e-8, 1.0),
    count=st.integers(16, 3000),
    num_steps=st.integers(1, 300),
    epsilon=st.floats(0.0, 5.0),
)
def test_any_contour_gives_a_valid_bound(
    order, period, variance, count, num_steps, epsilon
):
    # Seen to fail with the end of the sum over j left out; from below, with what
    # smoothing adds, or what wraps around, left in.
    contour = Contour(order=order, period=period, variance=variance, count=count)
    exact = float(exact_delta(0.05, num_steps, epsilon))
    loss = randomized_response(0.05)
    total = inversion.invert(loss, num_steps, contour)
    assert total.delta(epsilon) >= exact * (1 - 1e-12)
    wrapped = lower_bounds.wrapped(loss, num_steps, contour, epsilon)
    assert lower_bounds.of_sum(total, epsilon, wrapped) <= exact * (1 + 1e-12)


def test_smoothing_takes_nothing_off():
    # Seen to fail with a normal of mean 0 added to the sum.
    contour = Contour(order=2.0, period=20.0, variance=0.25, count=4000)
    total = inversion.invert(Atoms(np.ones(1), np.array([3.0])), 1, contour)
    assert 1 - math.exp(-2) <= total.delta(1.0) <= (1 - math.exp(-2)) * (1 + 1e-3)


def test_the_transform_is_as_accurate_as_it_says():
    # Seen to fail with the remainder of the interpolation left out.
    rng = np.random.default_rng(1)
    weights, losses = rng.dirichlet(np.ones(40)), rng.normal(size=40)
    contour = Contour(order=1.0, period=6.0, variance=1e-4, count=500)
    z, error = inversion._transform(weights, losses, contour)
    y = 2 * math.pi / contour.period * np.arange(contour.count + 1)
    exact = np.exp(1j * np.outer(y, losses)) @ weights - 1
    assert np.all(np.abs(z - exact) <= error + 1e-13)


def test_losses_need_no_grid():
    rng = np.random.default_rng(0)
    masses = rng.dirichlet(np.ones(5))
    losses = rng.normal(size=5)
    for epsilon in (0.3, 2.0):
        sums = np.add.outer(np.add.outer(losses, losses), losses).ravel()
        weights = np.multiply.outer(np.multiply.outer(masses, masses), masses).ravel()
        exact = float(weights @ -np.expm1(np.minimum(epsilon - sums, 0.0)))
        found = Composition(Atoms(masses, losses), 3).at(epsilon, FINE).delta(epsilon)
        assert exact <= found <= exact * (1 + 1e-3)


def test_epsilon_is_where_delta_is_met_and_barely():
    total = Composition(randomized_response(0.1), 400).at(9.0, FINE)
    for delta in (1e-3, 1e-6, 1e-9):
        epsilon = total.epsilon(delta)
        assert total.delta(epsilon) <= delta
        assert total.delta(epsilon * (1 - 1e-6)) > delta


def test_infinite_loss_is_never_forgotten():
    loss = Atoms(np.array([0.9]), np.array([0.0]), 0.1)
    total = Composition(loss, 3).at(100.0, FINE)
    assert 1 - 0.9**3 <= total.delta(100.0) <= (1 - 0.9**3) * (1 + 1e-9)
    assert total.epsilon(0.27) == np.inf


def test_a_rare_large_loss_counts_in_full_from_below():
    """Seen to fail with large losses cut, and with all that is split counted twice."""
    masses, losses = np.array([0.5, 0.4999, 1e-4]), np.array([-0.1, 0.1, 4.0])
    sums = np.add.outer(np.add.outer(losses, losses), losses).ravel()
    weights = np.multiply.outer(np.multiply.outer(masses, masses), masses).ravel()
    exact = float(weights @ -np.expm1(np.minimum(1.0 - sums, 0.0)))
    found = lower_bounds.lower_delta_of_sum(Atoms(masses, losses), 3, 1.0)
    assert exact * (1 - 1e-4) <= found <= exact


def test_a_loss_that_is_nearly_always_infinite_can_be_tilted():
    # Seen to fail with the moment summed as 1 plus little.
    _, log_moment = Atoms(np.array([1e-20]), np.array([0.1]), 1.0).tilted(0.0)
    assert log_moment == pytest.approx(math.log(1e-20))
