"""Discretisation: it preserves both members of the pair, and dominates."""

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.pld import dominating_pairs, loss_distribution


def hockey_stick(step, epsilon):
    gain = -np.expm1(np.minimum(epsilon - step.losses, 0.0))
    return float(step.masses @ gain) + step.infinite_mass


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


@given(
    atoms=st.lists(
        st.tuples(st.floats(1e-6, 1.0), st.floats(-5.0, 5.0)), min_size=1, max_size=20
    ),
    spacing=st.floats(1e-4, 1.0),
)
def test_spread_preserves_the_masses_of_both_members(atoms, spacing):
    masses, losses = (np.array(column) for column in zip(*atoms, strict=True))
    step = loss_distribution.spread(masses, losses, spacing)
    assert step.masses.sum() == pytest.approx(masses.sum(), rel=1e-12)
    lower = (masses * np.exp(-losses)).sum()
    assert (step.masses * np.exp(-step.losses)).sum() == pytest.approx(lower, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    rate=st.floats(1e-6, 0.99),
    noise=st.floats(0.2, 20.0),
    spacing=st.floats(1e-3, 0.3),
    epsilon=st.floats(0.0, 5.0),
)
def test_discretized_step_dominates_the_exact_one(rate, noise, spacing, epsilon):
    # Seen to fail with losses rounded to the nearest grid point.
    step = loss_distribution.discretize(
        dominating_pairs.remove_pair(rate, noise), spacing, tail_mass=1e-18
    )
    exact = float(exact_remove_delta(rate, noise, epsilon))
    assert hockey_stick(step, epsilon) >= exact * (1 - 1e-9) - 1e-17


@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.3, 0.9])
@pytest.mark.parametrize("noise", [0.4, 1.0, 30.0])
def test_grid_points_are_exact(rate, noise):
    """At a grid point nothing is lost: the quadrature alone is seen there."""
    spacing = 1e-3 if noise < 10 else 1e-4
    step = loss_distribution.discretize(
        dominating_pairs.remove_pair(rate, noise), spacing, tail_mass=1e-25
    )
    for index in (1, 7, 40):
        epsilon = index * spacing
        exact = float(exact_remove_delta(rate, noise, epsilon))
        if exact > 1e-22:
            assert hockey_stick(step, epsilon) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    "kind", [dominating_pairs.remove_pair, dominating_pairs.add_pair]
)
def test_what_is_cut_off_becomes_infinite_loss(kind):
    step = loss_distribution.discretize(kind(0.3, 1.0), 0.01, tail_mass=1e-2)
    assert 1e-3 < step.infinite_mass <= 1e-2
    assert step.masses.sum() + step.infinite_mass == pytest.approx(1.0, abs=1e-12)


def test_mixture_of_parts_adds_masses():
    part = loss_distribution.LossDistribution(
        spacing=0.5, first=-1, masses=np.array([0.25, 0.75]), infinite_mass=0.0
    )
    other = loss_distribution.LossDistribution(
        spacing=0.5, first=1, masses=np.array([0.5]), infinite_mass=0.5
    )
    mixed = loss_distribution.mix([(0.8, part), (0.2, other)])
    np.testing.assert_allclose(mixed.masses, [0.2, 0.6, 0.1])
    assert mixed.first == -1
    assert mixed.infinite_mass == pytest.approx(0.1)
