"""Discretisation: it preserves both members of the pair, and dominates."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.core.pld import dominating_pairs
from accounting.core.pld.dominating_pairs import Atoms


def hockey_stick(loss, epsilon):
    gain = -np.expm1(np.minimum(epsilon - loss.losses, 0.0))
    return float(loss.masses @ gain) + loss.infinite_mass


def spread(pair, x, low=-math.inf, high=math.inf):
    edges = np.union1d(np.array(dominating_pairs.support(pair)), x)
    return dominating_pairs.spread(pair, edges, low, high)


def exact_remove_delta(rate, noise, epsilon):
    """One step, in fifty digits: P(L > epsilon) - e^epsilon Q(L > epsilon)."""
    mpmath.mp.dps = 50
    q, s, e = (mpmath.mpf(value) for value in (rate, noise, epsilon))
    inside = (mpmath.e**e - 1 + q) / q
    if inside <= 0:
        return 1 - mpmath.e**e
    x = s**2 * mpmath.log(inside) + mpmath.mpf(1) / 2
    tail = mpmath.ncdf(-x / s)
    shifted = mpmath.ncdf((1 - x) / s)
    return (1 - q) * tail + q * shifted - mpmath.e**e * tail


PAIRS = {"rate": st.floats(1e-6, 0.99), "noise": st.floats(0.2, 20.0)}


@settings(deadline=None, max_examples=40)
@given(**PAIRS, places=st.lists(st.floats(-8.0, 8.0), max_size=20))
def test_spread_preserves_the_masses_of_both_members(rate, noise, places):
    # Seen to fail with the shares of a loss exchanged.
    loss = spread(dominating_pairs.remove_pair(rate, noise), np.array(places) * noise)
    assert loss.masses.sum() == pytest.approx(1.0, abs=1e-11)
    lower = (loss.masses * np.exp(-loss.losses)).sum()
    assert lower == pytest.approx(1.0, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    **PAIRS,
    places=st.lists(st.floats(-8.0, 8.0), max_size=20),
    epsilon=st.floats(0.0, 5.0),
)
def test_spread_step_dominates_the_exact_one(rate, noise, places, epsilon):
    # Seen to fail with losses moved to the lower of both points.
    loss = spread(dominating_pairs.remove_pair(rate, noise), np.array(places) * noise)
    exact = float(exact_remove_delta(rate, noise, epsilon))
    assert hockey_stick(loss, epsilon) >= exact * (1 - 1e-9) - 1e-17


@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.3, 0.9])
@pytest.mark.parametrize("noise", [0.4, 1.0, 30.0])
def test_points_are_exact(rate, noise):
    """At a point nothing is lost: the quadrature alone is seen there."""
    pair = dominating_pairs.remove_pair(rate, noise)
    x = np.array([0.6, 2.0, 5.0, 9.0]) * noise
    loss = spread(pair, x)
    for epsilon in map(float, pair.loss(x)):
        exact = float(exact_remove_delta(rate, noise, epsilon)) if epsilon > 0 else 0
        if exact > 1e-22:
            # Absolutely, as much as the digits of epsilon leave.
            assert hockey_stick(loss, epsilon) == pytest.approx(exact, rel=2e-8)


@given(
    atoms=st.lists(
        st.tuples(st.floats(1e-6, 1.0), st.floats(-5.0, 5.0)), min_size=1, max_size=20
    ),
    ends=st.tuples(st.floats(-6.0, 0.0), st.floats(0.0, 6.0)),
    epsilon=st.floats(0.0, 6.0),
)
def test_clipping_dominates_and_costs_nothing_below_the_upper_end(atoms, ends, epsilon):
    # Seen to fail with large losses moved down to the end, and with them made infinite.
    masses, losses = (np.array(column) for column in zip(*atoms, strict=True))
    whole = Atoms(masses, losses)
    found = whole.clipped(*ends)
    exact = hockey_stick(whole, epsilon)
    assert hockey_stick(found, epsilon) >= exact * (1 - 1e-12)
    if epsilon <= ends[1]:
        assert hockey_stick(found, epsilon) == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert found.masses.sum() + found.infinite_mass == pytest.approx(masses.sum())


@pytest.mark.parametrize(
    "kind", [dominating_pairs.remove_pair, dominating_pairs.add_pair]
)
def test_what_is_clipped_of_a_pair_dominates_the_whole(kind):
    x = np.linspace(-6, 8, 2000)
    whole = spread(kind(0.3, 0.7), x)
    found = spread(kind(0.3, 0.7), x, -0.2, 0.25)
    assert found.infinite_mass > whole.infinite_mass
    assert found.masses.sum() + found.infinite_mass == pytest.approx(1.0, abs=1e-12)
    for epsilon in (0.0, 0.1, 0.24):
        exact = hockey_stick(whole, epsilon)
        assert hockey_stick(found, epsilon) == pytest.approx(exact, rel=1e-4)
    assert hockey_stick(found, 0.3) > hockey_stick(whole, 0.3)


def test_what_is_outside_of_the_points_is_not_left_out():
    """Losses above them are infinite, and those below are rounded up to the first."""
    pair = dominating_pairs.remove_pair(0.3, 0.7)
    x = np.linspace(-1.0, 1.5, 500)
    found = dominating_pairs.spread(pair, x, -math.inf, math.inf)
    below, above = pair.upper_tails(x[0], x[-1])
    assert min(below, above) > 1e-2
    assert found.infinite_mass == pytest.approx(above, rel=1e-12)
    assert found.losses[0] == pytest.approx(pair.loss(x[:1])[0], rel=1e-12)
    assert found.masses[0] >= below
    assert found.masses.sum() == pytest.approx(1.0 - above, abs=1e-11)


def test_mixture_of_parts_adds_masses():
    part = Atoms(np.array([0.25, 0.75]), np.array([-0.5, 0.0]))
    other = Atoms(np.array([0.5]), np.array([0.5]), 0.5)
    mixed = dominating_pairs.mix([(0.8, part), (0.2, other)])
    np.testing.assert_allclose(mixed.masses, [0.2, 0.6, 0.1])
    np.testing.assert_allclose(mixed.losses, [-0.5, 0.0, 0.5])
    assert mixed.infinite_mass == pytest.approx(0.1)


def test_a_tilt_loses_no_loss_however_rare_or_large() -> None:
    """Seen to fail where weights without their masses underflow."""
    masses = np.array([1 - 1e-3, 1e-3, 1e-305])
    atoms = dominating_pairs.Atoms(masses, np.array([0.0, 0.15, 0.3]))
    log_moment, mean, _ = atoms.cumulants(5000.0)
    assert mean == pytest.approx(0.3, rel=1e-12)
    assert log_moment == pytest.approx(1500 + math.log(1e-305), rel=1e-12)
    means = [atoms.cumulants(order)[1] for order in (1e2, 1e3, 2e3, 4e3, 8e3)]
    assert means == sorted(means)
