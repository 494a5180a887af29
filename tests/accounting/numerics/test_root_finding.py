"""Both ends of a search were evaluated, and the upper one is on the private side."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.core.numerics import log_ratio, threshold


class Recorded:
    """A function that keeps what it was asked."""

    def __init__(self, function):
        self.function, self.values = function, {}

    def __call__(self, point):
        assert point not in self.values, "evaluated twice"
        self.values[point] = self.function(point)
        return self.values[point]


@given(
    root=st.floats(1e-6, 1e6),
    guess=st.floats(1e-6, 1e6),
    power=st.floats(0.01, 30),
    relative=st.sampled_from([1e-9, 1e-4, 0.1]),
)
def test_the_ends_are_evaluated_neighbours(root, guess, power, relative):
    excess = Recorded(lambda x: power * math.log(root / x) if x else 700.0)
    low, high = threshold(excess, guess, relative=relative)
    assert excess.values[low] > 0 >= excess.values[high]
    assert high - low <= relative * high
    assert len(excess.values) < 100


@given(root=st.floats(1e-3, 1e3), ripple=st.floats(0.0, 0.1))
def test_ripples_and_jumps_leave_the_upper_end_sufficient(root, ripple):
    def rippled(x):
        jump = 5.0 if x < root else -5.0
        return jump * abs(math.sin(1e4 * x)) ** 9 + ripple * math.sin(1e6 * x + 1)

    excess = Recorded(lambda x: rippled(x) if x else 1.0)
    low, high = threshold(excess, 1.0, relative=1e-6)
    assert excess.values[low] > 0 >= excess.values[high]
    assert 0 <= high - low <= 1e-6 * high


@given(root=st.floats(1e-200, 1e200))
def test_without_a_tolerance_the_ends_are_next_to_each_other(root):
    low, high = threshold(lambda x: root - x, 1.0, relative=0.0)
    assert high == root
    assert low == math.nextafter(root, 0.0)


def test_an_exact_root_is_sufficient_and_does_not_end_the_search():
    assert threshold(lambda x: 3.0 - x, 1.0, relative=1e-3)[1] >= 3.0
    # The first secant step hits a root that is not the least.
    flat = Recorded(lambda x: 0.0 if x >= 2.0 else 2.0 - x + 1e-3)
    low, high = threshold(flat, 8.0, relative=1e-4)
    assert low < 2.0 <= high <= 2.0 * (1 + 1e-4)


def test_where_all_or_nothing_suffices():
    assert threshold(lambda _: 0.0, 1.0, relative=0.1) == (0.0, 0.0)
    assert threshold(lambda _: 1.0, 1.0, relative=0.1, most=50.0) == (50.0, math.inf)
    excess = Recorded(lambda x: 1.0 if x == 0 else -1.0)
    assert threshold(excess, 1.0, relative=0.1, least=1e-3) == (0.0, 1e-3)


@pytest.mark.parametrize("value", [0.0, 1e-320, 1e-5, math.nextafter(1e-5, 1), 1.0])
def test_a_logarithm_of_a_ratio_has_the_sign_of_the_comparison(value):
    for target in (1e-5, math.nextafter(1.0, 0.0), 1e-300, 1e-310):
        assert (log_ratio(value, target) > 0) == (value > target)
        assert math.isfinite(log_ratio(value, target))
