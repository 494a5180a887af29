"""The search ends on the private side, whatever the function does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import lower_bounds
from accounting.core import numerics


@given(root=st.floats(1e-4, 1e8), guess=st.floats(1e-4, 1e8), power=st.floats(0.1, 20))
def test_ends_just_above_the_root(root, guess, power):
    def excess(noise):
        return 700.0 if noise == 0 else power * math.log(root / noise)

    found = numerics.smallest_noise(excess, guess)
    assert root <= found <= root * (1 + 2.1e-4)
    low = lower_bounds.largest_insufficient_noise(excess, guess)
    assert root * (1 - 1.1e-4) <= low < root


@given(st.floats(0.1, 10.0))
def test_a_flat_and_noisy_function_is_no_excuse(root):
    """Saturated at both ends, with ripples: what is returned was evaluated to pass."""

    def excess(noise):
        value = 5 * math.log(root / noise) if noise else 40.0
        return min(max(value + 1e-4 * math.sin(1e5 * noise), -40.0), 40.0)

    found = numerics.smallest_noise(excess, 1.0)
    assert excess(found) <= 0
    assert found == pytest.approx(root, rel=1e-3)


@pytest.mark.parametrize("root", [0.4, 0.7])
@pytest.mark.parametrize("guess", [0.01, 0.3, 0.6, 1.0])
def test_noise_at_which_nothing_is_proven_is_left_behind(guess, root):
    """Seen to end at NaN: between infinite values, or to one, secants have no slope."""

    def excess(noise):
        return math.inf if noise < 0.5 else math.log(root / noise)

    found = numerics.smallest_noise(excess, guess)
    assert max(root, 0.5) <= found <= max(root, 0.5) * (1 + 2.1e-4)


def test_degenerate_ends():
    assert numerics.smallest_noise(lambda _: -1.0, 1.0) == 0.0
    assert numerics.smallest_noise(lambda _: 1.0, 1.0) == math.inf
    assert lower_bounds.largest_insufficient_noise(lambda _: -1.0, 1.0) == 0.0


def test_lower_epsilon_refutes_with_and_without_an_upper_bound():
    for upper in (20.0, math.inf):
        found = lower_bounds.lower_epsilon(lambda e: math.exp(-e), upper, 1e-5)
        assert math.exp(-found) > 1e-5
        assert found == pytest.approx(math.log(1e5), rel=2e-5)
    assert lower_bounds.lower_epsilon(lambda _: 1.0, math.inf, 1e-5) == math.inf
