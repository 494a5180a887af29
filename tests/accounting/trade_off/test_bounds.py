"""The trade-off: against the best tests of mechanisms whose best tests are known."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special
from scipy.optimize import linprog

from accounting import profiles, statement
from accounting.claims.model_mix import Mixing
from accounting.core import accountant
from accounting.profiles import RATES, TradeOff
from tests.accounting.plans import make_plan


def poisson(rate, steps=1):
    return make_plan("poisson", 100, rate, steps)


@pytest.mark.parametrize("false_positive_rate", [0.0, 0.01, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (3.0, 0.1), (20.0, 1e-9)])
def test_a_point_bounds_the_worst_mechanism_tightly(
    false_positive_rate, epsilon, delta
):
    """Its best test by a linear program (Kairouz et al. 2015, section 3)."""
    share = math.exp(epsilon) / (1 + math.exp(epsilon))
    used = np.array([delta, (1 - delta) * share, (1 - delta) * (1 - share), 0.0])
    unused = used[::-1]
    best = linprog(-used, A_ub=[unused], b_ub=[false_positive_rate], bounds=(0, 1))
    found = TradeOff(((epsilon, delta),))
    rate = found.true_positive_rate(false_positive_rate)
    assert rate == pytest.approx(-best.fun, abs=1e-9)
    # The advantage is the total variation.
    assert found.advantage == pytest.approx(abs(used - unused).sum() / 2, abs=1e-9)


@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_the_best_test_of_a_poisson_step_is_bounded_closely(noise):
    """Neyman and Pearson: its threshold is on the one value that is observed."""
    plan = poisson(10)
    found = profiles.trade_off(plan, noise_multiplier=noise)
    thresholds = np.linspace(-6 * noise, 1 + 6 * noise, 401)
    ghost = special.ndtr(-thresholds / noise)
    example = 0.9 * ghost + 0.1 * special.ndtr((1 - thresholds) / noise)
    # Either may be taken for the other.
    tests = [(ghost, example), (1 - example, 1 - ghost)]
    for wrong, right in tests:
        most = [found.true_positive_rate(float(rate)) for rate in wrong]
        assert np.all(right <= most)
    for rate in (0.001, 0.01, 0.1, 0.5):
        best = max(
            np.interp(rate, *(each[np.argsort(one[0])] for each in one))
            for one in tests
        )
        # One step is far from Gaussian, as which the points are chosen.
        assert found.true_positive_rate(rate) <= best * 1.04
    best = float(np.max(example - ghost))
    assert best <= found.advantage <= best * 1.01


@pytest.mark.parametrize("asked", [{}, {"max_examples_per_user": 3}])
def test_deterministic_batches_are_gaussian(small_plan, asked):
    """Two epochs at noise 2: the mechanism is sqrt(2)/2-GDP, exactly."""
    plan = small_plan("deterministic")
    found = profiles.trade_off(plan, noise_multiplier=2.0, **asked)
    mu = asked.get("max_examples_per_user", 1) * math.sqrt(2) / 2
    assert found.mu == pytest.approx(mu, rel=1e-12)
    for rate in (1e-9, 0.001, 0.2, 0.99):
        exact = float(special.ndtr(special.ndtri(rate) + mu))
        assert exact <= found.true_positive_rate(rate) <= exact * (1 + 1e-9)
    exact = 2 * float(special.ndtr(mu / 2)) - 1
    assert exact <= found.advantage <= exact * (1 + 1e-9)


@pytest.mark.parametrize(
    ("sampler", "gaussian"),
    [("persistent-shuffle", True), ("dynamic-shuffle", True), ("poisson", False)],
)
def test_no_mu_is_stated_where_it_is_a_limit_alone(small_plan, sampler, gaussian):
    found = profiles.trade_off(small_plan(sampler), noise_multiplier=2.0, rates=(0.01,))
    assert (found.mu is not None) == gaussian


@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1)), min_size=1, max_size=5),
    st.floats(0, 1),
)
def test_more_points_never_give_a_larger_bound(points, rate):
    some, every = TradeOff(tuple(points[1:])), TradeOff(tuple(points))
    assert every.true_positive_rate(rate) <= some.true_positive_rate(rate)
    assert every.advantage <= some.advantage
    # No bound is better than guessing, where nothing is known.
    assert every.true_positive_rate(rate) >= rate
    assert TradeOff(()).true_positive_rate(rate) == 1.0


@pytest.mark.parametrize(
    ("plan", "noise"),
    [
        (make_plan("poisson", 10_000, 100, 200), 0.8),
        # The claim is far in the tail, which is not Gaussian: 17.2 % was said for 14.6.
        (make_plan("poisson", 36_800_000, 65_536, 562), 0.5472),
    ],
)
def test_few_points_do_nearly_as_well_as_many(plan, noise):
    claim = accountant.epsilon(plan, noise_multiplier=noise, delta=1e-6).guarantee
    few = profiles.trade_off_of_claim(
        plan, noise_multiplier=noise, epsilon=claim, delta=1e-6
    )
    assert len(few.points) <= 8
    many = profiles.trade_off(
        plan, noise_multiplier=noise, rates=tuple(np.geomspace(1e-4, 0.5, 40))
    )
    for rate in RATES:
        best = many.true_positive_rate(rate)
        assert best <= few.true_positive_rate(rate) * 1.003
        assert few.true_positive_rate(rate) <= 1.01 * best
    # The claim alone says far less.
    alone = TradeOff(((claim, 1e-6),)).true_positive_rate(0.01)
    assert few.true_positive_rate(0.01) < 0.7 * alone


def test_a_theorem_and_no_guarantee_say_no_more_than_they_prove(small_plan):
    mixing = Mixing(mix_width=0.2, l2_norm_clip=1.0)
    said = statement.privacy_statement(
        small_plan("poisson"),
        noise_multiplier=1.0,
        delta=1e-5,
        l2_norm_clip=1.0,
        theorem=mixing,
    )
    assert said.trade_off == TradeOff(((said.epsilon.guarantee, 1e-5),))
    nothing = statement.privacy_statement(
        small_plan("deterministic"), noise_multiplier=0.0, delta=1e-5
    )
    assert nothing.to_json()["attacks"] is None
    assert "attacks" not in nothing.to_text()
