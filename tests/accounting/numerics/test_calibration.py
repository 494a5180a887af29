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


@pytest.mark.parametrize("root", [0.4, 0.7])
@pytest.mark.parametrize("guess", [0.01, 0.3, 0.6, 1.0])
def test_noise_at_which_nothing_is_proven_is_left_behind(guess, root):
    """Seen to end at NaN: between infinite values, or to one, secants have no slope."""

    def excess(noise):
        return math.inf if noise < 0.5 else math.log(root / noise)

    found = numerics.smallest_noise(excess, guess)
    assert max(root, 0.5) <= found <= max(root, 0.5) * (1 + 2.1e-4)


def test_an_addition_to_delta_is_spent_and_only_once():
    """Of a mechanism whose delta is e^-epsilon; half of the target is for the cost."""

    def delta(epsilon):
        return math.exp(-epsilon) + cost(epsilon)

    def cost(epsilon):
        return 4e-7 * epsilon

    found = numerics.epsilon_after_cost(cost, lambda point: -math.log(point), 1e-5)
    assert delta(found) <= 1e-5 < delta(0.999 * found)


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
