"""The dominating pairs of one step."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.core.pld import dominating_pairs

KINDS = (
    dominating_pairs.remove_pair,
    dominating_pairs.add_pair,
    dominating_pairs.replace_pair,
)
RATES = st.floats(1e-9, 0.999)
NOISES = st.floats(0.05, 100.0)


@pytest.mark.parametrize("kind", KINDS)
@given(rate=RATES, noise=NOISES)
def test_loss_increases_with_x(kind, rate, noise):
    loss = kind(rate, noise).loss(np.linspace(-8 * noise, 1 + 8 * noise, 200))
    assert np.all(np.diff(loss) >= -1e-13 * np.abs(loss[1:]))


@pytest.mark.parametrize("kind", KINDS)
@given(rate=RATES, noise=NOISES)
def test_masses_are_probabilities_of_both_members(kind, rate, noise):
    pair = kind(rate, noise)
    _, masses, x = pair.nodes(np.array([-1 - 9 * noise, 1 + 9 * noise]))
    assert masses.sum() == pytest.approx(1.0, abs=1e-12)
    # Q = P e^-L: fails if the two weights are exchanged in the loss.
    assert (masses * np.exp(-pair.loss(x))).sum() == pytest.approx(1.0, abs=1e-8)


def test_loss_by_hand():
    # q = 1/2, s = 1: at x = 1/2 both components of P are equal to N(0, 1).
    assert dominating_pairs.remove_pair(0.5, 1.0).loss(np.array([0.5]))[0] == 0.0
    by_hand = math.log(0.5 + 0.5 * math.exp(1.5))
    assert dominating_pairs.remove_pair(0.5, 1.0).loss(np.array([2.0]))[
        0
    ] == pytest.approx(by_hand)
    assert dominating_pairs.add_pair(0.5, 1.0).loss(np.array([-2.0]))[
        0
    ] == pytest.approx(-by_hand)
